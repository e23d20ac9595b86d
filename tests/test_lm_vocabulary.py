"""Vocabularies: the bytes of every token, prompts, chat templates, end tokens, agreement of two models."""

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from smcgen.errors import ModelError, UsageError
from smcgen.lm.vocabulary import Vocabulary
from tests.tiny_models import MARKUP, byte_level, sentencepiece

TEXTS = ["ab a 1é\n", "  two  blanks 12", "naïve 😀 <think> x", "\t\r\n\x00", "日本語 ab"]


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_spell_every_text(text):
    vocabulary = Vocabulary.from_tokenizer(byte_level(), "m")
    ids = vocabulary.encode(text, chat=False).ids
    assert ids[0] == vocabulary.bos_id
    assert vocabulary.decode(ids) == text
    vocabulary = Vocabulary.from_tokenizer(sentencepiece(), "m")
    ids = vocabulary.encode(text, chat=False).ids
    assert ids[:1] == (1,)
    assert vocabulary.decode(ids) == " " + text.replace("<unk>", "")  # the blank that SentencePiece puts in front
    assert vocabulary.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text


def test_special_tokens_are_no_text():
    tokenizer = byte_level()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, "m")
    for token in MARKUP:
        i = tokenizer.convert_tokens_to_ids(token)
        assert i in vocabulary.special
        assert vocabulary.tokens[i] == b""
        assert vocabulary.spelling[i] == token.encode()
    assert vocabulary.tokens[tokenizer.convert_tokens_to_ids("<think>")] == b"<think>"
    assert len(vocabulary) == len(tokenizer)


def test_an_emoji_split_over_tokens():
    vocabulary = Vocabulary.from_tokenizer(byte_level(), "m")
    ids = vocabulary.encode("😀", chat=False).ids[1:]
    assert len(ids) == 4
    assert b"".join(vocabulary.tokens[i] for i in ids) == "😀".encode()
    assert vocabulary.decode(ids[:3]) == "�"
    assert vocabulary.decode(ids) == "😀"


def test_wordpiece_and_word_level_add_what_their_decoder_adds():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert Vocabulary.from_tokenizer(tokenizer, "m").tokens == (b"", b" play", b"ing", b" now")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0, "y": 1}, unk_token="x")))
    assert Vocabulary.from_tokenizer(words, "m").tokens == (b" x", b" y")


def test_ids_that_no_token_has_are_special():
    backend = Tokenizer(models.WordLevel({"x": 0, "y": 3}, unk_token="x"))
    vocabulary = Vocabulary.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "m")
    assert len(vocabulary) == 4
    assert vocabulary.special == {1, 2}


def test_bos_is_never_double():
    tokenizer = byte_level()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, "m")
    bos = vocabulary.bos_id
    for prompt, chat in (("ab", False), ("<s>ab", False), ("<s>ab", None), ("ab", True), ("ab", None)):
        ids = vocabulary.encode(prompt, chat).ids
        assert ids[0] == bos, (prompt, chat)
        assert ids.count(bos) == 1, (prompt, chat)
    assert vocabulary.encode("", chat=None).ids == (bos,)


def test_when_the_chat_template_applies():
    tokenizer = byte_level()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, "m")
    chat = vocabulary.encode([{"role": "user", "content": "ab"}])
    assert chat.text == "<s><|user|>ab<|end|><|assistant|>"
    assert chat.messages == ({"role": "user", "content": "ab"},)
    assert list(chat.ids) == tokenizer.encode(chat.text, add_special_tokens=False)
    assert vocabulary.encode("ab").ids == vocabulary.encode("ab", chat=True).ids == chat.ids
    assert vocabulary.encode("ab").text == "ab"
    already = "<|user|>ab<|end|><|assistant|>"
    assert vocabulary.encode(already).messages is None
    assert vocabulary.encode(already).ids == chat.ids
    plain = Vocabulary.from_tokenizer(byte_level(template=None), "m")
    assert plain.encode("ab").messages is None


def test_ids_are_taken_as_they_are():
    vocabulary = Vocabulary.from_tokenizer(byte_level(), "m")
    assert vocabulary.encode([5, 6]).ids == (5, 6)
    assert vocabulary.encode(np.array([5, 6])).ids == (5, 6)
    assert vocabulary.encode((5, vocabulary.bos_id)).ids == (5, vocabulary.bos_id)


@pytest.mark.parametrize(
    ("prompt", "chat", "words"),
    [
        ("", False, "the prompt is empty"),
        ("", None, "the prompt is empty"),
        ([], None, "the prompt is empty"),
        ("ab", True, "has no chat template"),
        ([{"role": "user", "content": "x"}], None, "has no chat template"),
        ([3, 10_000], None, "token id 10000 is not in m"),
        ([-1], None, "token id -1 is not in m"),
        ([1.5], None, "a prompt is a text, a list of messages"),
    ],
)
def test_prompts_that_cannot_be_read(prompt, chat, words):
    vocabulary = Vocabulary.from_tokenizer(byte_level(bos=False, template=None), "m")
    with pytest.raises(UsageError, match=words) as error:
        vocabulary.encode(prompt, chat)
    assert "\n" not in str(error.value)


def test_a_template_that_refuses():
    vocabulary = Vocabulary.from_tokenizer(byte_level(), "m")
    for messages in ([{"role": "system", "content": "x"}], [{"content": "x"}]):
        with pytest.raises(UsageError, match="the chat template of m refuses these messages") as error:
            vocabulary.encode(messages if "role" in messages[0] else [*messages, {"role": "system"}])
        assert "\n" not in str(error.value)


def test_slow_tokenizers_are_refused():
    class Slow:
        pass

    with pytest.raises(ModelError, match="Slow is no fast tokenizer"):
        Vocabulary.from_tokenizer(Slow(), "m")


def test_end_ids_come_from_model_and_tokenizer():
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    vocabulary = Vocabulary.from_tokenizer(tokenizer, "m", end_ids=[end, 5, 99_999])
    assert vocabulary.end_ids == tuple(sorted({5, end, tokenizer.eos_token_id}))
    assert vocabulary.tokens[5] == b""
    assert 5 not in vocabulary.special


def test_padding_and_cutting():
    tokenizer = byte_level()
    assert len(Vocabulary.from_tokenizer(tokenizer, "m", size=len(tokenizer) + 50)) == len(tokenizer)
    cut = Vocabulary.from_tokenizer(tokenizer, "m", size=100)
    assert len(cut) == 100
    assert cut.bos_id is None
    with pytest.raises(UsageError, match="is not in m"):
        cut.encode("<|user|>", chat=False)


def test_agreement():
    a = Vocabulary.from_tokenizer(byte_level(), "base")
    assert a.difference(a) is None
    assert a.difference(Vocabulary.from_tokenizer(byte_level(), "draft")) is None
    permuted = Vocabulary.from_tokenizer(byte_level(order=-1), "draft")
    assert a.difference(permuted) == f"token 0 is '!' in base and {permuted.tokens[0]!r} in draft"
    longer = Vocabulary.from_tokenizer(byte_level(), "draft", size=len(a) - 1)
    assert a.difference(longer) == f"base has {len(a)} tokens and draft has {len(a) - 1}"
    markup = Vocabulary.from_tokenizer(byte_level(markup=[*MARKUP[:2], "<|human|>", *MARKUP[3:]]), "draft")
    assert "'<|user|>' in base and '<|human|>' in draft" in (a.difference(markup) or "")
    ends = Vocabulary.from_tokenizer(byte_level(), "draft", end_ids=[3])
    assert "ends at tokens" in (a.difference(ends) or "")
    assert a.difference(ends, ends=False) is None
    plain = Vocabulary("base", [b"a", b"x"])
    assert plain.difference(Vocabulary("d", [b"a", b"x"], special=[1])) == (
        "token 1 ('x') is a special token in d and text in base"
    )
    assert Vocabulary("base", [b"\xff"]).difference(Vocabulary("d", [b"a"])) == ("token 0 is b'\\xff' in base and 'a' in d")


def test_without_a_tokenizer():
    vocabulary = Vocabulary("table", [b"a", b"ab", b"b", b"<end>"], end_ids=[3])
    assert vocabulary.tokens == (b"a", b"ab", b"b", b"")
    assert vocabulary.encode("aabb").ids == (0, 1, 2)
    assert vocabulary.decode([0, 1, 2, 3]) == "aabb"
    with pytest.raises(UsageError, match="no token of table begins"):
        vocabulary.encode("abc")
    with pytest.raises(UsageError, match="empty"):
        vocabulary.encode("")
    begun = Vocabulary("table", [b"a", b"<s>"], special=[1], bos_id=1)
    assert begun.encode("a").ids == (1, 0)
    assert begun.encode("").ids == (1,)
    with pytest.raises(UsageError, match="token id 7"):
        Vocabulary("table", [b"a"], end_ids=[7])


def regex(pattern):
    return f'%llguidance {{"no_forcing": true}}\nstart: /{pattern}/'


def allowed(vocabulary, grammar, read=()):
    tokenizer = vocabulary.llguidance()
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    assert matcher.consume_tokens(list(read))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return {int(i) for i in np.flatnonzero(bits)}


def test_llguidance_masks():
    four = Vocabulary("table", [b"a", b"b", b"ab", b"<end>"], end_ids=[3])
    assert four.llguidance() is four.llguidance()
    assert allowed(four, regex("(ab)*")) == {0, 2, 3}
    assert allowed(four, regex("(ab)*"), read=[0]) == {1}
    two_ends = Vocabulary("table", [b"a", b"<e>", b"<f>"], end_ids=[1, 2])
    assert allowed(two_ends, regex("a*")) == {0, 1, 2}
    twins = Vocabulary("table", [b" ", b" ", b"a", b" a", b"<e>"], end_ids=[4])
    assert allowed(twins, regex(" a")) == {0, 1, 3}
    assert allowed(Vocabulary("table", [b"a", b"b"]), regex("a?")) == {0, 2}  # 2: the end that it does not have


def test_llguidance_on_real_tokenizers():
    for tokenizer in (byte_level(), sentencepiece()):
        vocabulary = Vocabulary.from_tokenizer(tokenizer, "m")
        mask = allowed(vocabulary, regex("[ a]b?"))
        assert {vocabulary.tokens[i] for i in mask} == {b" ", b"a"} | ({b"ab"} & set(vocabulary.tokens))
        markup = regex("<s>")  # the letters, never the special token that is spelled so
        assert vocabulary.bos_id not in allowed(vocabulary, markup)
        forced = LLMatcher(vocabulary.llguidance(), LLMatcher.grammar_from_regex("<s>"))
        assert vocabulary.bos_id not in forced.compute_ff_tokens()

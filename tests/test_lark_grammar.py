"""Lark grammars: public failures of other engines, refusals, and what is said about each grammar."""

import json
import time
from pathlib import Path

import lark as larklib
import numpy as np
import pytest
import torch

from smcgen.errors import Impossible, PotentialError, UsageError
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials.base import END, Prompt
from smcgen.potentials.check import check
from smcgen.potentials.emit import emit
from smcgen.potentials.json_schema import json_schema
from smcgen.potentials.lark import lark
from smcgen.potentials.regex import regex
from tests.grammars import GRAMMARS

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "constraints.jsonl").read_text().splitlines()]
MAKERS = {"lark": lark, "regex": regex, "json_schema": json_schema}
CPU = torch.device("cpu")
PROMPT = Prompt((), "")
PIECES = sorted(
    {
        case[k][i][j : j + n]
        for case in CASES
        for k in ("accept", "reject")
        for i in range(len(case[k]))
        for j in range(20)
        for n in (2, 3, 5)
    }
)
VOCABULARY = Vocabulary(
    "pieces",
    [*(bytes([i]) for i in range(256)), *(piece.encode() for piece in PIECES if piece), b"<|im_end|>"],
    special=(256 + len([p for p in PIECES if p]),),
    end_ids=(256 + len([p for p in PIECES if p]),),
)


def split(text, random):
    """A random spelling of `text`: single bytes and longer tokens."""
    data, ids = text.encode(), []
    single = random.random() < 0.3
    while data:
        fitting = [data[0], *(i for i in range(256, len(VOCABULARY) - 1) if data.startswith(VOCABULARY.tokens[i]))]
        ids.append(fitting[0] if single else int(random.choice(fitting)))
        data = data[len(VOCABULARY.tokens[ids[-1]]) :]
    return ids


def verdict(bound, ids, text):
    """Whether masks, extend and finish agree to let the text through, or to bar it."""
    state = bound.start([PROMPT], 1)
    words = torch.zeros(1, (len(VOCABULARY) + 31) // 32, dtype=torch.int32)
    for token in [*ids, VOCABULARY.end_ids[0]]:
        bound.mask(state, words, torch.ones(1, dtype=torch.bool))
        allowed = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")[token]
        if token in VOCABULARY.end_ids:
            finished = float(bound.finish(state, torch.tensor([0]), [text], [END])[0])
            assert allowed or finished == -np.inf
            assert not (allowed and bound.exact) or finished == 0
            return finished == 0
        value = float(bound.extend(state, torch.tensor([[token]]), torch.ones(1, dtype=torch.int64))[0])
        assert allowed == (value == 0)
        if not allowed:
            return False
    raise AssertionError


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_public_failures_of_other_engines(case):
    random = np.random.default_rng(0)
    if case["id"] == "backreference":
        with pytest.raises(UsageError, match="back-reference"):
            MAKERS[case["kind"]](case["spec"])
        return
    constraint = MAKERS[case["kind"]](case["spec"])
    bound = constraint.bind(VOCABULARY, (), CPU)
    for text in case["accept"] + case["reject"]:
        expected = text in case["accept"]
        assert constraint.accepts(text) == expected, text
        for ids in [list(text.encode()), *(split(text, random) for _ in range(4))]:
            assert verdict(bound, ids, text) == expected, (text, ids)


@pytest.mark.parametrize("name", ["calc", "json", "templates", "conf", "fruitflies"])
@pytest.mark.parametrize("exact", [False, True])
def test_laws_hold(name, exact):
    text, seeds = GRAMMARS[name]
    check(lark(text, exact=exact), VOCABULARY, [seeds[0], seeds[0][:-2]], histories=2, tokens=5)


@pytest.mark.parametrize("name", ["calc", "json", "conf", "fruitflies"])
def test_masks_of_the_fast_engine_and_of_the_exact_parser_agree(name):
    text, seeds = GRAMMARS[name]
    random = np.random.default_rng(0)
    bounds = [lark(text, exact=exact).bind(VOCABULARY, (), CPU) for exact in (False, True)]
    assert all(bound.verdict == "exact" for bound in bounds)
    for seed in seeds:
        states = [bound.start([PROMPT], 1) for bound in bounds]
        for token in split(seed + "é漢😀"[: len(seed) % 4], random):
            words = torch.zeros(2, (len(VOCABULARY) + 31) // 32, dtype=torch.int32)
            values = []
            for bound, state, row in zip(bounds, states, words, strict=True):
                bound.mask(state, row[None], torch.ones(1, dtype=torch.bool))
                values.append(float(bound.extend(state, torch.tensor([[token]]), torch.ones(1, dtype=torch.int64))[0]))
            assert torch.equal(words[0], words[1]), seed
            assert values[0] == values[1]


@pytest.mark.parametrize(
    ("grammar", "verdict"),
    [
        ('start: "a" "b"?', "exact"),
        ('start: "if" NAME | NAME "!"\nNAME: /[a-z]+/\n%ignore " "', "exact"),
        ('start: NAME "and" NAME | "not" NAME\nNAME: /[a-z]+/\n%ignore " "', "exact"),
        ("start: A B\nA: /a(?=b)/\nB: /[bc]/", "checked at the end"),
        ("%import common.ESCAPED_STRING\nstart: ESCAPED_STRING", "exact"),
        ('start: C "x"\nC: /\\/\\*.*?\\*\\//s', "exact"),
    ],
)
def test_verdicts(grammar, verdict):
    constraint = lark(grammar)
    assert constraint.verdict == verdict, constraint.doubts
    assert bool(constraint.doubts) == (verdict != "exact")
    assert constraint.exact == (verdict == "exact")


def test_keywords_that_run_into_words_mean_what_lark_says():
    constraint = lark('start: "if" NAME ":" | NAME "=" NAME\nNAME: /[a-z]+/\n%ignore " "')
    assert "'ifa' may be IF and something more" in constraint.notes[0]
    bound = constraint.bind(VOCABULARY, (), CPU)
    for text, expected in [("ifx:", True), ("ifx=a", True), ("if=a", True), ("iff:", True), ("if:", False)]:
        assert verdict(bound, list(text.encode()), text) == expected, text


def test_a_false_text_that_the_masks_let_through_has_weight_zero():
    grammar = "start: A B\nA: /a(?=b)/\nB: /[bc]/"
    constraint = lark(grammar)
    bound = constraint.bind(VOCABULARY, (), CPU)
    assert not constraint.accepts("ac")
    state = bound.start([PROMPT], 1)
    assert float(bound.extend(state, torch.tensor([list(b"ac")]), torch.tensor([2]))[0]) == 0
    assert bound.finish(state, torch.tensor([0]), ["ac"], [END]).tolist() == [-np.inf]
    exact = lark(grammar, exact=True)
    assert exact.verdict == "exact"
    assert not verdict(exact.bind(VOCABULARY, (), CPU), list(b"ac"), "ac")


def test_lalr_is_judged_by_lark():
    text, _ = GRAMMARS["turtle"]
    earley, lalr = lark(text), lark(text, parser="lalr")
    assert earley.accepts("cred f1")
    assert not lalr.accepts("cred f1")
    assert lalr.verdict == "checked at the end"
    assert "lalr" in " ".join(lalr.doubts)


def test_check_sees_a_text_that_the_masks_bar():
    constraint = lark('start: INT "m" "s" | NUM "ms" "!"\nINT: /[0-9]+/\nNUM: /[0-9]+(\\.[0-9]+)?/')
    check(constraint, VOCABULARY, ["5ms", "5m"], histories=0)
    constraint.translation = emit(constraint.cfg)
    with pytest.raises(PotentialError, match="here `accepts` says True"):
        check(constraint, VOCABULARY, ["5ms"], histories=0)


def test_indentation():
    text, seeds = GRAMMARS["python"]
    constraint = lark(text)
    assert any("levels of 4 blanks" in note for note in constraint.notes)
    bound = constraint.bind(VOCABULARY, (), CPU)
    for seed in seeds:
        assert verdict(bound, split(seed, np.random.default_rng(0)), seed)
    for false in ("if x:\ny\n", "if x:\n    y\n  z\n", "x"):
        assert not verdict(bound, list(false.encode()), false)
        assert not constraint.accepts(false)
    given = larklib.Lark(text, parser="lalr", postlex=constraint.loaded.options.postlex)
    assert lark(given).accepts(seeds[0])
    with pytest.raises(UsageError, match="LALR parser only"):
        lark(text, parser="earley")


def test_sources_of_a_grammar(tmp_path):
    (tmp_path / "names.lark").write_text("NAME: /[a-z]+/\n")
    path = tmp_path / "main.lark"
    path.write_text('start: "hi" NAME\n%import .names.NAME\n%ignore " "\n')
    for source in (path, str(path)):
        constraint = lark(source)
        assert constraint.accepts("hi bob")
        assert repr(constraint) == "lark('main.lark')"
    loaded = larklib.Lark("go: /x+/", start="go", parser="lalr")
    assert lark(loaded).accepts("xx")
    assert lark("go: /x+/", start="go").accepts("x")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: A\nA: /(a)\\1/", "terminal A .*back-reference"),
        ("start: A\nA: /a$/", "terminal A .*anchor to the whole text"),
        ("start: a", "'a'|a used but not defined"),
        ("start: A\nA: /a*/", r"zero-width regexps \(A: 'a\*'\): let the terminal match at least one character"),
        ("start: A\nA: /a(/", r"terminal A: /a\(/ is no regular expression \(missing \)"),
        ('start: "a" /[z-a]/i', r"rule start: /\[z-a\]/i is no regular expression \(bad character range"),
        ('start: A\nA: "a"\n%ignore /(?<=a+)b/', "terminal __IGNORE_0: .*look-behind requires fixed-width"),
        ("start:: A", "Unexpected|unexpected"),
        ('start: "a" b\n  | "c" (\nb: "x"', r'line 2 column 10: \| "c" \($'),
        ("start: _I\n%declare _I", "%declare leaves _I"),
        ("go: A\nA: /a/", "start"),
        ("nowhere.lark", "cannot read"),
        ("start: A\nA: /(?:[ab]{500}){500}/", "terminal A .*too large"),
    ],
)
def test_refusals_name_the_rule_and_the_reason(grammar, reason):
    with pytest.raises(UsageError, match=reason) as error:
        lark(grammar)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: " + "(A | B) " * 40 + '\nA: "a"\nB: "b"',
        "start: " + "[A] " * 60 + '\nA: "a"',
        'start: (A | B)~30\nA: "a"\nB: "b"',
        'start: x{A}\nx{y}: ((y | B)~9 | A)~9\nA: "a"\nB: "b"',
        "start: " + " | ".join(f'"w{i}"' for i in range(11_000)),
    ],
)
def test_grammars_that_explode_are_refused_at_once(grammar):
    before = time.monotonic()
    with pytest.raises(UsageError, match="alternatives"):
        lark(grammar)
    assert time.monotonic() - before < 5


def test_where_lark_gives_up_on_an_ambiguity_the_exact_parser_judges():
    grammar = lark('start: A | B\nA: "a "\nB: "a"\n%ignore " "\n')
    with pytest.raises(RuntimeError):
        grammar.loaded.parse("a ")
    assert [grammar.accepts(text) for text in ("a ", "a", " a  ", "aa", "")] == [True, True, True, False, False]


def test_templates_without_an_end_are_refused():
    with pytest.raises(UsageError, match="template t uses itself"):
        lark('start: t{"a"}\nt{x}: t{u{x}} | x\nu{x}: x x\n')
    assert lark('start: t{"a", "b"}\nt{x, y}: x t{y, x} | y').accepts("abb")


def test_long_chains_of_rules_do_not_overflow_the_engine():
    rules = "".join(f'r{i}: "a{i}" r{i + 1} | "b"\n' for i in range(2500))
    bound = lark(f'start: r0\n{rules}r2500: "z"\n', exact=False).bind(VOCABULARY, (), CPU)
    assert verdict(bound, list(b"a0a1b"), "a0a1b")


def test_many_terminals_are_compared_within_bounds():
    terminals = "".join(f"T{i}: /[a-z]{{{i % 7 + 1},{i % 11 + 9}}}{i}/\n" for i in range(150))
    before = time.monotonic()
    grammar = lark("start: " + " | ".join(f"T{i}" for i in range(150)) + "\n" + terminals)
    assert time.monotonic() - before < 60
    assert grammar.accepts("abcd149")


def test_a_cyk_parser_judges():
    constraint = lark(larklib.Lark('start: A "b"\nA: "a"', parser="cyk"))
    assert [constraint.accepts(text) for text in ("ab", "a", "", "abb", "c")] == [True, False, False, False, False]
    assert constraint.verdict == "checked at the end"


def test_other_misuse_is_refused():
    with pytest.raises(UsageError, match='write lexer="dynamic"'):
        lark(larklib.Lark('start: A "b"\nA: /[ab]+/', parser="earley", lexer="dynamic_complete"))
    with pytest.raises(UsageError, match='write "earley" or "lalr"'):
        lark('start: "a"', parser="cyk")
    with pytest.raises(UsageError, match="belong to the Lark object"):
        lark(larklib.Lark('start: "a"'), start="x")
    for grammar in (b'start: "a"', 3, None):
        with pytest.raises(UsageError, match="give the text or the path of a grammar"):
            lark(grammar)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "b" start', "the rule start derives no text at all, as start derives none: give it an alternative that ends"),
        ('start: x "a"\nx: "b" x', "as x derives none: give it an alternative that ends"),
        ('start: a x\na: "a"\nx: y "b"\ny: x "c" | x', "as x derives none"),
        ('start: a | b\na: "a" a\nb: "b" b', "as a derives none"),
        ("start: A\nA: /(?!a)a/", "as A derives none: let it match something"),
    ],
)
def test_an_impossible_grammar_is_refused_before_the_first_token(grammar, reason):
    with pytest.raises(Impossible, match=reason):
        lark(grammar)


def test_rules_that_derive_nothing_are_dropped_and_named():
    constraint = lark('start: "a" | x\nx: "b" x')
    assert constraint.notes == ("x derives no text",)
    bound = constraint.bind(VOCABULARY, (), CPU)
    assert not verdict(bound, [98], "b")
    assert verdict(bound, [97], "a")


def test_literals_spelled_like_special_tokens_are_text_and_reported():
    constraint = lark('start: "<|im_end|>" "x"')
    (warning,) = constraint.warnings(VOCABULARY)
    assert "spelled like a special token" in warning
    bound = constraint.bind(VOCABULARY, (), CPU)
    assert verdict(bound, list(b"<|im_end|>x"), "<|im_end|>x")


@pytest.mark.parametrize(
    ("grammar", "accept", "reject"),
    [
        ('start: "你好" "世界"?\n%import common.WS\n%ignore WS', ["你好", " 你好 世界"], ["你", "世界"]),
        ('start: start "+" start | "1"', ["1", "1+1+1"], ["1+", "+1"]),
        ('start: a\na: a b | \nb: "x"', ["", "xxx"], ["y"]),
        ('start: (A | B)*\nA: "x"\nB: "x" | "xy"', ["xyx", ""], ["y"]),
        ('start: "b"i "c"~2..3 [D]\nD.2: "d"', ["Bcc", "bcccd"], ["bc", "bccccd"]),
        ("%import python.STRING\nstart: STRING", ["'a\\'b'", 'rb"x"'], ["'''a'''", "'a"]),
        ('%import common.SIGNED_FLOAT -> N\nstart: N ("," N)*', ["-1.5,2e3", ".5"], ["1", "1.5,"]),
    ],
)
def test_awkward_grammars(grammar, accept, reject):
    constraint = lark(grammar)
    bound = constraint.bind(VOCABULARY, (), CPU)
    for text in accept + reject:
        assert verdict(bound, list(text.encode()), text) == (text in accept) == constraint.accepts(text), text

"""Where readings of one text may part: no text of a grammar is barred, whatever terminals share their beginnings."""

import itertools
import random
import warnings

import lark as larklib
import pytest

from smcgen.errors import Impossible, UsageError
from smcgen.potentials.cfg import Budget, Cfg
from smcgen.potentials.charparser import CharParser
from smcgen.potentials.engine import Recognizer
from smcgen.potentials.lark import lark
from smcgen.potentials.meeting import together

TEXTS = ["".join(letters) for n in range(5) for letters in itertools.product("ab ", repeat=n)]
TEXTS += ["ac", "c", "abc", "1", "a1", "#a", "a#b\n", "#\n", "a #x\nb", "ab#", "A", "aB"]
TERMINALS = [
    *('"a"', '"b"', '"ab"', '"ba"', '" "', '"a"i', "/[ab]+/", "/a+/", "/ab?/", "/b+?/", "/a(?!b)/", "/(?!ab)[ab]+/"),
    *("/[a-c]/", "/ +/", "/a|ab/", '"c"', r"/#[^\n]*/", r"/\w+/", r"/a\b/", '"a".."c"', "/a b/", "/(?i:a)b/", "/.+?b/"),
]
IGNORED = ['" "', "/ +/", r"/#[^\n]*\n?/", '"b"']


def drawn(source):
    """A random grammar, of few letters, so that its terminals overlap."""
    terminals, rules = (
        [f"T{i}" for i in range(source.randint(1, 3))],
        ["start", *(f"r{i}" for i in range(source.randint(0, 2)))],
    )

    def atom(depth):
        kind = source.random()
        if kind < 0.15:
            return source.choice(TERMINALS)
        if kind < 0.35 and len(rules) > 1:
            return source.choice(rules[1:])
        if kind < 0.5 and depth:
            return f"({alternatives(depth - 1)}){source.choice(['', '?', '*', '+', '~1..2'])}"
        return source.choice(terminals) + source.choice(["", "", "", "?", "*", "+"])

    def alternatives(depth):
        return " | ".join(" ".join(atom(depth) for _ in range(source.randint(1, 3))) for _ in range(source.randint(1, 2)))

    lines = [f"{rule}: {alternatives(2)}" for rule in rules]
    lines += [f"{name}{source.choice(['', '', '.2'])}: {source.choice(TERMINALS)}" for name in terminals]
    lines += [f"%ignore {source.choice(IGNORED)}" for _ in range(source.choice([0, 0, 0, 1, 2]))]
    return "\n".join(lines) + "\n"


def derived(loaded, text):
    """Whether lark derives `text`; None where it gives up."""
    try:
        loaded.parse(text)
    except larklib.exceptions.LarkError:
        return False
    except RuntimeError:
        return None
    return True


def compare(grammar, parser):
    """Whether masks of `grammar` come from the fast engine, held against lark's parser on all TEXTS."""
    try:
        loaded = larklib.Lark(grammar, parser=parser, **({"lexer": "dynamic"} if parser == "earley" else {}))
    except larklib.exceptions.LarkError:
        return False
    expected = {text: derived(loaded, text) for text in TEXTS}
    try:
        constraint = lark(grammar, parser=parser)
        if constraint.translation is None:
            return False
        engine = Recognizer(constraint.translation, "drawn")
    except Impossible:
        assert not any(expected.values()), grammar
        return False
    except UsageError:  # too many alternatives
        return False
    for text, yes in expected.items():
        found = engine(text)
        assert found or not yes, f"{text!r} is barred by {grammar!r}"
        assert yes is not False or not found or not constraint.exact, f"{text!r} is let through by {grammar!r}"
    return True


@pytest.mark.parametrize(("parser", "seeds"), [("earley", [*range(60), 689, 744]), ("lalr", range(100))])
def test_random_grammars(parser, seeds):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sum(compare(drawn(random.Random(seed)), parser) for seed in seeds) > 15


@pytest.mark.slow
@pytest.mark.parametrize("parser", ["earley", "lalr"])
def test_many_random_grammars(parser):
    for seed in range(1000, 3000):
        compare(drawn(random.Random(seed)), parser)


@pytest.mark.parametrize("parser", ["earley", "lalr"])
@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        ('start: INT "m" "s" | NUM "ms" "!"\nINT: /[0-9]+/\nNUM: /[0-9]+(\\.[0-9]+)?/', ["5ms", "5ms!", "5.1ms!", "5m"]),
        ('start: INT "m" "s" | NUM "ms" "!"\nINT.1: /[0-9]+/\nNUM: /[0-9]+(\\.[0-9]+)?/', ["5ms", "5ms!", "5.1ms!"]),
        ('start: ("[" LEVEL "]" | CHAR)+\nLEVEL: /[A-Z]+/\nCHAR: /[^\\n]/', ["x[INFO", "[INFO]x", "[a]", "["]),
        ('start: "i" "++" | NAME "+" SIGNED\nNAME: /[a-z]+/\nSIGNED: /[+-]?[0-9]+/', ["i++5", "i++", "j+5", "j++5"]),
        ('start: ("a" Z | Y+) "c"\nY: /[ab]/\nZ: "ab"', ["aabc", "abc", "ababc", "aab"]),
        # LALR reads NOT NAME AND NOT NAME.
        (
            '?start: both | "(" start ")"\n?both: both "and" one | one\n?one: "not" one | NAME\nNAME: /[a-z]+/\n%ignore " "',
            ["not and andnot x", "a and not b", "(a)"],
        ),
        # The same pair is also met after equal terminals, where LALR takes the longer one.
        (
            'start: INT "m" "s" | NUM "ms" "!" | "x" ("m" "s" | "ms")\nINT.1: /[0-9]+/\nNUM: /[0-9]+(\\.[0-9]+)?/',
            ["5ms", "xms"],
        ),
    ],
)
def test_terminals_after_others_that_overlap(grammar, texts, parser):
    constraint = lark(grammar, parser=parser)
    engine = CharParser(constraint.cfg).parse
    if parser == "lalr" and constraint.translation is not None:
        engine = Recognizer(constraint.translation, "given")
    else:
        assert "may be" in " ".join(constraint.notes)
    for text in texts:
        assert engine(text) or not constraint.accepts(text), text
        assert engine(text) == constraint.accepts(text) or not constraint.exact, text


def pairs(grammar, **how):
    """The pairs of different terminals that meet, by their first letters."""
    found = together(Cfg(larklib.Lark(grammar, maybe_placeholders=False), "grammar"), Budget(), **how)
    return [{a[0] + b[0] for a, b in part if a < b} for part in found]


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("start: A C | B D\nB: /[ab]/", "AB CD"),
        ('start: A C | B D\nB: "b"', "AB"),
        ('start: A E C | B E D\nB: /[ab]/\nE: "e"', "AB CD"),
        ("start: x C | y D\nx: A\ny: B?\nB: /ab?/", "AB AD BD CD"),
        ('start: A C | B D\nB: /[ab]/\n%ignore "x"', "AB CD A_ B_ C_ D_"),
        # C follows A in one place and D in another: without rival readings they are taken to meet.
        ('start: A C | "-" A D', "AM CD"),
        ('start: A "-" | B C | "-" A D\nB: /[ab]/', "AB AM BM CM"),
        ('start: A A C | B "-" D\nB: /[ab]/', "AB AM"),
    ],
)
def test_pairs_that_meet(rest, expected):
    found, apart = pairs(f'{rest}\nA: "a"\nC: "c"\nD: "d"\n')
    assert found | apart == set(expected.split())


def test_pairs_after_other_terminals():
    assert pairs('start: A C | B D\nA: "a"\nB: /[ab]/\nC: "c"\nD: "d"', one_reading=True) == [{"AB"}, {"CD"}]
    assert pairs('start: A C | A D\nA: "a"\nC: "c"\nD: "d"', one_reading=True) == [{"CD"}, set()]


@pytest.mark.parametrize(
    "grammar",
    [
        'start: NAME "=" NUM (";" NAME "=" NUM)*\nNAME: /[a-z]+/\nNUM: /[0-9]+/\n%ignore " "',
        'start: row ("\\n" row)*\nrow: cell ("," cell)*\ncell: PLAIN | QUOTED\nPLAIN: /[^,"\\n]+/\nQUOTED: /"[^"\\n]*"/',
        'start: (INT | FLOAT) ("+" (INT | FLOAT))*\nINT: /[0-9]+/\nFLOAT: /[0-9]+\\.[0-9]+/',
        'start: KEY ":" WORD | NAME ":" WORD "!"\nKEY: /[a-z]+/\nNAME: /[a-z]+/\nWORD: /[a-z]+/',
    ],
)
def test_ordinary_grammars_keep_the_fast_engine(grammar):
    constraint = lark(grammar)
    assert constraint.translation is not None, constraint.notes
    assert constraint.exact


@pytest.mark.parametrize(
    "grammar",
    [
        'start: NAME "and" NAME | "not" NAME\nNAME: /[a-z]+/\n%ignore " "',
        'start: (decl | call)+\ndecl: "int" NAME ";"\ncall: NAME "(" NAME? ")" ";"\nNAME: /[a-z]+/\n%ignore " "',
    ],
)
def test_lalr_grammars_with_keywords_keep_the_fast_engine(grammar):
    constraint = lark(grammar, parser="lalr")
    assert constraint.translation is not None, constraint.notes


def test_many_optional_parts_keep_the_fast_engine():
    constraint = lark("start: " + " ".join(f'["a{i}"]' for i in range(12)) + ' "z"')
    assert constraint.translation is not None, constraint.notes

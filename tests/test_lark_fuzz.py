"""The engines against lark itself on mutants of valid texts: no difference that is not declared."""

import random

import pytest

from smcgen.potentials.charparser import CharParser
from smcgen.potentials.engine import Recognizer
from smcgen.potentials.indent import LEVELS, STEP
from smcgen.potentials.lark import lark
from tests.grammars import GRAMMARS


def mutants(seeds, count, source):
    """Texts near valid ones: pieces dropped, doubled, moved between them, letters changed, blanks gone."""
    letters = [*sorted(set("".join(seeds))), " ", "\n", "é"]
    for _ in range(count):
        text = source.choice(seeds)
        for _ in range(source.choice([1, 1, 1, 2, 3])):
            kind, i = source.random(), source.randrange(len(text) + 1)
            j = min(len(text), i + source.choice([1, 1, 2, 3, 6]))
            if kind < 0.3:
                text = text[:i] + text[j:]
            elif kind < 0.5:
                text = text[:i] + source.choice(letters) + text[i:]
            elif kind < 0.65:
                text = text[:i] + source.choice(letters) + text[i + 1 :]
            elif kind < 0.8:
                other = source.choice(seeds)
                at = source.randrange(len(other) + 1)
                text = text[:i] + other[at : at + source.choice([1, 3, 8])] + text[i:]
            elif kind < 0.9:
                text = text.replace(" ", "", 1)
            else:
                text = text[:i] + " " + text[i:]
        yield text


def in_form(text):
    """Whether lines are indented as the masks of grammars with indentation do it."""
    lines = [line for line in text.split("\n") if line.strip(" ")]
    blanks = [len(line) - len(line.lstrip(" ")) for line in lines]
    return "\t" not in text and "\r" not in text and all(n % STEP == 0 and n <= STEP * LEVELS for n in blanks)


def compare(name, count, seed, parser="earley"):
    text, seeds = GRAMMARS[name]
    indented = "%declare" in text
    parser = "lalr" if indented else parser
    constraint = lark(text, parser=parser)
    exact = CharParser(constraint.cfg).parse
    engine = exact if constraint.translation is None else Recognizer(constraint.translation, name)
    if parser == "earley" or indented:
        for valid in seeds:
            assert constraint.accepts(valid), valid
    for mutant in [*seeds, *mutants(seeds, count, random.Random(seed))]:
        expected, found = constraint.accepts(mutant), engine(mutant)
        assert found or not expected or (indented and not in_form(mutant)), f"barred, although lark derives it: {mutant!r}"
        assert expected or not found or not constraint.exact, f"undeclared: {mutant!r}"
        if parser == "earley":
            assert exact(mutant) == expected, f"the exact parser errs: {mutant!r}"


@pytest.mark.parametrize("name", GRAMMARS)
def test_mutants(name):
    compare(name, 60, seed=1)


@pytest.mark.parametrize("name", sorted(set(GRAMMARS) - {"fruitflies", "recipe", "lark", "python"}))
def test_mutants_lalr(name):
    compare(name, 40, seed=2, parser="lalr")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("name", GRAMMARS)
def test_many_mutants(name, seed):
    compare(name, 400, seed)

"""Every outcome of a run of two particles with its probability, the engine's own functions making each step.

The state of a group after a round is its particles' tokens and weights; equal states are joined. All that a round decides by
chance is scripted: drafted tokens, acceptance, the token that ends a block, ancestors. One batched call of the proposal runs
every script from every state, and one batched call of `smc.round.step` every pair of blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smcgen.kernels import categorical
from smcgen.lm.batch import Reader
from smcgen.lm.vocabulary import Vocabulary
from smcgen.potentials import base as potentials
from smcgen.proposals import block, lenient
from smcgen.proposals import draft as draft_module
from smcgen.proposals.base import World
from smcgen.smc import factors
from smcgen.smc.ending import Ending
from smcgen.smc.factors import Potentials, Scorer
from smcgen.smc.keys import ACCEPT, BONUS, DRAFT
from smcgen.smc.particles import Block, Particles
from smcgen.smc.resampling import SCHEMES, systematic
from smcgen.smc.round import Algorithm, step
from smcgen.smc.schedule import Ramp
from smcgen.target import WHOLE
from tests.tables import START, TableLM

V, END, T, K = 3, 2, 3, 2  # tokens, the end token, the longest sample, drafted tokens
PROMPT = (1, 0)
EDGE = 1e-12


class SmallLM(TableLM):
    """Three tokens, probabilities in float64."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        super().__init__(torch.randn(START + 1, START + 1, V, generator=generator, dtype=torch.float64), "small")
        self.vocabulary = Vocabulary("small", (b"a", b"b", b""), special=frozenset({END}), end_ids=(END,), bos_id=None)


BASE, DRAFT_LM = SmallLM(0), SmallLM(7)
TEXTS = [(*body, END) for n in range(T) for body in itertools.product((0, 1), repeat=n)]
TEXTS += list(itertools.product((0, 1), repeat=T))


class Script:
    """Stands in for `Keys`: what a random number says is which outcome to take, and its probability is kept.

    A decision that is never asked for has no probability: as many scripts differ in it alone as it has outcomes."""

    def __init__(self, particles: int, chains: int, drafted: int):
        self.names = [(DRAFT, k, c) for k in range(drafted) for c in range(chains)]
        self.names += [(ACCEPT, k, c) for k in range(drafted) for c in range(chains)] + [(BONUS, 0, 0)]
        sizes = [2 if purpose == ACCEPT else V for purpose, _, _ in self.names]
        self.codes = torch.tensor(list(itertools.product(*map(range, sizes))))
        self.size = dict(zip(self.names, sizes, strict=True))
        self.particles, self.chains, self.states = particles, chains, 1
        self.item = torch.zeros(1, dtype=torch.int64)  # where numbers are made: on the CPU

    def begin(self, states: int) -> None:
        self.states, self.asked = states, set()
        self.probability = torch.ones(states * len(self.codes), self.particles, dtype=torch.float64)

    def uniform(self, purpose: int, round: Any, at: int, slots: int) -> torch.Tensor:
        chains = 1 if purpose == BONUS else self.chains
        columns = [self.names.index((purpose, at, c)) for c in range(chains)]
        self.asked |= {(purpose, at, c) for c in range(chains)}
        return self.codes[:, columns].repeat(self.states, self.particles).double()

    def take(self, probability: torch.Tensor) -> None:
        """Of the outcomes just taken, [G, N] or [G, N * M]."""
        self.probability *= probability.unflatten(1, (self.particles, -1)).prod(-1)

    def finish(self) -> torch.Tensor:
        for name in self.names:
            if name not in self.asked:
                self.probability /= self.size[name]
        return self.probability


@contextmanager
def scripted(script: Script) -> Iterator[None]:
    """Draws and tests of acceptance follow the script; all arithmetic is in float64."""

    def scaled(logits, temperature=1.0):
        return (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature

    def draw(log_mass, uniform, allowed=None):
        token, log_p = uniform.long(), log_mass.log_softmax(-1)
        log_q = log_p.gather(-1, token[..., None])[..., 0]
        nothing = log_mass.amax(-1) == -torch.inf
        script.take(torch.where(nothing, 1 / V, log_q.exp()))
        return token, torch.where(nothing, -torch.inf, log_q), log_mass.logsumexp(-1)

    accept = lenient.accept

    def scripted_accept(levels, log_p, log_q, candidates, uniform, leniency):
        log_r = lenient.log_excess(log_p, log_q, levels.cost[..., :-1]) - levels.mass[..., :-1].log()
        a = (leniency * (log_r - log_q).exp()).clamp(max=1)
        code = uniform.long()  # 0: accepted
        script.take(torch.where(code == 0, a, 1 - a).flatten(1))
        inside = torch.where(code == 0, a / 2, (1 + a) / 2).clamp(1e-300, 1 - 1e-16)
        return accept(levels, log_p, log_q, candidates, inside, leniency)

    def passes(uniform, chance):
        chance, code = chance.nan_to_num(0.5).clamp(0, 1), uniform.long()
        script.take(torch.where(code == 0, chance, 1 - chance))
        return code == 0

    with pytest.MonkeyPatch.context() as patch:
        for module in (categorical, draft_module):
            patch.setattr(module, "scaled", scaled)
        for module in (categorical, factors, lenient):
            patch.setattr(module, "draw", draw)
        patch.setattr(lenient, "accept", scripted_accept)
        patch.setattr(block, "passes", passes)
        yield


@dataclasses.dataclass
class Run:
    """gamma from E[Z-hat * weight of x], and the law of one draw, over all samples; both by enumeration."""

    measure: dict[tuple[int, ...], float]
    law: dict[tuple[int, ...], float]


def enumerate_runs(
    make: Any, alpha: float, particles: int = 2, chains: int = 1, threshold: float = 0.95, penalty: float | None = None
) -> Run:
    """All runs of the proposal that `make(reader)` returns, on the target BASE ** alpha."""
    # (tokens of each particle, numbers of the state) -> probability, probability * Z-hat up to the last resampling
    states = {(((),) * particles, (0.0,) * (particles + 2)): (1.0, 1.0)}
    done = Run(defaultdict(float), defaultdict(float))
    for round in range(T + 1):
        states = _ended(states, done)
        if not states:
            return done
        states = _round(list(states.values()), _particles(list(states), round), make, alpha, chains, threshold, penalty)
    raise AssertionError("a run does not end")


def _particles(keys: list, round: int) -> Particles:
    """The groups of these states."""
    particles = Particles.empty(len(keys), len(keys[0][0]), T, 1, torch.device("cpu"))
    particles.restart(list(range(len(keys))))
    for g, (texts, numbers) in enumerate(keys):
        for n, text in enumerate(texts):
            particles.tokens[g, n, : len(text)] = torch.tensor(text, dtype=torch.int64)
            particles.length[g, n] = len(text)
            particles.reason[g, n] = reason(text)
            particles.log_weight[g, n] = numbers[n]
        particles.log_z[g], particles.drawn[g] = numbers[-2], int(numbers[-1])
        particles.round[g] = round
    return particles


def reason(text: tuple[int, ...]) -> int:
    return potentials.END if text[-1:] == (END,) else potentials.BUDGET if len(text) == T else potentials.ALIVE


def _repeat(particles: Particles, index: torch.Tensor) -> Particles:
    return Particles(**{f.name: getattr(particles, f.name)[index] for f in dataclasses.fields(particles)})


def _put(reader: Reader, particles: Particles, chains: int) -> None:
    """The model has read all of every row but its last token."""
    context: Any = reader.context
    rows = particles.length.repeat_interleave(chains, 1).flatten()
    reader.prompt_length[:], reader.prompt_last[:] = len(PROMPT), PROMPT[-1]
    context.history[:, : len(PROMPT)] = torch.tensor(PROMPT)
    context.history[:, len(PROMPT) : len(PROMPT) + T] = particles.tokens.repeat_interleave(chains, 1).flatten(0, 1)
    context.length = len(PROMPT) + rows - 1


def first_blocks(make: Any, drafted: int = K) -> tuple[Block, torch.Tensor]:
    """Every first block of one particle, one chain, exponent 1, and its probability float64 [scripts]."""
    start = _particles([(((),), (0.0, 0.0, 0.0))], 0)
    blocks, probability = _blocks(start, make, 1.0, 1, Script(1, 1, drafted))
    return blocks, probability[:, 0]


def _blocks(before: Particles, make: Any, alpha: float, chains: int, script: Script) -> tuple[Block, torch.Tensor]:
    """Every block from every state, and its probability float64 [states * scripts, N]."""
    index = torch.arange(len(before.length)).repeat_interleave(len(script.codes))
    groups, count = len(index), before.length.shape[1]
    wide = _repeat(before, index)
    room = (len(PROMPT), T + 2)
    scorer = Scorer([BASE], [alpha], [(1.0, WHOLE)], (groups, count), *room, chains=chains)
    reader = Reader(DRAFT_LM, (1, groups, count * chains), *room)
    for r in (*scorer.readers, reader):
        _put(r, wide, chains)
    device = torch.device("cpu")
    none = Potentials([], [], (groups, count), V, lambda *_: [], device, chains)
    ends = torch.arange(V) == END
    world = World(scorer, none, Ending(ends, None, T), script, stratify=False)  # pyright: ignore[reportArgumentType]
    script.begin(len(before.length))
    with scripted(script):
        blocks = make(reader).extend(wide, world)
    return blocks, script.finish()


class Replay:
    """A proposal that returns blocks that are known."""

    block = K + 1

    def __init__(self, blocks: Block):
        self.blocks = blocks

    def extend(self, particles: Particles, world: World) -> Block:
        return self.blocks

    def trim(self, length: torch.Tensor) -> None:
        pass

    def fork(self, ancestors: torch.Tensor) -> None:
        pass


def _round(weights, before: Particles, make, alpha: float, chains: int, threshold: float, penalty: float | None) -> dict:
    """The states after one round, from states with (probability, probability * Z-hat) `weights`."""
    count = before.length.shape[1]
    script = Script(count, chains, K)
    blocks, probability = _blocks(before, make, alpha, chains, script)
    size = len(script.codes)
    chosen, state, chance = [], [], []
    for g in range(len(weights)):
        # Scripts of one particle that make the same block are joined; then all combinations over the particles.
        outcomes: list[dict] = [{} for _ in range(count)]
        for row in range(g * size, (g + 1) * size):
            for n in range(count):
                p = float(probability[row, n])
                if p > 0:
                    tokens = tuple(blocks.tokens[row, n, : blocks.counts[row, n]].tolist())
                    key = tokens, *(round_off(float(x[row, n])) for x in (blocks.log_weight, blocks.log_z))
                    first, known = outcomes[n].get(key, (row, 0.0))
                    outcomes[n][key] = first, known + p
        for combination in itertools.product(*(o.values() for o in outcomes)):
            chosen.append([row for row, _ in combination])
            state.append(g)
            chance.append(math.prod(p for _, p in combination))
    rows, columns = torch.tensor(chosen), torch.arange(count)
    blocks.hear()  # what the potentials say of the last tokens; nothing is left to be heard
    fields = {f.name: getattr(blocks, f.name) for f in dataclasses.fields(blocks)}
    blocks = Block(**{name: None if value is None else value[rows, columns] for name, value in fields.items()})
    after: dict = defaultdict(lambda: (0.0, 0.0))
    start = _repeat(before, torch.tensor(state))
    shares: list[torch.Tensor] = []

    def scheme(weight: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        shares.append(weight)
        return systematic(weight, uniforms)

    for low in (True, False):
        offset = torch.full((len(state), 2 * count), EDGE if low else 1 - EDGE, dtype=torch.float64)
        keys = SimpleNamespace(uniform=lambda *_, offset=offset: offset)
        no_models = SimpleNamespace(
            exponents=torch.tensor([alpha], dtype=torch.float64), trim=lambda length: None, fork=lambda ancestors: None
        )
        none = Potentials([], [], (len(state), count), V, lambda *_: [], torch.device("cpu"))
        world: Any = SimpleNamespace(scorer=no_models, potentials=none, keys=keys, stratify=False)
        algorithm = Algorithm(Replay(blocks), "systematic", threshold, Ramp(), penalty)  # pyright: ignore[reportArgumentType]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SCHEMES, "systematic", scheme)
            particles, info = step(start, world, algorithm)
        # The comb of two points has two positions: below and above where its second point leaves the first particle.
        first = shares[-1][:, 0] if count > 1 else torch.ones(len(state))
        share = torch.where(first >= 0.5, 2 * first - 1, 2 * first)
        share = torch.where(info.resampled, share if low else 1 - share, float(low))
        for i, g in enumerate(state):
            p = chance[i] * float(share[i])
            if p > 0:
                texts = tuple(
                    tuple(x[:n]) for x, n in zip(particles.tokens[i].tolist(), particles.length[i].tolist(), strict=True)
                )
                numbers = (*particles.log_weight[i].tolist(), float(particles.log_z[i]), float(particles.drawn[i]))
                key = texts, tuple(map(round_off, numbers))
                known, gained = after[key]
                rise = math.exp(float(particles.log_evidence[i]))
                after[key] = known + p * weights[g][0], gained + p * weights[g][1] * rise
    return dict(after)


def round_off(x: float) -> float:
    return round(x, 13)


def _ended(states: dict, done: Run) -> dict:
    """Takes out the states in which every particle has ended."""
    going = {}
    for key, (p, z) in states.items():
        texts, numbers = key
        if any(reason(text) == potentials.ALIVE for text in texts):
            going[key] = p, z
            continue
        weight = [math.exp(w) for w in numbers[: len(texts)]]
        for text, w in zip(texts, weight, strict=True):
            done.measure[text] += z * w / len(texts)
            done.law[text] += p * w / sum(weight)
    return going

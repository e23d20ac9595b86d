"""The factors of a target at work: language models scoring tokens, potentials following the texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smcgen.errors import UsageError
from smcgen.kernels.categorical import Drawn, draw, log_softmax, power_draw, score
from smcgen.kernels.truncate import truncate
from smcgen.lm.base import LanguageModel
from smcgen.lm.batch import Reader
from smcgen.potentials.base import END, STOP, Potential, Prompt
from smcgen.smc.asked import Asked, Reading, not_refused
from smcgen.smc.chains import offspring, widen
from smcgen.smc.host import Host
from smcgen.smc.particles import Particles
from smcgen.target import Truncation


class Scorer:
    """The language-model factors p_j**alpha_j. Factors of one model share a reader, hence a forward.

    Args:
        lms: the model of each factor.
        exponents: of each factor.
        laws: temperature and truncation of each factor.
        shape: (groups, particles).
        prompt_tokens, new_tokens, isolate: as in `Reader`.
        chains: M, the candidates of each particle that are read at a time, rows [G, N * M] (see `smc.chains`).
    """

    def __init__(
        self,
        lms: Sequence[LanguageModel],
        exponents: Sequence[float],
        laws: Sequence[tuple[float, Truncation]],
        shape: tuple[int, int],
        prompt_tokens: int,
        new_tokens: int,
        isolate: bool = False,
        chains: int = 1,
    ):
        self.temperatures = [temperature for temperature, _ in laws]
        self.truncations = [truncation for _, truncation in laws]
        self.chains = chains
        self.exponents = torch.tensor(exponents, dtype=torch.float64, device=lms[0].device)
        self.contrast = any(exponent < 0 for exponent in exponents)
        self.infinite = torch.zeros((), dtype=torch.bool, device=lms[0].device)  # a token of infinite target mass was seen
        self.columns: list[tuple[int, int]] = []  # of each factor: which reader, which copy
        owners: list[LanguageModel] = []
        copies: list[int] = []
        for lm in lms:
            if not any(lm is owner for owner in owners):
                owners.append(lm)
                copies.append(0)
            r = next(i for i, owner in enumerate(owners) if owner is lm)
            self.columns.append((r, copies[r]))
            copies[r] += 1
        self.readers = [
            Reader(lm, (c, shape[0], shape[1] * chains), prompt_tokens, new_tokens, isolate)
            for lm, c in zip(owners, copies, strict=True)
        ]

    def admit(self, groups: Sequence[int], prompts: Sequence[Sequence[Sequence[int]]]) -> None:
        """Groups begin anew; `prompts[j][i]` are the token ids that factor j reads in group `groups[i]`."""
        for r, reader in enumerate(self.readers):
            reader.admit(groups, [prompts[j] for j, (owner, _) in enumerate(self.columns) if owner == r])

    def read(self, particles: Particles, tokens: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
        """Every model reads the last committed token, then `tokens` int64 [G, N, T] (the first `counts` [G, N]) of live rows.

        Returns, for each factor, logits [G, N, T + 1, V], truncated: entry t is for the token after the t-th new one."""
        logits, alive = [], particles.alive
        for reader in self.readers:
            logits.append(reader.read(*reader.unread(particles.tokens, particles.length, alive, 1, (tokens, counts))))
        laws = zip(self.columns, self.temperatures, self.truncations, strict=True)
        return [truncate(logits[r][c], temperature, *truncation) for (r, c), temperature, truncation in laws]

    def score(self, logits: Sequence[torch.Tensor], tokens: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        """log p_j of given tokens: logits [G, N, T, V] per factor, tokens int64 and used bool [G, N, T].

        Returns float64 [G, N, T, J], 0 where unused."""
        columns = []
        for j, (r, _) in enumerate(self.columns):
            log_p = score(logits[j], tokens, self.temperatures[j])
            self.readers[r].watch(log_p, used)
            columns.append(log_p)
        found = columns[0][..., None] if len(columns) == 1 else torch.stack(columns, -1)
        found = torch.where(used[..., None], found, 0.0)
        if self.contrast:
            self.infinite |= ((self.exponents * found).sum(-1) == torch.inf).any()
        return found

    def local(self, logits: Sequence[torch.Tensor], scale: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        """log of the local target, sum_j scale alpha_j log p_j: logits [G, N, V] per factor, scale [G], used bool [G, N].

        Returns float64 [G, N, V] (unnormalised unless one factor has exponent 1)."""
        total: torch.Tensor | float = 0.0
        for j, (r, _) in enumerate(self.columns):
            log_p = log_softmax(logits[j], self.temperatures[j])
            self.readers[r].watch(log_p[..., 0], used)
            total = total + (self.exponents[j] * scale)[:, None, None] * log_p
        assert isinstance(total, torch.Tensor)
        if self.contrast:
            total = total.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)  # 0 / 0 is no mass
            self.infinite |= ((total == torch.inf).any(-1) & used).any()
        return total

    def draw(
        self,
        logits: Sequence[torch.Tensor],
        scale: torch.Tensor,
        uniform: torch.Tensor,
        allowed: torch.Tensor | None,
        used: torch.Tensor,
    ) -> tuple[Drawn, torch.Tensor]:
        """One token per row from the local target on the allowed tokens: arguments as in `local`, uniform float64 [G, N],
        allowed bool [G, N, V] or None. Also log p_j of each token, float64 [G, N, J]; it means nothing where none was drawn."""
        if len(self.columns) == 1 and not self.contrast:
            drawn = power_draw(logits[0], uniform, self.temperatures[0], (self.exponents[0] * scale)[:, None], allowed)
            self.readers[0].watch(drawn.log_z, used)
            return drawn, drawn.log_p[..., None]
        law = self.local(logits, scale, used)
        token, log_q, log_z = draw(law, uniform, allowed)
        left = torch.zeros_like(log_z) if allowed is None else log_z - law.logsumexp(-1)
        log_p = self.score([x[:, :, None] for x in logits], token[..., None], (used & (log_q != -torch.inf))[..., None])
        return Drawn(token, log_q, log_z, log_q + log_z, left), log_p[:, :, 0]

    def verify(self) -> None:
        """Raises UsageError if a token was seen that a model with a negative exponent gives probability 0 and others do not."""
        if self.infinite:
            raise UsageError(
                "a model with a negative exponent gives probability 0 to a token that the others give more, where the target "
                "is infinite: leave out what bars tokens in that model, or its factor"
            )

    def trim(self, length: torch.Tensor) -> None:
        """The samples have these lengths now, int64 [G, N]."""
        for reader in self.readers:
            reader.trim(widen(length, self.chains))

    def fork(self, ancestors: torch.Tensor) -> None:
        """Particle n becomes a copy of particle `ancestors[g, n]`."""
        self.follow(offspring(ancestors, self.chains))

    def follow(self, rows: torch.Tensor) -> None:
        """Row r, of particle or chain, becomes a copy of row `rows[g, r]`."""
        for reader in self.readers:
            reader.fork(rows)


@dataclass
class Potentials:
    """The potentials phi_i**beta_i of a target with the states of all rows. Texts live on the host, and so do the states of
    potentials that are not `on_device`: what those have to do is noted (see `smc.host`) and done by `join`.

    Attributes:
        bound: the potentials, bound to the run's vocabulary.
        exponents: beta_i.
        shape: (groups, particles).
        vocabulary_size: columns of a mask.
        text_of: tokens, lengths and reasons of some rows -> their texts.
        chains: M, the candidates of each particle that hard potentials follow at a time: their rows are [G, N * M] (see
            `smc.chains`), in `mask`, in `extend` and in `states`. Soft potentials read committed blocks only.
        host: what is to be done on the host.
    """

    bound: Sequence[Potential]
    exponents: Sequence[float]
    shape: tuple[int, int]
    vocabulary_size: int
    text_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[str]]
    device: torch.device
    chains: int = 1
    states: list[Any] = field(init=False)
    host: Host = field(init=False)

    def __post_init__(self) -> None:
        groups, particles = self.shape
        blank = [Prompt((), "")] * groups
        self.states = [potential.start(blank, particles * (self.chains if potential.hard else 1)) for potential in self.bound]
        self.host = Host(self.device)
        # Of the masks' numbers, which potential it is; the one after them is all together, and -1, the last, none.
        self.numbers = torch.tensor([*self.hard, len(self.bound), -1], device=self.device)

    @property
    def seconds(self) -> float:
        """Host time spent in potentials."""
        return self.host.seconds

    @property
    def rows(self) -> int:
        """R = N * M: rows of the hard potentials in each group."""
        return self.shape[1] * self.chains

    @property
    def hard(self) -> list[int]:
        """Places of the hard potentials in `bound`."""
        return [i for i, potential in enumerate(self.bound) if potential.hard]

    @property
    def sure(self) -> bool:
        """Whether the hard potentials refuse no token that their masks let through."""
        return all(potential.sure for potential in self.bound if potential.hard)

    @property
    def soft(self) -> list[int]:
        return [i for i, potential in enumerate(self.bound) if not potential.hard]

    @property
    def blame(self) -> int:
        """What is named when the hard potentials leave no token that ends the text: the only one, or all together."""
        return self.hard[0] if len(self.hard) == 1 else len(self.bound)

    @property
    def on_device(self) -> bool:
        """Whether all work is look-ups on the device: then no method waits for the host."""
        return all(potential.on_device for potential in self.bound)

    def hosted(self, which: Sequence[int]) -> list[int]:
        """Those of `which` that work on the host."""
        return [i for i in which if not self.bound[i].on_device]

    def aside(self, which: Sequence[int]) -> bool:
        """Whether any thread may do the work of `which`, but for finished texts."""
        return all(self.bound[i].any_thread for i in which)

    def join(self) -> None:
        """All that was noted is done."""
        self.host.join()

    def restart(self, groups: Sequence[int], prompts: Sequence[Prompt]) -> None:
        self.join()
        for potential, state in zip(self.bound, self.states, strict=True):
            potential.restart(state, groups, prompts)

    def mask(self, active: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `bits`, the tokens as bool [G, R, V]."""
        return self.ask(active).mask(active)

    def bits(self, active: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Tokens that every hard potential allows in the rows where `active` bool [G, R]; see `Asked.bits`."""
        return self.ask(active).bits(active)

    def ask(self, active: torch.Tensor, after: Reading | None = None) -> Asked:
        """Has masks made ready for the rows where `active` bool [G, R], R being N * M, except those that `after` refuses.

        What is launched between this and `Asked.bits`, the forward of a model, runs while the host works."""
        hosted = self.hosted(self.hard)
        if not hosted:
            return Asked(self, None)
        size = (len(hosted), active.numel(), (self.vocabulary_size + 31) // 32)
        refused = [] if after is None or after.task is None else [after.task]

        def work(rows: torch.Tensor, out: torch.Tensor) -> None:
            rows = not_refused(rows, refused)
            out.numpy().fill(-1)  # torch would wake its threads for it
            for i, bits in zip(hosted, out, strict=True):
                self.bound[i].mask(self.states[i], bits, rows)

        # Other threads may fill masks meanwhile, on a CPU too.
        task = self.host.later(work, [active.flatten()], (size, torch.int32), lazy=True, aside=self.aside(hosted))
        self.host.send()
        return Asked(self, task)

    def extend(self, which: Sequence[int], tokens: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`read`, and what they say of it at once."""
        return self.read(which, tokens, counts).result()

    def read(self, which: Sequence[int], tokens: torch.Tensor, counts: torch.Tensor) -> Reading:
        """Potentials `which` read int64 [G, R, T], the first `counts` [G, R] of each row (no token that ends a sample); R is
        N, or N * M for hard potentials."""
        hosted, task = self.hosted(which), None
        if hosted:

            def work(tokens: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
                for place, i in enumerate(hosted):
                    out[place] = self.bound[i].extend(self.states[i], tokens, counts)

            kind, aside = ((len(hosted), counts.numel()), torch.float64), self.aside(hosted)
            task = self.host.later(work, [tokens.flatten(0, 1), counts.flatten()], kind, aside=aside)
        there = set(which) - set(hosted)
        here = {i: self.bound[i].extend(self.states[i], tokens, counts).view(counts.shape) for i in which if i in there}
        return Reading(self, list(which), tuple(counts.shape), here, task)

    def finish(
        self, particles: Particles, ended: torch.Tensor, which: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`close`, and what they say of it at once."""
        return self.close(particles.tokens, particles.length, particles.reason, ended, which).result()

    def close(
        self,
        tokens: torch.Tensor,
        length: torch.Tensor,
        reason: torch.Tensor,
        ended: torch.Tensor,
        which: Sequence[int] | None = None,
        after: Sequence[Reading] = (),
    ) -> Reading:
        """The last step of the telescope of `which` (default: all) for rows `ended` bool [G, N], except those that one of
        `after` refuses: samples tokens int64 [G, N, L], length and reason int64 [G, N]."""
        which = list(range(len(self.bound)) if which is None else which)
        hosted, task = self.hosted(which), None
        for reading in after:
            if reading.here:
                ended = ended & ~reading.refused_here(self.shape[1])
        if hosted:
            refused = [reading.task for reading in after if reading.task is not None]

            def work(
                ended: torch.Tensor, tokens: torch.Tensor, length: torch.Tensor, reason: torch.Tensor, out: torch.Tensor
            ) -> None:
                rows = not_refused(ended, refused).nonzero()[:, 0]
                out.zero_()
                if len(rows):
                    texts, why = self.text_of(tokens[rows], length[rows], reason[rows]), reason[rows].tolist()
                    for place, i in enumerate(hosted):
                        at = rows * self.chains if self.bound[i].hard else rows
                        out[place, rows] = self.bound[i].finish(self.states[i], at, texts, why)

            kind = (len(hosted), ended.numel()), torch.float64
            sample = [ended.flatten(), tokens.flatten(0, 1), length.flatten(), reason.flatten()]
            # Where no text has ended nobody has to wait until the last token is read.
            task = self.host.later(work, sample, kind, idle=lambda ended, *_: not ended.any())
        here = {}
        if len(hosted) < len(which):
            last = tokens.gather(-1, (length - 1).clamp(min=0)[..., None])[..., 0]
            for i in set(which) - set(hosted):
                potential: Any = self.bound[i]
                here[i] = torch.where(ended, potential.close(self.states[i], last, reason), 0.0)
        return Reading(self, which, self.shape, here, task)

    def fork(self, ancestors: torch.Tensor) -> None:
        """int64 [G, N], places inside each group."""
        self._fork(self.soft, ancestors)
        self.follow(offspring(ancestors, self.chains))

    def follow(self, rows: torch.Tensor) -> None:
        """Row r of the hard potentials becomes a copy of row `rows[g, r]`, int64 [G, N * M]."""
        self._fork(self.hard, rows)

    def _fork(self, which: Sequence[int], places: torch.Tensor) -> None:
        if not which:
            return
        groups, rows = places.shape
        flat = (places + torch.arange(groups, device=places.device)[:, None] * rows).flatten()
        self._each(which, flat, lambda i, rows: self.bound[i].fork(self.states[i], rows))

    def rollback(self, counts: torch.Tensor, which: Sequence[int] | None = None) -> None:
        """The last `counts` tokens, int64 [G, R], that potentials `which` (default: the hard ones) read never happened."""
        which = self.hard if which is None else which
        self._each(which, counts.flatten(), lambda i, counts: self.bound[i].rollback(self.states[i], counts))

    def _each(self, which: Sequence[int], given: torch.Tensor, do: Callable[[int, torch.Tensor], None]) -> None:
        """`do` for each of `which`, with a tensor where it works: at once on the device, noted on the host."""
        hosted = self.hosted(which)

        def work(given: torch.Tensor) -> None:
            for i in hosted:
                do(i, given)

        if hosted:
            self.host.later(work, [given], aside=self.aside(hosted))
        for i in which:
            if i not in hosted:
                do(i, given)


def text_counts(counts: torch.Tensor, reason: torch.Tensor) -> torch.Tensor:
    """How many of a block's tokens prolong the text: all but the one that ended it, if one did."""
    return counts - ((reason == END) | (reason == STOP)).long()

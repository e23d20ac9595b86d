"""The state of a run: groups of N particles in tensors of fixed shape on one device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from smcgen.potentials.base import ALIVE, DEAD

if TYPE_CHECKING:
    from smcgen.smc.asked import Reading


@dataclass
class Particles:
    """G groups of N particles, J language-model factors, room for L generated tokens.

    Fields of shape [G, N, ...] follow the particle through resampling; fields of shape [G] belong to the group.
    """

    tokens: torch.Tensor  # int64 [G, N, L] generated tokens
    length: torch.Tensor  # int64 [G, N]
    reason: torch.Tensor  # int64 [G, N] ALIVE, END, STOP, BUDGET or DEAD
    stop_state: torch.Tensor  # int64 [G, N] of the stop automaton
    history: torch.Tensor  # int64 [G, N] hash of the tokens: equal samples have equal hashes
    log_weight: torch.Tensor  # float64 [G, N] since the group's last resampling
    log_p: torch.Tensor  # float64 [G, N, J] log p_j of the whole sample
    log_phi: torch.Tensor  # float64 [G, N] sum of beta_i log phi_i of the soft potentials, as far as they have read
    token_log_p: torch.Tensor  # float32 [G, N, L, J] log p_j of each token
    token_log_q: torch.Tensor  # float32 [G, N, L] log probability under the law the token was drawn from
    cause: torch.Tensor  # int64 [G, N] what killed it: a potential's place, the next number for all together, the one
    # after for the language models; -1 if it lives
    root: torch.Tensor  # int64 [G, N] the first particle it descends from
    log_evidence: torch.Tensor  # float64 [G] up to the last resampling
    scale: torch.Tensor  # float64 [G] of the models' exponents in the current intermediate target
    soft_scale: torch.Tensor  # float64 [G] of the soft potentials' exponents in it
    round: torch.Tensor  # int64 [G] rounds this group has run
    log_z: torch.Tensor  # float64 [G] sum of log Z_t over all tokens drawn with a known one
    drawn: torch.Tensor  # int64 [G] tokens drawn

    @classmethod
    def empty(cls, groups: int, particles: int, max_tokens: int, factors: int, device: torch.device) -> Particles:
        """Groups in which every particle is dead: places to be filled by `restart`."""
        shape = (groups, particles)

        def whole(*more: int, value: int = 0) -> torch.Tensor:
            return torch.full((*shape, *more), value, dtype=torch.int64, device=device)

        def real(*size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            tokens=whole(max_tokens),
            length=whole(),
            reason=whole(value=DEAD),
            stop_state=whole(),
            history=whole(),
            log_weight=real(*shape),
            log_p=real(*shape, factors),
            log_phi=real(*shape),
            token_log_p=real(*shape, max_tokens, factors, dtype=torch.float32),
            token_log_q=real(*shape, max_tokens, dtype=torch.float32),
            cause=whole(value=-1),
            root=whole(),
            log_evidence=real(groups),
            scale=real(groups),
            soft_scale=real(groups),
            round=torch.zeros(groups, dtype=torch.int64, device=device),
            log_z=real(groups),
            drawn=torch.zeros(groups, dtype=torch.int64, device=device),
        )

    @property
    def alive(self) -> torch.Tensor:
        """bool [G, N]: particles that go on drawing."""
        return self.reason == ALIVE

    @property
    def finished(self) -> torch.Tensor:
        """bool [G, N]: particles whose samples have come to their end."""
        return (self.reason != ALIVE) & (self.reason != DEAD)

    @property
    def done(self) -> torch.Tensor:
        """bool [G]: groups in which no particle goes on."""
        return ~self.alive.any(-1)

    def restart(self, groups: list[int]) -> None:
        """Empty samples of weight 1 in these groups; to anneal them to other exponents costs nothing."""
        where = torch.tensor(groups, device=self.length.device)
        for name in (
            "tokens",
            "length",
            "reason",
            "stop_state",
            "history",
            "log_weight",
            "log_p",
            "log_phi",
            "token_log_p",
            "token_log_q",
        ):
            getattr(self, name)[where] = 0  # ALIVE is 0
        self.cause[where] = -1
        self.root[where] = torch.arange(self.root.shape[1], device=where.device)
        self.log_evidence[where] = 0
        self.round[where] = 0
        self.log_z[where] = 0
        self.drawn[where] = 0
        self.scale[where] = 1
        self.soft_scale[where] = 1

    def retire(self, groups: list[int]) -> None:
        """No particle of these groups goes on."""
        self.reason[torch.tensor(groups, device=self.length.device)] = DEAD

    def select(self, ancestors: torch.Tensor) -> Particles:
        """Particle n of each group becomes a copy of particle `ancestors[g, n]` of the same group."""
        changed = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value.ndim > 1:
                index = ancestors.reshape(*ancestors.shape, *[1] * (value.ndim - 2)).expand(-1, -1, *value.shape[2:])
                changed[field.name] = value.gather(1, index)
        return replace(self, **changed)


class Drawn:
    """Drawn tokens, the last of which the hard potentials have read and may still refuse, though their masks let it through.

    What they say of it, `reading`, is heard late: on a GPU the host is at it while the device goes on."""

    log_weight: torch.Tensor  # float64 [G, N]
    reason: torch.Tensor  # int64 [G, N]
    cause: torch.Tensor  # int64 [G, N]
    reading: Reading | None

    def kill(self, dead: torch.Tensor, cause: torch.Tensor | int) -> None:
        """These particles (bool [G, N]) have weight 0, because of potential `cause` int64 [G, N], -1 if none is to blame."""
        self.reason = torch.where(dead, DEAD, self.reason)
        self.cause = torch.where(dead, cause, self.cause)
        self.log_weight = torch.where(dead, -torch.inf, self.log_weight)

    def hear(self) -> torch.Tensor | None:
        """What the potentials say of the last token counts from here on. bool [G, N], where they refuse it; None if there is
        nothing to hear."""
        if self.reading is None:
            return None
        change, cause = self.reading.result()
        self.reading = None
        chains = change.shape[1] // self.reason.shape[1]  # the first of several speaks for the particle
        change, cause = change[:, ::chains], cause[:, ::chains]
        self.log_weight = self.log_weight + change
        self.kill(change == -torch.inf, cause)
        return change == -torch.inf


@dataclass
class Block(Drawn):
    """What a proposal drew for every particle in one round: B tokens at most, ragged.

    `log_weight` is log gamma(x b) - log gamma(x) - log Q(b | x) for the language models and the hard potentials; soft
    potentials are added by the round. A particle that found no allowed token has reason DEAD, and so has one whose last token
    the hard potentials refuse, once that is heard.
    """

    tokens: torch.Tensor  # int64 [G, N, B]
    counts: torch.Tensor  # int64 [G, N] how many of them are real
    log_weight: torch.Tensor  # float64 [G, N]
    token_log_p: torch.Tensor  # float64 [G, N, B, J] log p_j, 0 beyond counts
    token_log_q: torch.Tensor  # float64 [G, N, B] log probability under the law drawn from, 0 beyond counts
    reason: torch.Tensor  # int64 [G, N] after the block
    stop_state: torch.Tensor  # int64 [G, N] after the block
    history: torch.Tensor  # int64 [G, N] after the block
    cause: torch.Tensor  # int64 [G, N] which potential left no token, -1 if none
    log_z: torch.Tensor  # float64 [G, N] sum of log Z_t over the block; 0 where blocks are regular and nobody asks
    log_left: torch.Tensor  # float64 [G, N, B] log of the share of the law's mass that the masks left, 0 beyond counts
    judged: torch.Tensor  # int64 [G, N] positions at which drafted tokens were put to the test of acceptance
    accepted: torch.Tensor  # int64 [G, N] positions at which one was accepted, at most `judged`
    reading: Reading | None = None  # of the last token, to be heard


@dataclass
class RoundInfo:
    """What one round did, for results and diagnostics; shapes [G] and [G, N]."""

    active: torch.Tensor  # bool [G] groups that took part
    ess: torch.Tensor  # float64 [G] before resampling
    resampled: torch.Tensor  # bool [G]
    log_evidence: torch.Tensor  # float64 [G] log Z-hat of the prefix after this round
    chi_square: torch.Tensor  # float64 [G] of the block's proposal against the local target, from the sampled weights
    deaths: torch.Tensor  # int64 [G] particles whose weight became 0 in this round
    log_weight: torch.Tensor  # float64 [G, N] before resampling
    log_left: torch.Tensor  # float64 [G, B] log of the share of the mass that the masks left, up to each token of the block
    ancestors: torch.Tensor  # int64 [G, N]
    tokens: torch.Tensor  # int64 [G, N, B] what each particle drew, before resampling
    counts: torch.Tensor  # int64 [G, N] how many of them are real
    judged: torch.Tensor  # int64 [G] positions at which drafted tokens were put to the test of acceptance
    accepted: torch.Tensor  # int64 [G] positions at which one was accepted

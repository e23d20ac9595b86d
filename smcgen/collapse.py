"""Collapse at the first finish: once a particle of a group has finished, one is drawn by weight, and it goes on alone.

A group takes as long as its slowest particle. For plain text nobody has to wait for it: let tau be the round after which the
group stops, W_n the weight of particle n then, finished or not, and let the one that is drawn be completed by the model itself
(exact mode, all rows of the group being its chains). For any function f of the whole text

    M_c = Z-hat_c * sum_n W_n E[ f(text) | text begins with x_n after round c ],    E under the model p,

is a martingale, because the weights are proper after every round. So E[Z-hat_tau f(text)] = E[M_tau] = E_p[f] for every tau
that the rounds up to it decide on, bounded as it is by the budget: the evidence is unbiased, and its bounds on the law of one
text hold (KL <= -E log Z-hat_tau, TV <= E (1 - Z-hat_tau)+), with Z-hat as it was at the collapse. The draw must not ask who
finished first: to return that one favours short texts.

With potentials or an exponent the completed text would need a weight that nobody gives it, so that it is refused there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from smcgen.batch import Done, Starts
from smcgen.potentials.base import ALIVE
from smcgen.record import Round
from smcgen.smc.keys import COLLAPSE, Keys


def collapse(done: Done, seed: int, keys: Sequence[int], runs: int, finish: Callable[[Starts], Done]) -> Done:
    """One text for each run, from runs that stopped at their first finish.

    Args:
        done: the runs as they stopped, with N particles.
        seed, keys, runs: of the call; `keys` are those of the prompts.
        finish: runs texts to their end, one particle each.
    """
    item = torch.tensor(keys).repeat_interleave(runs)
    uniform = Keys(seed, item, torch.arange(runs).repeat(len(keys))).uniform(COLLAPSE, done.ran, 0, 1)[:, 0]
    chosen = choose(done.fields, uniform)

    def one(values: torch.Tensor) -> torch.Tensor:
        return values[torch.arange(len(chosen)), chosen][:, None]

    fields = {name: one(values) for name, values in done.fields.items()}
    fields["log_weight"] = torch.where(done.log_evidence > -math.inf, 0.0, -math.inf)[:, None].double()
    going = (fields["reason"][:, 0] == ALIVE).nonzero()[:, 0]
    if not len(going):
        return replace(done, fields=fields, rounds_of=lambda item: _collapsed(done.rounds_of(item), int(chosen[item])))
    state = {name: fields[name] for name in ("tokens", "length", "log_p", "token_log_p", "token_log_q", "root")}
    # The rounds to come show the evidence as it stays, and use no key of a random number again.
    state |= {"stop_state": one(done.stop_state), "log_evidence": done.log_evidence, "round": done.ran}
    rest = finish(Starts(going.tolist(), state))
    for name in fields.keys() - {"log_weight"}:
        fields[name][going] = rest.fields[name][going]
    return replace(
        done,
        fields=fields,
        ran=done.ran + rest.ran,
        rounds_of=lambda item: _collapsed(done.rounds_of(item), int(chosen[item])) + rest.rounds_of(item),
        rounds=done.rounds + rest.rounds,
        seconds=done.seconds + rest.seconds,
    )


def choose(fields: dict[str, torch.Tensor], uniform: torch.Tensor) -> torch.Tensor:
    """A particle of each run, drawn by weight: int64 [items]. `uniform` float64 [items] in (0, 1); the first where all died."""
    weight = fields["log_weight"].softmax(-1).nan_to_num(0.0)
    cumulative = weight.cumsum(-1)
    last = (weight > 0).long().cumsum(-1).argmax(-1)  # of those with weight
    return (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1).minimum(last)


def _collapsed(rounds: list[Round], chosen: int) -> list[Round]:
    """The last round ends with one particle."""
    return [*rounds[:-1], replace(rounds[-1], ancestors=[rounds[-1].ancestors[chosen]])]

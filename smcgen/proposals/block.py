"""Block verification: the drafted tokens of one chain are judged together, not one after the other.

Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami & Suresh, "Block verification accelerates speculative decoding" (2024). With
X_1 ... X_n drafted from q, and p the model, let

    w_0 = 1,   w_i = min(1, w_{i-1} p(X_i) / q(X_i)),   R_i = sum_v (w_i p(v | X_1..i) - q(v | X_1..i))+,
    h_i = R_i / (R_i + 1 - w_i)   for i < n,   h_n = w_n .

Every i is tried with a random number of its own, and the longest prefix whose test succeeds (with probability h_i) is kept. If
that is the whole block the next token comes from p, else from (w_i p - q)+, normalised. The text follows p exactly, as under
the rule of `proposals.lenient` at leniency 1, and more tokens are kept on the mean: a token too likely under the draft is
forgiven if the ones after it make up for it.

Only for exponent 1 without potentials: how many tokens are kept depends on tokens that come after them, so that a weight Z_t
for each token that is kept would not be proper.
"""

from __future__ import annotations

import torch

from smcgen.kernels.verify import TINY, Levels
from smcgen.proposals.lenient import Judgement
from smcgen.smc.keys import ACCEPT


class BlockJudgement(Judgement):
    """One chain per particle, leniency 1. In results, the positions put to the test are those kept and the one after."""

    whole = True

    def _accept(self) -> None:
        count = self.draft.counts  # n
        kept = torch.zeros_like(count)
        log_w = torch.zeros(kept.shape, dtype=torch.float64, device=kept.device)
        excess, log_q_end = log_w, self.log_q  # R and log q where the kept prefix ends
        kept_w, ratio = log_w, log_w
        for i in range(len(self.steps) + 1):
            if i > 0:
                log_w = (log_w + ratio).clamp(max=0.0)  # w_i
            going = self.particles.alive & (i < count)  # another drafted token follows
            if i < len(self.steps):
                log_p, log_q = self._laws(i, going)
                left = (log_w.exp()[..., None] * log_p.exp() - log_q.exp()).clamp(min=0).sum(-1)  # R_i
                token = self.draft.tokens[..., i, None]
                ratio = (log_p.gather(-1, token) - log_q.gather(-1, token))[..., 0]
            else:
                log_q, left = self.log_q, torch.zeros_like(log_w)
            if i > 0:
                uniform = self.world.keys.uniform(ACCEPT, self.particles.round, i - 1, count.shape[1])
                lost = 1 - log_w.exp()
                # 0 / 0: the laws agree from here on, and so does every later token.
                chance = torch.where(going, left / (left + lost).clamp(min=TINY), log_w.exp())
                passed = self.particles.alive & (i <= count) & passes(uniform, chance)
            else:
                passed = torch.ones_like(going)
            kept = torch.where(passed, i, kept)
            kept_w, excess = torch.where(passed, log_w, kept_w), torch.where(passed, left, excess)
            log_q_end = torch.where(passed[..., None], log_q, log_q_end)
        self._take(kept)
        self.rejected = self.particles.alive & (kept < count)
        self.drawing.judged = torch.where(self.particles.alive, torch.minimum(kept + 1, count), 0)
        self.drawing.accepted = torch.where(self.particles.alive, kept, 0)
        # (w p - q)+ is proportional to (p - q / w)+. Without any excess a rejection cannot be, but for rounding: p will do.
        cost = torch.where(self.rejected & (excess > TINY), (-kept_w).exp(), 0.0)
        blank = self.level
        self.level = Levels(torch.stack([torch.zeros_like(cost), cost], -1), blank.mass, blank.reach)
        self.log_q = torch.where(self.rejected[..., None], log_q_end, self.log_q)

    def _laws(self, i: int, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """log p and log q float64 [G, N, V] after i drafted tokens."""
        log_p = self.world.scorer.local([x[:, :, i] for x in self.logits], self.particles.scale, used)
        return log_p, self._draft_law(self.steps[i], None)

    def _take(self, kept: torch.Tensor) -> None:
        """Commits the first `kept` int64 [G, N] drafted tokens, of weight 1."""
        none = torch.zeros(kept.shape, dtype=torch.float64, device=kept.device)
        for i in range(len(self.steps)):
            token = self.draft.tokens[..., i]
            rows = [x[:, :, i] for x in self.logits]
            active = self.drawing.alive & (i < kept)
            self._commit(active, token, self.draft.token_log_q[..., i], none, none, rows)


def passes(uniform: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """bool [G, N]: a test that succeeds with probability `chance` does, `uniform` in (0, 1) being its random number."""
    return uniform < chance

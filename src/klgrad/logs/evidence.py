r"""What a mismatch of trainer and sampler is judged by, gathered from one batch after the other.

With x = log π(y_t) of the trainer, y = log μ(y_t) of the sampler and d = y - x, over tokens that μ sampled:

- E_μ[exp(-d)] is the trainer's mass on what the sampler could draw: 1, unless a top-p or top-k filter cut it.
- μ ∝ π^a gives d = (a - 1)(x + H) with a Rényi entropy H >= 0 of the context alone, so that exp(-d) - 1, which has
  mean 0 in every context, is uncorrelated with H: a - 1 = E[(exp(-d) - 1) d] / E[(exp(-d) - 1) x], whatever the
  contexts are.
- After one prompt the same first token has one log-prob, unless the trainer is random.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..importance import token_ratio
from ..rollout import Rollout
from ..statistics import Kept, RatioSums
from .chunk import Chunk

SAMPLE = 2**18
"""Tokens that the causes are judged on."""

FIRST_TOKENS = 2**18
"""Completions whose first tokens are compared with each other."""

LEAST_REPEATS = 20
"""Pairs of the same first token, below which nothing is concluded from them."""


class Lags:
    """Mean square difference of two columns, aligned and with the second moved by one token."""

    def __init__(self) -> None:
        self.sums = {lag: torch.zeros(2, dtype=torch.float64) for lag in (-1, 0, 1)}

    def add(self, a: Tensor, b: Tensor, mask: Tensor) -> None:
        """(B, T) each, live tokens first. At lag k, a_t is compared with b_{t+k}."""
        for lag, sums in self.sums.items():
            here, there = a[:, max(0, -lag) : a.shape[1] - max(0, lag)], b[:, max(0, lag) : b.shape[1] - max(0, -lag)]
            both = mask[:, abs(lag) :]
            off = torch.where(both, here - there, 0)
            sums += torch.stack([both.sum(dtype=torch.float64), off.square().sum(dtype=torch.float64)])

    def rms(self, lag: int) -> float:
        """Root of the mean square; infinite without pairs."""
        n, square = self.sums[lag].tolist()
        return (square / n) ** 0.5 if n else float("inf")

    def shift(self) -> int:
        """The lag at which the columns agree far better than where they stand, or 0."""
        best = min((-1, 1), key=self.rms)
        return best if self.rms(0) > 0.05 and self.rms(best) < 0.4 * self.rms(0) else 0


class Padding:
    """Rows whose last token has log-prob exactly 0 in every column: padding that no mask covers."""

    def __init__(self) -> None:
        self.rows = self.suspect = 0

    def add(self, chunk: Chunk) -> None:
        """One chunk without a mask."""
        some = chunk.lengths > 0
        last = (chunk.lengths.cumsum(0) - 1)[some]
        zero = torch.ones(len(last), dtype=torch.bool)
        for x in chunk.columns.values():
            zero &= x[last] == 0
        self.rows += len(last)
        self.suspect += int(zero.sum())

    @property
    def share(self) -> float:
        """Of rows."""
        return self.suspect / max(self.rows, 1)


@dataclass(frozen=True)
class Prompts:
    """First tokens after the same prompt: one context, several tokens, and some of them several times.

    Attributes:
        within: share of the mean square difference that is not the context's own: 0 for a filter.
        along: share of that which follows the log-prob in a line: 1 for a temperature.
        repeats: pairs of the same token, to the sampler's last bit.
        noise: root mean square by which the trainer's log-prob varies between these.
        off: root mean square difference of trainer and sampler at them.
    """

    within: float
    along: float
    repeats: int
    noise: float
    off: float


class Evidence:
    """Trainer and sampler, batch by batch."""

    def __init__(self) -> None:
        self.lags, self.grouped = Lags(), False
        self._mass: RatioSums | None = None
        self._sample, self._first = Kept(SAMPLE), Kept(FIRST_TOKENS)

    def add(self, seen: Rollout, group: Tensor | None) -> None:
        """One batch, with the trainer as π and the sampler as μ."""
        live = seen.mask
        total = torch.where(live, token_ratio(seen), 0).sum(-1, dtype=torch.float64)
        mass = RatioSums.of(total[None], seen.lengths)
        self._mass = mass if self._mass is None else self._mass + mass
        self.lags.add(seen.sampler_logp, seen.logp, live)
        self._sample.add(torch.stack([seen.logp[live], seen.sampler_logp[live]]))
        if group is not None:
            self.grouped = True
            some = live[:, 0]
            columns = (group, seen.logp[:, 0], seen.sampler_logp[:, 0])
            self._first.add(torch.stack([x[some].double() for x in columns]))

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Log-probs of trainer and of sampler at some tokens, float64."""
        x, y = self._sample.values().double()
        return x, y

    def mass_kept(self) -> tuple[float, float]:
        """E_μ[π/μ] per token, and its standard error."""
        assert self._mass is not None  # there was a batch
        (found,) = self._mass.estimates()
        return float(found.mean), float(found.standard_error)

    def prompts(self) -> Prompts | None:
        """None without groups, or where hardly any first token came twice."""
        if not self.grouped:
            return None
        group, x, y = self._first.values()
        order = torch.argsort(y, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        group, x, d, y = group[order], x[order], (y - x)[order], y[order]
        again = (group[1:] == group[:-1]) & (y[1:] == y[:-1])
        if int(again.sum()) < LEAST_REPEATS:
            return None
        noise = float((x[1:] - x[:-1])[again].square().mean().sqrt()) / 2**0.5
        off = float(d[1:][again].square().mean().sqrt())
        within, along = _within(group, x, d)
        return Prompts(within, along, int(again.sum()), noise, off)


def _within(group: Tensor, x: Tensor, d: Tensor) -> tuple[float, float]:
    """Share of d² that is left when each group's mean is taken away, and the share of that which is along x."""
    _, index, size = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
    inner_x, inner_d = (
        v - (torch.zeros_like(size, dtype=v.dtype).index_add_(0, index, v) / size)[index] for v in (x, d)
    )
    whole, inner = float(d @ d), float(inner_d @ inner_d)
    spread = float(inner_x @ inner_x) * inner
    return inner / whole if whole else 0.0, float(inner_x @ inner_d) ** 2 / spread if spread else 0.0

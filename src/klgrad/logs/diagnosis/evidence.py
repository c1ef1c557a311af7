r"""The statistics from which the cause of a mismatch of trainer and sampler is found, summed over batches.

With x = log π(y_t) of the trainer, y = log μ(y_t) of the sampler and d = y - x, over tokens that μ sampled:

- E_μ[exp(-d)] is the trainer's probability of all tokens that the sampler could draw. It is 1, and less with a top-p
  or top-k filter.
- μ ∝ π^a, a temperature of 1/a, is described in `temperature`.
- After one prompt the same first token has always the same log-prob, unless the trainer is random. Between different
  first tokens, d is equal if a filter is the cause, and linear in x with slope a - 1 if a temperature is the cause.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.importance import token_ratio
from ...core.rollout import Rollout
from ...core.standard_errors import Kept, RatioSums
from ..chunk import Chunk

SAMPLE = 2**18
"""Number of tokens that are kept for the checks of causes."""

FIRST_TOKENS = 2**18
"""Number of completions whose first tokens are compared with each other."""

LEAST_REPEATS = 20
"""Smallest number of pairs of the same first token from which a conclusion is drawn."""

LEAST_DISTINCT = 6
"""Smallest number of different first tokens after the same prompt from which a conclusion is drawn: six random
differences are this linear (0.97 of their squares) once in 20,000 times."""


class Lags:
    """Mean square difference of two columns, as they are and with the second moved by one token."""

    def __init__(self) -> None:
        self.sums = {lag: torch.zeros(2, dtype=torch.float64) for lag in (-1, 0, 1)}

    def add(self, a: Tensor, b: Tensor, mask: Tensor) -> None:
        """Add (B, T) columns whose live tokens come first. At lag k, a_t is compared with b_{t+k}."""
        for lag, sums in self.sums.items():
            here, there = a[:, max(0, -lag) : a.shape[1] - max(0, lag)], b[:, max(0, lag) : b.shape[1] - max(0, -lag)]
            both = mask[:, abs(lag) :]
            off = torch.where(both, here - there, 0)
            sums += torch.stack([both.sum(dtype=torch.float64), off.square().sum(dtype=torch.float64)])

    def rms(self, lag: int) -> float:
        """Root mean square difference at a lag; infinite without pairs."""
        n, square = self.sums[lag].tolist()
        return (square / n) ** 0.5 if n else float("inf")

    def shift(self) -> int:
        """The lag at which the columns agree far better than unmoved, or 0."""
        best = min((-1, 1), key=self.rms)
        return best if self.rms(0) > 0.05 and self.rms(best) < 0.4 * self.rms(0) else 0


class Padding:
    """Rows whose last token has log-prob exactly 0 in every column: padding that no mask covers."""

    def __init__(self) -> None:
        self.rows = self.suspect = 0

    def add(self, chunk: Chunk) -> None:
        """Add a chunk without a mask."""
        some = chunk.lengths > 0
        last = (chunk.lengths.cumsum(0) - 1)[some]
        zero = torch.ones(len(last), dtype=torch.bool)
        for x in chunk.columns.values():
            zero &= x[last] == 0
        self.rows += len(last)
        self.suspect += int(zero.sum())

    @property
    def share(self) -> float:
        """Share of the rows that look padded."""
        return self.suspect / max(self.rows, 1)


@dataclass(frozen=True)
class Prompts:
    """Repeats of the same first token after the same prompt.

    Attributes:
        repeats: number of pairs of the same token: pairs with bit-equal log-probs of the sampler.
        noise: root mean square by which the trainer's log-prob varies between these.
        off: root mean square difference of trainer and sampler at these tokens.
    """

    repeats: int
    noise: float
    off: float


@dataclass(frozen=True)
class Line:
    """The regression of d on x over different first tokens after the same prompt: one context, several tokens.

    Attributes:
        within: share of the mean square of d that is within contexts: 0 for a filter.
        along: share of `within` that is linear in the log-prob: 1 for a temperature.
        slope: the slope of the line.
        error: the standard error of the slope.
    """

    within: float
    along: float
    slope: float
    error: float


class Evidence:
    """Sums over batches of the log-probs of trainer and sampler."""

    def __init__(self) -> None:
        self.lags, self.grouped = Lags(), False
        self._mass: RatioSums | None = None
        self._sample, self._first = Kept(SAMPLE), Kept(FIRST_TOKENS)

    def add(self, seen: Rollout, group: Tensor | None) -> None:
        """Add a batch, with the trainer as π and the sampler as μ."""
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
        """Log-probs of trainer and sampler at a sample of the tokens, float64."""
        x, y = self._sample.values().double()
        return x, y

    def mass_kept(self) -> tuple[float, float]:
        """E_μ[π/μ] per token, and its standard error."""
        assert self._mass is not None  # there was a batch
        (found,) = self._mass.estimates()
        return float(found.mean), float(found.standard_error)

    def prompts(self) -> Prompts | None:
        """Repeats of first tokens; None without groups, or with too few repeats."""
        if not self.grouped:
            return None
        _, x, d, again = self._first_tokens()
        if int(again.sum()) < LEAST_REPEATS:
            return None
        noise = float((x[1:] - x[:-1])[again].square().mean().sqrt()) / 2**0.5
        off = float(d[1:][again].square().mean().sqrt())
        return Prompts(int(again.sum()), noise, off)

    def line(self) -> Line | None:
        """The regression within prompts; None without groups, or if too few prompts have two first tokens."""
        if not self.grouped:
            return None
        group, x, d, again = self._first_tokens()
        distinct = int(((group[1:] == group[:-1]) & ~again).sum())
        return _line(group, x, d, distinct) if distinct >= LEAST_DISTINCT else None

    def _first_tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Group, x and d, sorted by group and sampler's log-prob, and which token equals the one before it."""
        group, x, y = self._first.values()
        order = torch.argsort(y, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        group, x, y = group[order], x[order], y[order]
        return group, x, y - x, (group[1:] == group[:-1]) & (y[1:] == y[:-1])


def _line(group: Tensor, x: Tensor, d: Tensor, distinct: int) -> Line:
    """The regression of d on x within groups; its degrees of freedom count distinct tokens only."""
    _, index, size = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
    inner_x, inner_d = (
        v - (torch.zeros_like(size, dtype=v.dtype).index_add_(0, index, v) / size)[index] for v in (x, d)
    )
    whole, xx, dd, xd = (float(v) for v in (d @ d, inner_x @ inner_x, inner_d @ inner_d, inner_x @ inner_d))
    if not whole or not xx or not dd:
        return Line(dd / whole if whole else 0.0, 0.0, 0.0, 0.0)
    left = max(dd - xd * xd / xx, 0.0)
    return Line(dd / whole, xd * xd / (xx * dd), xd / xx, (left / (distinct - 1) / xx) ** 0.5)

r"""What a mismatch of trainer and sampler is judged by, gathered from one batch after the other.

With x = log π(y_t) of the trainer, y = log μ(y_t) of the sampler and d = y - x, over tokens that μ sampled:

- E_μ[exp(-d)] is the trainer's mass on what the sampler could draw: 1, unless a top-p or top-k filter cut it.
- μ ∝ π^a, a temperature of 1/a, is described in `temperature`.
- After one prompt the same first token has one log-prob, unless the trainer is random; and of several first tokens d
  is the same where a filter makes it, and a line in x with slope a - 1 where a temperature does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.importance import token_ratio
from ...core.rollout import Rollout
from ...core.standard_errors import Kept, RatioSums
from ..chunk import Chunk

SAMPLE = 2**18
"""Tokens that the causes are judged on."""

FIRST_TOKENS = 2**18
"""Completions whose first tokens are compared with each other."""

LEAST_REPEATS = 20
"""Pairs of the same first token, below which nothing is concluded from them."""

LEAST_DISTINCT = 6
"""First tokens beside another one after the same prompt, below which nothing is concluded from how they differ: six
random differences lie this well in a line (0.97 of their squares) once in 20,000 times."""


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
    """The same first token after the same prompt, several times.

    Attributes:
        repeats: pairs of the same token, to the sampler's last bit.
        noise: root mean square by which the trainer's log-prob varies between these.
        off: root mean square difference of trainer and sampler at them.
    """

    repeats: int
    noise: float
    off: float


@dataclass(frozen=True)
class Line:
    """Different first tokens after the same prompt: one context, several tokens.

    Attributes:
        within: share of the mean square difference that is not the context's own: 0 for a filter.
        along: share of that which follows the log-prob in a line: 1 for a temperature.
        slope: of that line, with its standard error.
        error: the standard error.
    """

    within: float
    along: float
    slope: float
    error: float


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
        _, x, d, again = self._first_tokens()
        if int(again.sum()) < LEAST_REPEATS:
            return None
        noise = float((x[1:] - x[:-1])[again].square().mean().sqrt()) / 2**0.5
        off = float(d[1:][again].square().mean().sqrt())
        return Prompts(int(again.sum()), noise, off)

    def line(self) -> Line | None:
        """None without groups, or where hardly any prompt has two first tokens."""
        if not self.grouped:
            return None
        group, x, d, again = self._first_tokens()
        distinct = int(((group[1:] == group[:-1]) & ~again).sum())
        return _line(group, x, d, distinct) if distinct >= LEAST_DISTINCT else None

    def _first_tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Group, x and d in order of group and sampler's log-prob, and where a token is the same as the one before."""
        group, x, y = self._first.values()
        order = torch.argsort(y, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        group, x, y = group[order], x[order], y[order]
        return group, x, y - x, (group[1:] == group[:-1]) & (y[1:] == y[:-1])


def _line(group: Tensor, x: Tensor, d: Tensor, distinct: int) -> Line:
    """The regression of d on x within groups; repeats of a token are no further points of it."""
    _, index, size = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
    inner_x, inner_d = (
        v - (torch.zeros_like(size, dtype=v.dtype).index_add_(0, index, v) / size)[index] for v in (x, d)
    )
    whole, xx, dd, xd = (float(v) for v in (d @ d, inner_x @ inner_x, inner_d @ inner_d, inner_x @ inner_d))
    if not whole or not xx or not dd:
        return Line(dd / whole if whole else 0.0, 0.0, 0.0, 0.0)
    left = max(dd - xd * xd / xx, 0.0)
    return Line(dd / whole, xd * xd / (xx * dd), xd / xx, (left / (distinct - 1) / xx) ** 0.5)

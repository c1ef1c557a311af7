"""Streaming sums from which the numbers of `klgrad.monitor` follow, in memory that does not grow with the file."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..estimators import forward_k3, k1, k2, k3
from ..importance import prefix_ratio, sequence_ratio, token_ratio
from ..monitor import CLAMPS, QUANTILES
from ..rollout import Rollout
from ..statistics import Estimate, ratio_of_means

KEPT = 2**20
"""Values that a quantile is taken from; of a longer stream every 2nd, 4th, ... is kept."""

TINY = torch.finfo(torch.float64).tiny


class Kept:
    """Every n-th column of a stream of (C, N) values, n doubling so that no more than `KEPT` are held."""

    def __init__(self, limit: int = KEPT) -> None:
        self.limit, self.stride, self.seen = limit, 1, 0
        self._parts: list[Tensor] = []
        self._held = 0

    def add(self, x: Tensor) -> None:
        """Take what the stride says of these."""
        part = x[..., (-self.seen) % self.stride :: self.stride].clone()
        self.seen += x.shape[-1]
        self._held += part.shape[-1]
        self._parts.append(part)
        while self._held > self.limit:
            self._parts = [self.values()[..., ::2].clone()]
            self._held = self._parts[0].shape[-1]
            self.stride *= 2

    def values(self) -> Tensor:
        """What is held, in the order it came."""
        return torch.cat(self._parts, -1) if self._parts else torch.zeros(0)


class Ratio:
    """Σ total / Σ count over completions with its standard error, for K totals at once.

    The squares of `statistics.ratio_of_means`'s residuals, expanded about the first batch's ratio so that little
    cancels.
    """

    def __init__(self) -> None:
        self.n = 0
        self.centre: Tensor | None = None

    def add(self, total: Tensor, count: Tensor) -> None:
        """(K, B) totals and (B,) counts, float64; where all counts are 0 there is nothing to centre on."""
        if self.centre is None and not bool(count.any()):
            self.n += len(count)
            return
        if self.centre is None:
            self.centre = total.sum(-1, keepdim=True) / count.sum()
            self.off = self.squares = self.products = torch.zeros(len(total), dtype=torch.float64)
            self.count = self.count_squares = torch.zeros((), dtype=torch.float64)
        residual = total - self.centre * count
        self.n += len(count)
        self.count = self.count + count.sum()
        self.count_squares = self.count_squares + count.square().sum()
        self.off = self.off + residual.sum(-1)
        self.squares = self.squares + residual.square().sum(-1)
        self.products = self.products + residual @ count

    def estimates(self) -> list[Estimate]:
        """K of them."""
        if self.centre is None:
            return []
        whole = self.count.clamp(min=TINY)
        shift = self.off / whole
        square = self.squares - 2 * shift * self.products + shift.square() * self.count_squares
        error = (square.clamp(min=0) * self.n / max(self.n - 1, 1)).sqrt() / whole
        error = error if self.n > 1 else torch.full_like(error, float("nan"))
        return [Estimate(m, e) for m, e in zip(self.centre[:, 0] + shift, error, strict=True)]


class Totals:
    """Sums of per-token values per completion and per token, clustered by group where there are several."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.per_sequence, self.per_token = Ratio(), Ratio()
        self.by_group = torch.zeros(0, len(self.names) + 2, dtype=torch.float64)

    def add(self, values: Sequence[Tensor], rollout: Rollout, group: Tensor | None) -> None:
        """(B, T) values in the order of the names."""
        total = torch.stack([torch.where(rollout.mask, x, 0).sum(-1, dtype=torch.float64) for x in values])
        length = rollout.lengths.double()
        one = torch.ones_like(length)
        self.per_sequence.add(total, one)
        self.per_token.add(total, length)
        if group is not None:
            missing = int(group.max()) + 1 - len(self.by_group)
            if missing > 0:
                room = torch.zeros(max(missing, len(self.by_group)), self.by_group.shape[1], dtype=torch.float64)
                self.by_group = torch.cat([self.by_group, room])
            self.by_group.index_add_(0, group, torch.stack([*total, one, length], -1))

    def estimates(self) -> dict[str, Estimate]:
        """`<name>/per_sequence` and `<name>/per_token`."""
        *totals, ones, lengths = self.by_group[self.by_group[:, -2] > 0].T
        units = {
            "per_sequence": (self.per_sequence.estimates(), ones),
            "per_token": (self.per_token.estimates(), lengths),
        }
        clustered = len(ones) > 1
        return {
            f"{name}/{unit}": ratio_of_means(totals[k], count) if clustered else plain[k]
            for k, name in enumerate(self.names)
            for unit, (plain, count) in units.items()
        }


class Ratios:
    """Mean, largest, quantiles and effective sample size of the importance ratios."""

    KINDS: ClassVar[tuple[str, ...]] = ("token", "prefix", "sequence")

    def __init__(self) -> None:
        self.sums = {kind: torch.zeros(3, dtype=torch.float64) for kind in self.KINDS}
        self.largest = dict.fromkeys(self.KINDS, 0.0)
        self.kept = {kind: Kept() for kind in self.KINDS}

    def add(self, rollout: Rollout) -> None:
        """Only live tokens, and completions that have one."""
        live = rollout.mask
        for kind, ratio in (
            ("token", token_ratio(rollout)[live]),
            ("prefix", prefix_ratio(rollout)[live]),
            ("sequence", sequence_ratio(rollout)[live.any(-1), 0]),
        ):
            if not len(ratio):
                continue
            wide = ratio.double()  # the largest ratio is e^20, whose square float64 holds
            self.sums[kind] += torch.stack([torch.ones_like(wide).sum(), wide.sum(), wide @ wide])
            self.largest[kind] = max(self.largest[kind], float(ratio.amax()))
            self.kept[kind].add(ratio)

    def scalars(self) -> dict[str, float]:
        """Under the names of `klgrad.monitor`."""
        found = {}
        for kind, (n, total, square) in self.sums.items():
            if not n:
                continue
            found[f"ratio/{kind}/mean"] = float(total / n)
            found[f"ratio/{kind}/max"] = self.largest[kind]
            kept = self.kept[kind].values()
            for q, x in zip(QUANTILES, kept.quantile(torch.tensor(QUANTILES).to(kept)), strict=True):
                found[f"ratio/{kind}/quantile_{q:g}"] = float(x)
            found[f"ratio/{kind}/effective_sample_size"] = float(total.square() / (square.clamp(min=TINY) * n))
        return found


class Lengths:
    """Mean, least and greatest number of live tokens."""

    def __init__(self) -> None:
        self.rows = self.tokens = 0
        self.least, self.most = float("inf"), 0.0

    def add(self, rollout: Rollout) -> None:
        """One batch."""
        length = rollout.mask.sum(-1)
        self.rows += len(length)
        self.tokens += int(length.sum())
        self.least, self.most = min(self.least, float(length.min())), max(self.most, float(length.max()))

    def scalars(self) -> dict[str, float]:
        """Under the names of `klgrad.monitor`."""
        return {"length/mean": self.tokens / self.rows, "length/min": self.least, "length/max": self.most}


class KLSums:
    """What `monitor.kl_report` tells, of a stream of batches."""

    VALUES: ClassVar = {**{f"kl/reverse/{k}": k.value for k in (k1, k2, k3)}, "kl/forward/k3": forward_k3.value}

    def __init__(self) -> None:
        self.totals, self.lengths = Totals(list(self.VALUES)), Lengths()
        self.ratios = Ratios()
        self.beyond = dict.fromkeys(CLAMPS, 0)
        self.furthest = 0.0

    def add(self, rollout: Rollout, group: Tensor | None) -> None:
        """One batch."""
        log_ratio = rollout.log_ratio
        self.totals.add([value(log_ratio) for value in self.VALUES.values()], rollout, group)
        self.lengths.add(rollout)
        for name, (value, limit) in CLAMPS.items():
            self.beyond[name] += int((value(log_ratio) > limit).sum())  # a masked token has log-ratio 0
        self.furthest = max(self.furthest, float(log_ratio.abs().amax()))
        if rollout.behavior_logp is not None:
            self.ratios.add(rollout)

    def estimates(self) -> dict[str, Estimate]:
        """Under the names of `klgrad.monitor`."""
        return self.totals.estimates()

    def scalars(self) -> dict[str, float]:
        """Likewise."""
        tokens = max(self.lengths.tokens, 1)
        found = self.lengths.scalars()
        found |= {f"clamp/share_beyond_{name}": count / tokens for name, count in self.beyond.items()}
        found["log_ratio/abs_max"] = self.furthest
        return found | self.ratios.scalars()

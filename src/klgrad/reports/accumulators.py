"""The sums that reports are computed from. Batches are added one after the other, in constant memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.importance import effective_share, prefix_ratio, sequence_ratio, token_ratio
from ..core.rollout import Rollout
from ..core.standard_errors import Estimate, Kept, RatioSums, wide, wide_dtype

QUANTILES = (0.01, 0.5, 0.99)
"""The quantiles of importance ratios that are reported."""


class Totals:
    """Means of per-token values, per completion and per token, with errors clustered by group if there are several.

    Args:
        names: the names of the values.
    """

    UNITS: tuple[str, ...] = ("per_sequence", "per_token")

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._sums: list[RatioSums] = []
        self._by_group: Tensor | None = None

    def add(self, values: Sequence[Tensor], rollout: Rollout, group: Tensor | None) -> None:
        """Add one batch.

        Args:
            values: (B, T) values, in the order of the names.
            rollout: the batch.
            group: (B,) group numbers from 0 that mean the same in every batch; None for independent completions.
        """
        dtype = wide_dtype(rollout.mask.device)
        total = torch.where(rollout.mask, torch.stack(list(values)), 0).sum(-1, dtype=dtype)
        length = wide(rollout.lengths)
        counts = (torch.ones_like(length), length)
        found = [RatioSums.of(total, count) for count in counts]
        self._sums = [a + b for a, b in zip(self._sums, found, strict=True)] if self._sums else found
        if group is not None:
            self._add_to_groups(torch.cat([total, torch.stack(counts)]), group)

    def _add_to_groups(self, rows: Tensor, group: Tensor) -> None:
        held = rows.new_zeros(len(rows), 0) if self._by_group is None else self._by_group
        missing = int(group.max()) + 1 - held.shape[1]
        if missing > 0:  # double the size, so that a long stream does not copy its groups with every batch
            held = torch.cat([held, rows.new_zeros(len(rows), max(missing, held.shape[1]))], 1)
        self._by_group = held.index_add_(1, group.to(rows.device), rows)

    def estimates(self) -> dict[str, Estimate]:
        """The estimates `<name>/per_sequence` and `<name>/per_token` of all batches so far."""
        found = {}
        for unit, sums in zip(self.UNITS, self._clustered() or self._sums, strict=True):
            found |= {f"{name}/{unit}": e for name, e in zip(self.names, sums.estimates(), strict=True)}
        return {f"{name}/{unit}": found[f"{name}/{unit}"] for name in self.names for unit in self.UNITS}

    def _clustered(self) -> list[RatioSums]:
        if self._by_group is None:
            return []
        rows = self._by_group[:, self._by_group[-2] > 0]
        return [RatioSums.of(rows[:-2], count) for count in rows[-2:]] if rows.shape[1] > 1 else []


class Ratios:
    """Mean, maximum, quantiles and effective sample size of the importance ratios.

    Args:
        kept: how many ratios of each kind the quantiles are computed from, at most; None for as many as usual.
    """

    KINDS: tuple[str, ...] = ("token", "prefix", "sequence")

    def __init__(self, kept: int | None = None) -> None:
        self.kept = {kind: Kept() if kept is None else Kept(kept) for kind in self.KINDS}
        self._count = dict.fromkeys(self.KINDS, 0)
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    def add(self, rollout: Rollout) -> None:
        """Add one batch: its live tokens, and the completions that have one."""
        live = rollout.mask
        for kind, ratio in (
            ("token", token_ratio(rollout)[live]),
            ("prefix", prefix_ratio(rollout)[live]),
            ("sequence", sequence_ratio(rollout)[live.any(-1), 0]),
        ):
            if not len(ratio):
                continue
            some = wide(ratio)  # the largest ratio is e^20, and its square is finite
            sums = torch.stack([some.sum(), some @ some])
            self._count[kind] += len(ratio)
            self._sums[kind] = self._sums[kind] + sums if kind in self._sums else sums
            largest = ratio.amax()
            self._largest[kind] = torch.maximum(self._largest.get(kind, largest), largest)
            self.kept[kind].add(ratio)

    def scalars(self) -> dict[str, Tensor]:
        """The numbers `ratio/<kind>/...`; empty if there was no live token."""
        found = {}
        for kind, (total, square) in self._sums.items():
            n = self._count[kind]
            found[f"ratio/{kind}/mean"] = total / n
            found[f"ratio/{kind}/max"] = self._largest[kind]
            kept = self.kept[kind].values()
            for q, x in zip(QUANTILES, kept.quantile(torch.tensor(QUANTILES).to(kept)), strict=True):
                found[f"ratio/{kind}/quantile_{q:g}"] = x
            found[f"ratio/{kind}/effective_sample_size"] = effective_share(n, total, square)
        return found


class Lengths:
    """Mean, minimum and maximum number of live tokens."""

    def __init__(self) -> None:
        self.rows = 0
        self._tokens: Tensor | None = None
        self._extremes: Tensor | None = None

    def add(self, rollout: Rollout) -> None:
        """Add one batch, without a device synchronisation."""
        length = rollout.mask.sum(-1)
        self.rows += len(length)
        total, extremes = length.sum(), torch.stack([-length.amin(), length.amax()])
        self._tokens = total if self._tokens is None else self._tokens + total
        self._extremes = extremes if self._extremes is None else torch.maximum(self._extremes, extremes)

    @property
    def tokens(self) -> int:
        """The number of live tokens of all batches."""
        return 0 if self._tokens is None else int(self._tokens)

    def share(self, tokens: Tensor) -> Tensor:
        """Convert numbers of tokens to shares of all live tokens."""
        if self._tokens is None:
            return torch.zeros(tokens.shape)
        return tokens.to(wide_dtype(tokens.device)) / self._tokens.clamp(min=1)

    def scalars(self) -> dict[str, Tensor]:
        """The numbers `length/mean`, `length/min` and `length/max`."""
        if self._tokens is None or self._extremes is None:
            return {f"length/{name}": torch.zeros(()) for name in ("mean", "min", "max")}
        mean = self._tokens.to(wide_dtype(self._tokens.device)) / max(self.rows, 1)
        return {"length/mean": mean, "length/min": -self._extremes[0], "length/max": self._extremes[1]}


def numbers(named: dict[str, Tensor]) -> dict[str, float]:
    """Convert scalars of any device to plain numbers, with one synchronisation per device."""
    found: dict[str, float] = {}
    for device in {x.device for x in named.values()}:
        here = {name: x for name, x in named.items() if x.device == device}
        found |= zip(here, torch.stack([wide(x) for x in here.values()]).tolist(), strict=True)
    return {name: found[name] for name in named}

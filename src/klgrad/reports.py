"""Reports about a run: all KL estimators with standard errors, from one batch or from a stream of batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .core.credit import number_groups
from .core.estimators import forward_k3, k1, k2, k3
from .core.importance import effective_share, prefix_ratio, sequence_ratio, token_ratio
from .core.result import Estimate, Interval, RatioSums, wide, wide_dtype
from .core.rollout import Rollout

__all__ = ["KLSums", "MismatchSums", "Report", "kl_report", "mismatch_report"]


# An even sample of a stream, from which quantiles are computed.

SAMPLED = 2**20
"""How many values quantiles are computed from. Of a longer stream at least half as many are kept, as a sample."""

SPREAD, KEYS = 2654435769, 2**32
"""The keys i x 2^32 / golden ratio, modulo 2^32, are spread evenly, also over every n-th i."""


class StreamSample:
    """An even sample of a stream of (..., N) values: all of them, until there are more than `limit`.

    The i-th value is kept while its key is below a threshold, which halves whenever too many values are kept. Keeping
    every n-th value instead would, for completions of n tokens, see a single position of them.
    """

    def __init__(self, limit: int = SAMPLED) -> None:
        self.limit, self.below, self.seen, self._held = limit, KEYS, 0, 0
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor) -> None:
        """Add the next values of the stream."""
        step = torch.arange(self.seen, self.seen + x.shape[-1], device=x.device)
        self.seen += x.shape[-1]
        self._keep(x, ((step & 2**31 - 1) * SPREAD) & KEYS - 1)
        while self._held > self.limit:
            self.below //= 2
            held, self._parts, self._held = self._parts, [], 0
            for part in held:
                self._keep(*part)

    def _keep(self, x: Tensor, key: Tensor) -> None:
        if self.below < KEYS:
            stays = (key < self.below).nonzero()[:, 0]
            x, key = x.index_select(-1, stays), key.index_select(0, stays)
        self._parts.append((x, key))
        self._held += len(key)

    def values(self) -> Tensor:
        """The kept values, in the order of the stream."""
        return torch.cat([x for x, _ in self._parts], -1) if self._parts else torch.zeros(0)


# The sums that reports are computed from. Batches are added one after the other, in constant memory.

QUANTILES = (0.01, 0.5, 0.99)
"""The quantiles of importance ratios that are reported."""


class Totals:
    """Means of per-token values, per completion and per token, with errors clustered by group if there are several."""

    UNITS: tuple[str, ...] = ("per_sequence", "per_token")

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._sums: list[RatioSums] = []
        self._by_group: Tensor | None = None

    def add(self, values: Sequence[Tensor], rollout: Rollout, group: Tensor | None) -> None:
        """Add one batch of (B, T) values, in the order of the names.

        `group` are (B,) numbers from 0 that mean the same in every batch; None for independent completions.
        """
        dtype = wide_dtype(rollout.mask.device)
        total = torch.where(rollout.mask, torch.stack(list(values)), 0).sum(-1, dtype=dtype)
        length = wide(rollout.lengths)
        counts = (torch.ones_like(length), length)
        sums = [RatioSums.of(total, count) for count in counts]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums
        if group is not None:
            rows = torch.cat([total, torch.stack(counts)])
            held = rows.new_zeros(len(rows), 0) if self._by_group is None else self._by_group
            missing = int(group.max()) + 1 - held.shape[1]
            if missing > 0:  # double the size, so that a long stream does not copy its groups with every batch
                held = torch.cat([held, rows.new_zeros(len(rows), max(missing, held.shape[1]))], 1)
            self._by_group = held.index_add_(1, group.to(rows.device), rows)

    def estimates(self) -> dict[str, Estimate]:
        """The estimates `<name>/per_sequence` and `<name>/per_token` of all batches so far."""
        estimates = {}
        for unit, sums in zip(self.UNITS, self._clustered() or self._sums, strict=True):
            estimates |= {f"{name}/{unit}": e for name, e in zip(self.names, sums.estimates(), strict=True)}
        return {f"{name}/{unit}": estimates[f"{name}/{unit}"] for name in self.names for unit in self.UNITS}

    def _clustered(self) -> list[RatioSums]:
        if self._by_group is None:
            return []
        rows = self._by_group[:, self._by_group[-2] > 0]
        return [RatioSums.of(rows[:-2], count) for count in rows[-2:]] if rows.shape[1] > 1 else []


class Ratios:
    """Mean, maximum, quantiles (from at most `kept` ratios of each kind) and effective sample size of the ratios."""

    KINDS: tuple[str, ...] = ("token", "prefix", "sequence")

    def __init__(self, kept: int | None = None) -> None:
        self.kept = {kind: StreamSample() if kept is None else StreamSample(kept) for kind in self.KINDS}
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
            weight = wide(ratio)  # the largest ratio is e^20, and its square is finite
            sums = torch.stack([weight.sum(), weight @ weight])
            self._count[kind] += len(ratio)
            self._sums[kind] = self._sums[kind] + sums if kind in self._sums else sums
            largest = ratio.amax()
            self._largest[kind] = torch.maximum(self._largest.get(kind, largest), largest)
            self.kept[kind].add(ratio)

    def scalars(self) -> dict[str, Tensor]:
        """The numbers `ratio/<kind>/...`; empty if there was no live token."""
        scalars = {}
        for kind, (total, square) in self._sums.items():
            n = self._count[kind]
            scalars[f"ratio/{kind}/mean"] = total / n
            scalars[f"ratio/{kind}/max"] = self._largest[kind]
            kept = self.kept[kind].values()
            for q, x in zip(QUANTILES, kept.quantile(torch.tensor(QUANTILES).to(kept)), strict=True):
                scalars[f"ratio/{kind}/quantile_{q:g}"] = x
            scalars[f"ratio/{kind}/effective_sample_size"] = effective_share(n, total, square)
        return scalars


class Lengths:
    """Mean, minimum and maximum number of live tokens."""

    def __init__(self) -> None:
        self.rows = 0
        self._tokens, self._extremes = torch.zeros((), dtype=torch.long), torch.zeros(2, dtype=torch.long)

    def add(self, rollout: Rollout) -> None:
        """Add one batch, without a device synchronisation."""
        length = rollout.mask.sum(-1)
        extremes = torch.stack([-length.amin(), length.amax()])
        self._tokens = self._tokens.to(length.device) + length.sum()
        self._extremes = torch.maximum(self._extremes, extremes) if self.rows else extremes
        self.rows += len(length)

    @property
    def tokens(self) -> int:
        """The number of live tokens of all batches."""
        return int(self._tokens)

    def share(self, tokens: Tensor) -> Tensor:
        """Convert numbers of tokens to shares of all live tokens."""
        return tokens.to(wide_dtype(tokens.device)) / self._tokens.clamp(min=1)

    def scalars(self) -> dict[str, Tensor]:
        """The numbers `length/mean`, `length/min` and `length/max`; 0 without a batch."""
        mean = self._tokens.to(wide_dtype(self._tokens.device)) / max(self.rows, 1)
        return {"length/mean": mean, "length/min": -self._extremes[0], "length/max": self._extremes[1]}


def numbers(named: dict[str, Tensor]) -> dict[str, float]:
    """Convert scalars of any device to plain numbers, with one synchronisation per device."""
    floats: dict[str, float] = {}
    for device in {x.device for x in named.values()}:
        here = {name: x for name, x in named.items() if x.device == device}
        floats |= zip(here, torch.stack([wide(x) for x in here.values()]).tolist(), strict=True)
    return {name: floats[name] for name in named}


# KL reports: all estimators with standard errors, and their units in their names.
#
# Three divergences are often all called "kl": from π to ref (`kl_report`), from the trainer's policy to the policy that
# sampled the tokens, and from π to an older π (`mismatch_report`, for both). Both functions report on one batch;
# `KLSums` and `MismatchSums` report the same on any number of batches.

CLAMPS = {"k3_value_10": ("kl/reverse/k3", 10.0), "k2_value_10": ("kl/reverse/k2", 10.0), "input_20": ("size", 20.0)}
"""The quantities that trainers commonly clamp, and the limit beyond which their gradient is zero."""

BAND = (0.5, 2.0)
"""The share of token ratios (trainer to sampler) outside of it is reported."""


@dataclass(frozen=True, eq=False)
class Report(Mapping[str, float]):
    """Named numbers about one batch or several: estimates with standard errors, and plain scalars.

    It is a mapping of the plain numbers of `metrics()`, so that a logger takes it: `wandb.log(dict(report))`.

    The number after ± is one standard error, here and in every table. For confidence intervals use `intervals`, which
    takes the quantile of Student's t distribution instead of 1.96, as few clusters need.

    Attributes:
        estimates: by name.
        scalars: 0-dimensional tensors by name.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout, kl_report
        >>> logp = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])
        >>> report = kl_report(Rollout(logp, logp - 0.5, torch.ones(2, 2)))
        >>> report["kl/reverse/k1/per_sequence"]
        1.0
        >>> report.clusters, report.intervals()["kl/reverse/k1/per_sequence"]
        (2, Interval(low=1.0, high=1.0))
    """

    estimates: dict[str, Estimate]
    scalars: dict[str, Tensor]

    @property
    def clusters(self) -> int:
        """The number of independent draws: prompts, or completions where there is one group or none."""
        return max((e.clusters for e in self.estimates.values()), default=0)

    def metrics(self) -> dict[str, float]:
        """Flatten the report for a logger.

        Returns:
            Plain numbers by name. An estimate's error is under `<name>/standard_error`; the number of clusters, which
            is the same for all, is under `kl/clusters`.
        """
        named = {name: e.mean for name, e in self.estimates.items()}
        named |= {f"{name}/standard_error": e.standard_error for name, e in self.estimates.items()}
        return {**numbers(named | self.scalars), "kl/clusters": float(self.clusters)}

    @cached_property
    def _numbers(self) -> dict[str, float]:
        """The metrics, moved from the device once for all names."""
        return self.metrics()

    def __getitem__(self, name: str) -> float:
        return self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def intervals(self, level: float = 0.95) -> dict[str, Interval]:
        """Confidence intervals of the estimates.

        Args:
            level: probability that an interval is to contain the mean; see `Estimate` for how often it does.

        Returns:
            Intervals by the names of the estimates.
        """
        return {name: e.interval(level) for name, e in self.estimates.items()}

    def __str__(self) -> str:
        rows = [(name, str(e)) for name, e in self.estimates.items()]
        rows += [(name, f"{x.item():.4g}") for name, x in self.scalars.items()]
        rows.append(("kl/clusters", str(self.clusters)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


class _Sums:
    """Sums of the values of one report, over batches that all have the same optional fields."""

    SHARES: tuple[str, ...] = ()
    """The names of the shares of tokens that are reported."""

    def __init__(self, ratios: Ratios | None = None) -> None:
        self.lengths, self.ratios = Lengths(), ratios or Ratios()
        self._furthest = torch.zeros(())
        self._totals: Totals | None = None
        self._flagged = torch.zeros(len(self.SHARES), dtype=torch.long)

    def _add(self, values: dict[str, Tensor], flags: Sequence[Tensor], rollout: Rollout, group: Tensor | None) -> None:
        """Add (B, T) values by name and the flags of each share; a masked token has log-ratio 0, and no flag."""
        self._totals = self._totals or Totals(list(values))
        self._totals.add(list(values.values()), rollout, group)
        self.lengths.add(rollout)
        flagged, furthest = torch.stack([x.sum() for x in flags]), rollout.log_ratio.abs().amax()
        self._flagged = self._flagged.to(flagged.device) + flagged
        self._furthest = torch.maximum(self._furthest.to(furthest), furthest)

    def report(self) -> Report:
        """The report on all batches so far."""
        shares = dict(zip(self.SHARES, self.lengths.share(self._flagged), strict=True))
        scalars = {**self.lengths.scalars(), **shares, "log_ratio/abs_max": self._furthest, **self.ratios.scalars()}
        return Report(self._totals.estimates() if self._totals else {}, scalars)


class KLSums(_Sums):
    """`kl_report` over several batches, which must all have the same optional fields.

    Args:
        ratios: what accumulates the importance ratios, if it is to keep fewer of them than usual.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout
        >>> from klgrad.reports import KLSums
        >>> sums = KLSums()
        >>> for away in (0.5, 1.0):
        ...     logp = torch.full((2, 3), -1.0)
        ...     sums.add(Rollout(logp, logp - away, torch.ones(2, 3)))
        >>> print(sums.report().estimates["kl/reverse/k1/per_token"])
        0.75 ± 0.14
    """

    SHARES = tuple(f"clamp/share_beyond_{name}" for name in CLAMPS)

    def add(self, rollout: Rollout, group: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            rollout: the batch.
            group: (B,) group numbers from 0 that mean the same in every batch; `rollout.group` is not used.
        """
        log_ratio = rollout.log_ratio
        values = {f"kl/reverse/{k}": k.value(log_ratio) for k in (k1, k2, k3)}
        values["kl/forward/k3"] = forward_k3.value(log_ratio)
        if rollout.token_reverse_kl is not None:
            values["kl/reverse/exact"] = rollout.token_reverse_kl.detach()
        if rollout.token_forward_kl is not None:
            values["kl/forward/exact"] = rollout.token_forward_kl.detach()
        clamped = {**values, "size": log_ratio.abs()}
        self._add(values, [clamped[of] > limit for of, limit in CLAMPS.values()], rollout, group)
        if rollout.behavior_logp is not None:
            self.ratios.add(rollout)


class MismatchSums(_Sums):
    """`mismatch_report` over several batches.

    Args:
        ratios: statistics of the same ratios that the caller already accumulates, to be reported without being
            accumulated twice.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout
        >>> from klgrad.reports import MismatchSums
        >>> sums = MismatchSums()
        >>> logp, behavior_logp = torch.full((2, 3), -1.0), torch.full((2, 3), -1.25)
        >>> sums.add(Rollout(logp, behavior_logp, torch.ones(2, 3), behavior_logp=behavior_logp))
        >>> print(sums.report().estimates["kl/mismatch/k1/per_token"])
        -0.25 ± 0
    """

    SHARES = ("ratio/token/share_outside_band",)

    def __init__(self, ratios: Ratios | None = None) -> None:
        super().__init__(ratios)
        self._own_ratios = ratios is None

    def add(self, rollout: Rollout, group: Tensor | None = None) -> None:
        """Add one batch.

        Args:
            rollout: the batch, with the trainer's policy as π and the sampler both as ref and as μ.
            group: (B,) group numbers from 0 that mean the same in every batch; `rollout.group` is not used.
        """
        # For samples of μ the log-ratio that estimates a KL without weights is log μ - log π.
        away = -rollout.log_ratio
        values = {f"kl/mismatch/{k}": k.value(away) for k in (k1, k2, k3)}
        values["kl/mismatch_of_trainer/k3"] = forward_k3.value(away)
        ratio = token_ratio(rollout)  # 1 where masked, which is inside
        self._add(values, [(ratio < BAND[0]) | (ratio > BAND[1])], rollout, group)
        if self._own_ratios:
            self.ratios.add(rollout)


def kl_report(rollout: Rollout) -> Report:
    r"""How far π is from ref on this batch.

    Estimates:
        KL(π‖ref) by k1 (of either sign), k2 (biased), k3 and, where `token_reverse_kl` is given, exactly, and
        KL(ref‖π): per completion under `.../per_sequence`, per token under `.../per_token`.
    Gradient:
        none: everything is detached.
    Requires:
        y ~ π. `behavior_logp` adds statistics of the ratios, which show whether that holds; the estimates are not
        weighted by it.

    Args:
        rollout: the batch.

    Returns:
        The report; `print` shows it as a table.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout, kl_report
        >>> logp = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])
        >>> report = kl_report(Rollout(logp, torch.tensor([[-1.5, -2.0], [-1.5, -2.0]]), torch.ones(2, 2)))
        >>> print(report.estimates["kl/reverse/k1/per_sequence"])
        1 ± 0.5
        >>> report.metrics()["kl/reverse/k1/per_token"]
        0.5

    References:
        Schulman, Approximating KL divergence, 2020, http://joschu.net/blog/kl-approx.html.
    """
    sums = KLSums()
    sums.add(rollout, None if rollout.group is None else number_groups(rollout.group)[0])
    return sums.report()


def mismatch_report(logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, group: Tensor | None = None) -> Report:
    r"""How far the trainer's policy π is from the policy μ that sampled the tokens.

    Estimates:
        KL(μ‖π), the direction that samples of μ estimate without weights, by k1, k2 and k3; and KL(π‖μ) of
        the next token, at the sampler's prefixes.
    Gradient:
        none: everything is detached.
    Requires:
        y ~ μ. On the first mini-batch after sampling every ratio should be 1.

    Args:
        logp: (B, T) trainer's log-probs.
        behavior_logp: (B, T) sampler's log-probs.
        mask: (B, T) live tokens.
        group: (B,) prompt index, for clustered errors.

    Returns:
        The report; `print` shows it as a table.

    Examples:
        >>> import torch
        >>> from klgrad import mismatch_report
        >>> behavior_logp = torch.full((2, 3), -1.0)
        >>> report = mismatch_report(behavior_logp - 0.25, behavior_logp, torch.ones(2, 3))
        >>> print(report.estimates["kl/mismatch/k1/per_token"])
        0.25 ± 0
        >>> report.metrics()["ratio/token/share_outside_band"]
        0.0
    """
    sums = MismatchSums()
    rollout = Rollout(logp, behavior_logp, mask, behavior_logp=behavior_logp, group=group)
    sums.add(rollout, None if rollout.group is None else number_groups(rollout.group)[0])
    return sums.report()

"""The examination of a log: one pass over its rows, and the report on them, on each part of them, and as a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..core.rollout import Rollout
from ..errors import KlgradError, LogError, MissingExtraError
from ..reports import KLSums, MismatchSums, Ratios, Report
from ..support import Json
from .mismatch import Cause, Evidence, Lags, cause_of
from .reader import Chunk, Known, Log, describe, files_of, open_log

if TYPE_CHECKING:
    from .coefficients import CoefficientComparison

# The report on a log, and on each part of it.

STALE = 0.5
"""Effective sample size of sequence ratios, as a share, below which the tokens count as sampled from another policy."""

WEIGHTED = "KLTerm(weighting=ImportanceWeighting('prefix', bound=Truncate(2.0)))"
"""The term for tokens of another policy."""


@dataclass(frozen=True, eq=False)
class LogPart:
    """The completions with one value in the column; there is no `mismatch` without log-probs of the sampler."""

    label: object
    rows: int
    tokens: int
    kl: Report
    mismatch: Report | None

    def to_dict(self) -> Json:
        return {
            "value": self.label,
            "rows": self.rows,
            "tokens": self.tokens,
            "report": self.kl.metrics(),
            "intervals": self.kl.intervals(),
            "mismatch": None if self.mismatch is None else self.mismatch.metrics(),
        }


@dataclass(frozen=True, eq=False)
class LogReport:
    """The result of `examine`.

    Attributes:
        file: the path of the log, or what was given and how many files that is.
        columns: role to the name of the column that was read.
        rows: number of completions.
        tokens: number of live tokens.
        kl: the `kl_report` of the whole file.
        coefficients: those of the KL loss in use; None if no cell was named.
        mismatch: the `mismatch_report`; None without log-probs of the sampler.
        cause: the likely cause of the mismatch; None without log-probs of the sampler.
        reference: how well π and ref are aligned.
        padded_share: without a mask, the share of rows that look padded.
        parts: the same KLs for each value of the column `by`; empty without one.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from klgrad.logs import examine
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "log.jsonl"
        ...     _ = path.write_text('{"log_prob": [-1.0, -0.5], "ref_log_prob": [-1.1, -0.4]}')
        ...     report = examine(path)
        >>> report.columns
        {'logp': 'log_prob', 'ref_logp': 'ref_log_prob'}
        >>> sorted(report.to_dict())[:3]
        ['advice', 'columns', 'file']
    """

    file: str
    columns: dict[str, str]
    rows: int
    tokens: int
    kl: Report
    coefficients: CoefficientComparison | None
    mismatch: Report | None
    cause: Cause | None
    reference: Lags
    padded_share: float
    parts: list[LogPart]

    @property
    def notes(self) -> list[str]:
        """Remarks on how the file was read, and on the limits of its numbers."""
        notes, logp = [], self.columns["logp"]
        if logp.lower().startswith(("old", "prev", "prox", "pi_old", "b_log")):
            notes.append(f"`{logp}` is used as logp: at the start of an update π is the old policy.")
        if self.padded_share > 0.01:
            notes.append(
                f"There is no mask, and {self.padded_share:.0%} of the rows end in log-probs of exactly 0. If these "
                "are padding, every mean per token is too small: log the completion mask."
            )
        if "behavior_logp" not in self.columns and "old_logp" in self.columns:
            notes.append("Ratios are π/old; the sampler's own log-probs are not in the file.")
        if float(self.kl.scalars["log_ratio/abs_max"]) == 0:
            notes.append(
                "π equals ref at every token: this is expected before the first update; later it means that ref is "
                "not held fixed."
            )
        elif self._is_stale:
            notes.append("The tokens are not sampled from π, and the KLs to the reference are not corrected for this.")
        return notes

    @property
    def _is_stale(self) -> bool:
        return float(self.kl.scalars.get("ratio/sequence/effective_sample_size", 1.0)) < STALE

    @property
    def advice(self) -> list[str]:
        """What to change, most important first. Coefficients of misaligned columns have no meaning."""
        advice = []
        if shift := self.reference.shift():
            where, by_lag = "next" if shift > 0 else "previous", self.reference.rms
            advice.append(
                f"Align `{self.columns['ref_logp']}`: its entry for the {where} token fits `{self.columns['logp']}` "
                f"better (root mean square difference {by_lag(shift):.3g}, {by_lag(0):.3g} as logged)."
            )
        if self.cause is not None and self.cause.remedy:
            advice.append(f"{self.cause.remedy} Then log again: another cause may be behind it.")
        if self.coefficients and not shift:
            advice += self.coefficients.advice
        has_cause = self.cause is not None and self.cause.name not in ("none", "systematic", "unexplained")
        if self._is_stale and not has_cause and not (self.coefficients and self.coefficients.is_corrected):
            left = float(self.kl.scalars["ratio/sequence/effective_sample_size"])
            advice.append(
                f"The tokens are sampled from another policy (effective sample size {left:.0%} of the completions): "
                f"use importance weights in the KL term, {WEIGHTED}."
            )
        unknown = "; whether trainer and sampler agree is unknown" if self.cause is None else ""
        return advice or [f"Nothing to change: no fault was found in these data{unknown}."]

    def to_dict(self) -> Json:
        """Plain data, ready for JSON."""
        mismatch = None
        if (of := self.mismatch) is not None and self.cause is not None:
            mismatch = {"metrics": of.metrics(), "intervals": of.intervals(), "cause": asdict(self.cause)}
        return {
            "file": self.file,
            "columns": self.columns,
            "rows": self.rows,
            "tokens": self.tokens,
            "report": self.kl.metrics(),
            "intervals": self.kl.intervals(),
            **({"cell": self.coefficients.to_dict()} if self.coefficients else {}),
            "mismatch": mismatch,
            **({"by": [part.to_dict() for part in self.parts]} if "by" in self.columns else {}),
            "notes": self.notes,
            "advice": self.advice,
        }


# A figure of the parts, if their values are numbers.

FIGURES = {
    "KL(π‖ref) by k3, nats per token": "kl/reverse/k3/per_token",
    "KL(π‖ref) by k1, nats per completion": "kl/reverse/k1/per_sequence",
    "KL(sampler‖trainer) by k3, nats per token": "kl/mismatch/k3/per_token",
    "Effective sample size, share of the completions": "ratio/sequence/effective_sample_size",
    "Tokens per completion": "length/mean",
}
"""The quantities that are drawn, by their titles."""


def draw(report: LogReport) -> str:
    """The quantities of the parts by their values, with 95% intervals, as SVG; empty if there is nothing to draw."""
    parts = report.parts
    if len(parts) < 2 or not all(isinstance(part.label, int | float) for part in parts):
        return ""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = "pip install 'klgrad[plot]'"
        raise MissingExtraError("matplotlib, for the figures of a page", "no such package", remedy) from error
    from ..drawing import content

    rows = [{**(part.mismatch or {}), **part.kl} for part in parts]
    shown = [(title, metric) for title, metric in FIGURES.items() if metric in rows[0]]
    figure = Figure((8, 2.2 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), squeeze=False)[:, 0]
    xs = [cast(float, part.label) for part in parts]
    ends = [{**part.kl.intervals(), **(part.mismatch.intervals() if part.mismatch else {})} for part in parts]
    for axes, (title, metric) in zip(panels, shown, strict=True):
        ys = [row[metric] for row in rows]
        axes.plot(xs, ys, "o-", markersize=3)
        axes.axhline(0, color="0.7", linewidth=0.8)
        axes.set_ymargin(0.3)  # an interval that is much wider than all means is cut at the frame
        axes.set_ylim(axes.get_ylim(), auto=False)
        for x, end in zip(xs, ends, strict=True):
            axes.plot([x, x], end.get(metric, (math.nan, math.nan)), color="C0", alpha=0.6)
        axes.set_title(title, loc="left", fontsize=9)
        axes.grid(axis="y", alpha=0.3)
    panels[-1].set_xlabel(report.columns["by"])
    return "<svg" + content(figure, "svg").decode().partition("<svg")[2]  # without the head of a file of its own


# One pass over a log.


def examine(
    path: Path | Sequence[Path],
    cell: str | None = None,
    columns: dict[str, str] | None = None,
    *,
    by: str | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> LogReport:
    r"""Read a log once, a bounded number of completions at a time, and report on it.

    Args:
        path: a Parquet, JSONL or NPZ file with per-token log-probs, or several of them; also a folder, or a pattern.
        cell: the name, in `klgrad.zoo`, of the KL loss in use; its coefficients are then compared with sound ones.
        columns: role to column name, to override the recognised names; an empty name leaves an optional role out.
        by: a column with one value per completion, such as the step; the report then has each of its values too.
        progress: called with the share of the log that is read.

    Returns:
        The report. `advice` lists what to change, `kl` has the estimates, and `to_dict()` has everything.

    Raises:
        LogError: the file cannot be read, lacks a column, or has values that are no log-probs.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from klgrad.logs import examine
        >>> rows = [{"logp": [-1.0, -0.5], "ref_logp": [-1.1, -0.4]}, {"logp": [-0.2], "ref_logp": [-0.6]}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "log.jsonl"
        ...     _ = path.write_text("\n".join(map(json.dumps, rows)))
        ...     report = examine(path, cell="k2-loss")
        >>> report.rows, report.tokens
        (2, 3)
        >>> print(report.kl.estimates["kl/reverse/k1/per_token"])
        0.1333 ± 0.19
        >>> print(report.advice[0])
        Nothing to change: no fault was found in these data; whether trainer and sampler agree is unknown.
    """
    paths = [path] if isinstance(path, Path) else list(path)
    files, known = files_of(paths), Known()
    roles = {**(columns or {}), **({} if by is None else {"by": by})}
    logs: list[Log] = []
    for file in files:
        with _name_file(file):
            logs.append(open_log(file, roles))
            if set(logs[-1].columns) != set(logs[0].columns):
                raise LogError(
                    f"the columns {', '.join(sorted(logs[0].columns))} in all files, as in {files[0]}",
                    ", ".join(sorted(logs[-1].columns)),
                    "give the files of one run; --column ROLE= leaves an optional column out",
                )
    sums = LogSums(logs[0].columns, cell)
    for i, (file, log) in enumerate(zip(files, logs, strict=True)):
        with _name_file(file):
            for chunk in log.chunks(known):
                sums.add(chunk)
                progress((i + chunk.share) / len(files))
    if not sums.whole.kl.lengths.tokens:
        received = f"{files[0]} with {sums.whole.kl.lengths.rows} rows, none of which has a live token"
        raise LogError("a log with at least one live token", received, "check the mask, or write the log again")
    return sums.report(describe(paths, files), list(known.get("by", {})))


@contextmanager
def _name_file(file: Path) -> Iterator[None]:
    """An error about a log names the file."""
    try:
        yield
    except KlgradError as error:
        if isinstance(error, MissingExtraError) or str(file) in error.received:
            raise
        raise LogError(error.expected, f"{error.received} of {file}", error.remedy) from error


class LogSums:
    def __init__(self, columns: dict[str, str], cell: str | None) -> None:
        self.columns = columns
        self.whole, self.lags = RowSums("old_logp" in columns), Lags()
        self.evidence = Evidence() if "behavior_logp" in columns else None
        self.by = PartSums(columns["by"], "old_logp" in columns) if "by" in columns else None
        self.ends = self.padded = 0
        self.coefficients = None
        if cell is not None:
            from .coefficients import CoefficientSums, cell_of

            self.coefficients = CoefficientSums(cell_of(cell), "behavior_logp" in columns or "old_logp" in columns)

    def add(self, chunk: Chunk) -> None:
        if "mask" not in self.columns:  # rows whose log-probs are all exactly 0 at the last token are probably padded
            last = (chunk.lengths.cumsum(0) - 1)[chunk.lengths > 0]
            self.ends += len(last)
            self.padded += int(torch.stack([x[last] == 0 for x in chunk.columns.values()]).all(0).sum())
        for batch in padded_batches(chunk):
            rollout = batch.rollout
            self.whole.add(rollout, batch.trainer, batch.group)
            if self.by is not None:
                self.by.add(batch)
            if self.coefficients is not None:
                self.coefficients.add(rollout)
            self.lags.add(rollout.logp.detach(), rollout.ref_logp, rollout.mask)
            if self.evidence is not None and batch.trainer is not None:
                self.evidence.add(batch.trainer, batch.group)

    def report(self, file: str, labels: list[object]) -> LogReport:
        kl, lengths = self.whole.kl.report(), self.whole.kl.lengths
        ratios = [kl.scalars.get(f"ratio/sequence/{name}") for name in ("mean", "effective_sample_size")]
        on_policy = all(x is not None and abs(float(x) - 1) < ON_POLICY for x in ratios)
        return LogReport(
            file=file,
            columns=self.columns,
            rows=lengths.rows,
            tokens=lengths.tokens,
            kl=kl,
            coefficients=self.coefficients and self.coefficients.comparison(on_policy=on_policy),
            mismatch=self.evidence and self.whole.mismatch.report(),
            cause=self.evidence and cause_of(self.evidence),
            reference=self.lags,
            padded_share=self.padded / max(self.ends, 1),
            parts=[] if self.by is None else self.by.parts(labels),
        )


class RowSums:
    """The KLs and the mismatch of some rows, with quantiles of at most `kept` ratios."""

    def __init__(self, has_old_policy: bool, kept: int | None = None) -> None:
        self.kl = KLSums(Ratios(kept))
        # Without an old policy the trainer is π itself, and has the same ratios to the sampler.
        self.mismatch = MismatchSums(ratios=Ratios(kept) if has_old_policy else self.kl.ratios)
        self._has_old_policy = has_old_policy

    def add(self, rollout: Rollout, trainer: Rollout | None, group: Tensor | None) -> None:
        self.kl.add(rollout, group)
        if trainer is not None:
            self.mismatch.add(trainer, group)
            if self._has_old_policy:  # a `MismatchSums` that was given ratios leaves them to its caller
                self.mismatch.ratios.add(trainer)


ON_POLICY = 0.01
"""If the mean and the effective sample size of sequence ratios are this near to 1, the data count as on-policy."""


# A chunk as padded batches, for the formulas of this package.

BATCH_CELLS = 2**17
"""Cells of a padded batch, including padding. It fits into the cache of a core, so memory is not the limit."""


@dataclass(frozen=True)
class PaddedBatch:
    """Rows of similar length as one padded batch, with the prompt and the part of each if they are known.

    `rollout` has π and ref, with the sampler of the file, or else its old policy, as μ. `trainer` has the trainer's
    policy at the time of sampling, with μ both as reference and as sampler; it needs `behavior_logp`.
    """

    rollout: Rollout
    trainer: Rollout | None
    group: Tensor | None
    by: Tensor | None


def padded_batches(chunk: Chunk) -> Iterator[PaddedBatch]:
    """Cut a chunk into padded batches. Rows are sorted by length, so that there is little padding."""
    order = torch.argsort(chunk.lengths, stable=True)
    starts = chunk.lengths.cumsum(0) - chunk.lengths
    begin = 0
    for i, longest in enumerate(chunk.lengths[order].clamp(min=1).tolist()):
        if i > begin and (i - begin + 1) * longest > BATCH_CELLS:
            yield _pad(chunk, order[begin:i], starts)
            begin = i
    yield _pad(chunk, order[begin:], starts)


def _pad(chunk: Chunk, index: Tensor, starts: Tensor) -> PaddedBatch:
    lengths = chunk.lengths[index]
    steps = torch.arange(max(1, int(lengths.max())))
    mask = steps < lengths[:, None]
    at = torch.where(mask, starts[index][:, None] + steps, 0)
    # Without a live token in the chunk there is nothing to take from.
    padded = {role: x[at] if len(x) else torch.zeros(at.shape, dtype=x.dtype) for role, x in chunk.columns.items()}
    logp = padded["logp"].requires_grad_()  # the coefficients of a cell are gradients
    behavior, old = padded.get("behavior_logp"), padded.get("old_logp")
    sampler = old if behavior is None else behavior
    rollout = Rollout(logp, padded["ref_logp"], mask, behavior_logp=sampler)
    trainer = None
    if behavior is not None:
        trainer = Rollout((logp if old is None else old).detach(), behavior, mask, behavior_logp=behavior)
    group, by = (chunk.per_row[role][index] if role in chunk.per_row else None for role in ("group", "by"))
    return PaddedBatch(rollout, trainer, group, by)


# The KL of each part of a log: of each step of a run, for example.

MOST_LABELS = 10_000
"""Largest number of parts: each needs sums of its own."""

KEPT = 2**10
"""Ratios of each part from which their quantiles are computed; the memory of all parts together is bounded so."""


class PartSums:
    """Sums over each part, in memory that grows with the number of parts and of their prompts.

    `has_old_policy`: the trainer's policy at the time of sampling has a column of its own.
    """

    def __init__(self, name: str, has_old_policy: bool) -> None:
        self._name, self._has_old_policy = name, has_old_policy
        self._sums: dict[int, RowSums] = {}
        self._groups: dict[int, dict[int, int]] = {}

    def add(self, batch: PaddedBatch) -> None:
        """Add a batch, row by row to the parts that its rows belong to."""
        assert batch.by is not None  # the column was chosen
        for part in batch.by.unique().tolist():
            if part not in self._sums and len(self._sums) >= MOST_LABELS:
                raise LogError(
                    f"at most {MOST_LABELS:,} different values in `{self._name}`",
                    "more",
                    "choose a column with fewer values, such as the step",
                )
            sums = self._sums.setdefault(part, RowSums(self._has_old_policy, KEPT))
            index, group = torch.nonzero(batch.by == part)[:, 0], None
            if batch.group is not None:  # numbered within the part: sums are stored for all numbers up to the largest
                known = self._groups.setdefault(part, {})
                group = torch.tensor([known.setdefault(x, len(known)) for x in batch.group[index].tolist()])
            trainer = None if batch.trainer is None else _take_rows(batch.trainer, index)
            sums.add(_take_rows(batch.rollout, index), trainer, group)

    def parts(self, labels: list[object]) -> list[LogPart]:
        """The parts that have a live token, by increasing value if all values are numbers."""
        parts = []
        for number, sums in self._sums.items():
            lengths = sums.kl.lengths
            if lengths.tokens:
                mismatch = sums.mismatch.report() if sums.mismatch.lengths.rows else None
                parts.append(LogPart(labels[number], lengths.rows, lengths.tokens, sums.kl.report(), mismatch))
        numeric = all(isinstance(part.label, int | float) for part in parts)
        return sorted(parts, key=lambda part: cast(float, part.label)) if numeric else parts


def _take_rows(rollout: Rollout, index: Tensor) -> Rollout:
    columns = {name: getattr(rollout, name) for name in ("logp", "ref_logp", "mask", "behavior_logp")}
    return Rollout(**{name: x.detach()[index] for name, x in columns.items() if x is not None})

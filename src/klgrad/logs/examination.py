"""One pass over a log: its sums, those of its parts, and the coefficients that a KL term gives to its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from .. import zoo as cells
from ..core.importance import ImportanceWeighting, Truncate
from ..core.rollout import Rollout, is_invalid, what_is_wrong
from ..core.term import KLTerm, as_code
from ..errors import KlgradError, LogError, MissingExtraError, RolloutError
from ..reports import KLSums, MismatchSums, Ratios
from ..zoo import Cell
from .log_report import CoefficientComparison, LogPart, LogReport
from .mismatch import Evidence, Lags, cause_of
from .reader import CHUNK_TOKENS, Chunk, Known, Log, describe, files_of, open_log

# One pass over a log.

ASSUMED_CELL = "k3-loss"
"""The KL loss that a run is assumed to have if none is named: that of GRPO as published."""

Progress = Callable[[float, float], None]
"""Called with the share of the file that is read, and 1; with numbers of files, if there are several."""


def examine(
    path: Path | Sequence[Path],
    cell: str | None = None,
    columns: dict[str, str] | None = None,
    *,
    by: str | None = None,
    progress: Progress = lambda done, total: None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> LogReport:
    r"""Read a log once, a bounded number of tokens at a time, and report on it.

    Args:
        path: a Parquet, JSONL or NPZ file with per-token log-probs, or several of them; also a folder, or a pattern.
        cell: the name, in `klgrad.zoo`, of the KL loss in use; None assumes k3-loss, and the report says so.
        columns: role to column name, to override the recognised names; an empty name leaves an optional role out.
        by: a column with one value per completion, such as the step; the report then has each of its values too.
        progress: called after each chunk.
        chunk_tokens: the approximate number of tokens in memory.

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
        Nothing to change in reference and KL term; whether trainer and sampler agree is unknown.
    """
    chosen = cell_of(cell or ASSUMED_CELL)
    paths = [path] if isinstance(path, Path) else list(path)
    files, known = files_of(paths), Known()
    roles = {**(columns or {}), **({} if by is None else {"by": by})}
    logs: list[Log] = []
    for file in files:
        with _name_file(file, len(files)):
            logs.append(open_log(file, roles))
    _check_columns(files, logs)
    sums = _Sums(chosen, logs[0].columns)
    for i, (file, log) in enumerate(zip(files, logs, strict=True)):
        with _name_file(file, len(files)):
            for chunk in log.chunks(chunk_tokens, known):
                sums.add(chunk)
                progress(*((chunk.share, 1) if len(files) == 1 else (i, len(files))))
    if not sums.whole.kl.lengths.tokens:
        rows = sums.whole.kl.lengths.rows
        raise LogError(
            "a log with at least one live token",
            f"{rows} row{'s' * (rows != 1)} without live tokens" if rows else f"{files[0]}, which has no rows",
            "check that the mask is 1 at the completion's tokens" if rows else "write the log again",
        )
    report = sums.report(describe(paths, files), list(known.get("by", {})))
    return replace(report, cell_is_assumed=cell is None)


@contextmanager
def _name_file(file: Path, count: int) -> Iterator[None]:
    """An error about one of several files names the file."""
    try:
        yield
    except KlgradError as error:
        if count == 1 or isinstance(error, MissingExtraError) or str(file) in error.received:
            raise
        raise LogError(error.expected, f"{error.received} of {file}", error.remedy) from error


def _check_columns(files: list[Path], logs: list[Log]) -> None:
    first = set(logs[0].columns)
    for file, log in zip(files, logs, strict=True):
        if set(log.columns) != first:
            raise LogError(
                f"the columns {', '.join(sorted(first))} in all files, as in {files[0]}",
                f"{', '.join(sorted(log.columns))} in {file}",
                "give the files of one run; --column ROLE= leaves an optional column out",
            )


class Padding:
    """Rows whose last token has log-prob exactly 0 in every column: padding that no mask covers."""

    def __init__(self) -> None:
        self.rows = self.suspect = 0

    def add(self, chunk: Chunk) -> None:
        last = (chunk.lengths.cumsum(0) - 1)[chunk.lengths > 0]
        zero = torch.ones(len(last), dtype=torch.bool)
        for x in chunk.columns.values():
            zero &= x[last] == 0
        self.rows += len(last)
        self.suspect += int(zero.sum())

    @property
    def share(self) -> float:
        return self.suspect / max(self.rows, 1)


class _Sums:
    def __init__(self, cell: Cell, columns: dict[str, str]) -> None:
        self.cell, self.columns = cell, columns
        self.whole, self.lags, self.padding = RowSums("old_logp" in columns), Lags(), Padding()
        self.coefficients = CoefficientSums(cell, "behavior_logp" in columns or "old_logp" in columns)
        self.evidence = Evidence() if "behavior_logp" in columns else None
        self.by = PartSums(columns["by"], "old_logp" in columns) if "by" in columns else None

    def add(self, chunk: Chunk) -> None:
        if chunk.mask is None:  # rows that end in exact zeros are then probably padded
            self.padding.add(chunk)
        for batch in padded_batches(chunk):
            rollout = batch.rollout
            self.whole.add(rollout, batch.trainer, batch.group)
            if self.by is not None:
                self.by.add(batch)
            self.coefficients.add(rollout)
            self.lags.add(rollout.logp.detach(), rollout.ref_logp, rollout.mask)
            if self.evidence is not None and batch.trainer is not None:
                self.evidence.add(batch.trainer, batch.group)

    def report(self, file: str, labels: list[object]) -> LogReport:
        evidence, kl, lengths = self.evidence, self.whole.kl.report(), self.whole.kl.lengths
        ratios = [kl.scalars.get(f"ratio/sequence/{name}") for name in ("mean", "effective_sample_size")]
        on_policy = all(x is not None and abs(float(x) - 1) < ON_POLICY for x in ratios)
        return LogReport(
            file=file,
            columns=self.columns,
            rows=lengths.rows,
            tokens=lengths.tokens,
            kl=kl,
            cell=self.cell,
            comparisons=self.coefficients.comparisons(on_policy=on_policy),
            dead_share=self.coefficients.dead_share,
            mismatch=None if evidence is None else self.whole.mismatch.report(),
            cause=None if evidence is None else cause_of(evidence),
            reference=self.lags,
            padding=self.padding,
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
    starts = chunk.starts
    for index in _cut(order, chunk.lengths):
        try:
            yield _pad(chunk, index, starts)
        except RolloutError:
            _raise_with_place(chunk)
            raise


def _cut(order: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """Runs of rows whose padded size is within `BATCH_CELLS`, or single rows."""
    width = lengths[order].clamp(min=1).tolist()
    begin = 0
    for i, longest in enumerate(width):
        if i > begin and (i - begin + 1) * longest > BATCH_CELLS:
            yield order[begin:i]
            begin = i
    yield order[begin:]


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


def _raise_with_place(chunk: Chunk) -> None:
    """Raise an error for the first invalid value in the order of the file, with its row and column name there."""
    places: list[tuple[int, str]] = []
    for role, x in chunk.columns.items():
        invalid = torch.nonzero(is_invalid(x))
        places += [(int(invalid[0]), role)] if len(invalid) else []
    if places:
        at, role = min(places)
        row = int(torch.searchsorted(chunk.lengths.cumsum(0), at, right=True))
        place = chunk.place(row, at - int(chunk.starts[row]))
        raise LogError(*what_is_wrong(float(chunk.columns[role][at]), chunk.names[role], place))


# The coefficients of a cell on the tokens of the data, compared with those of the sound terms.

PREFIX_BOUND = Truncate(2.0)
"""The bound on prefix ratios. Without one, the product of hundreds of ratios is mostly noise; training uses one too."""

ALIVE, DEAD = 1e-2, 1e-3
"""A token is in a dead zone if the sound coefficient is larger than `ALIVE`, and the coefficient of the cell is smaller
than `DEAD` times the sound one."""


def sound_terms(off_policy: bool) -> dict[str, KLTerm]:
    """The reverse KL by level, with importance weights if the file has log-probs of the sampler."""
    if not off_policy:
        return {"token": KLTerm(level="token"), "sequence": KLTerm()}
    return {
        "token": KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None)),
        "sequence": KLTerm(weighting=ImportanceWeighting("prefix", bound=PREFIX_BOUND)),
    }


def cell_of(name: str) -> Cell:
    """Look up a cell, and check that its coefficients depend on one completion only."""
    cell = cells.get(name)
    if cell.couples_groups or cell.compares_completions:
        raise LogError(
            "a cell whose coefficients depend on one completion only",
            f"{name!r}, which needs the whole batch or group",
            f"choose another cell, such as k3-loss or k1-reward; `klgrad audit {name}` examines this one",
        )
    return cell


def coefficients(cell: Cell, rollout: Rollout) -> Tensor:
    """(B, T) coefficients of the token scores in the gradient of the cell, summed over the completion."""
    with torch.enable_grad():
        loss = cell(rollout)
        if not loss.requires_grad:
            return torch.zeros_like(rollout.log_ratio)
        (gradient,) = torch.autograd.grad(loss, rollout.logp, allow_unused=True)
    # The cell is a mean over completions: times their number, it gives the coefficients of each completion.
    return torch.zeros_like(rollout.log_ratio) if gradient is None else gradient * len(rollout.logp)


class CoefficientSums:
    """Second moments of the coefficients of one cell and of the sound terms."""

    def __init__(self, cell: Cell, off_policy: bool) -> None:
        self.cell, self.terms = cell, sound_terms(off_policy)
        self.moments = {level: torch.zeros(6, dtype=torch.float64) for level in self.terms}
        self.largest = torch.zeros(3, dtype=torch.float64)
        self.tokens = self.dead = 0

    def add(self, rollout: Rollout) -> None:
        live = rollout.mask
        c = coefficients(self.cell, rollout)[live].double()
        if not len(c):
            return
        largest = [c.abs().max()]
        for level, term in self.terms.items():
            s = term(rollout).coefficient[live].double()
            # The squared difference has its own sum: computed from the others, it would cancel where c is near s.
            self.moments[level] += torch.stack([c.sum(), s.sum(), c @ c, s @ s, c @ s, (c - s) @ (c - s)])
            largest.append(s.abs().max())
            if level == "token":
                self.dead += int(((s.abs() > ALIVE) & (c.abs() < DEAD * s.abs())).sum())
        self.largest = torch.maximum(self.largest, torch.stack(largest))
        self.tokens += len(c)

    @property
    def dead_share(self) -> float:
        """Share of tokens in a dead zone, compared with the sound term at token level."""
        return self.dead / max(self.tokens, 1)

    def comparisons(self, *, on_policy: bool = False) -> dict[str, CoefficientComparison]:
        """Comparisons by level. With `on_policy` the terms are shown without weights, since every ratio was 1."""
        comparisons = {}
        terms = sound_terms(off_policy=False) if on_policy else self.terms
        for (level, moments), sound in zip(self.moments.items(), self.largest[1:].tolist(), strict=True):
            c, s, cc, ss, cs, off = moments.tolist()
            n = max(self.tokens, 1)
            spread = max(cc - c * c / n, 0.0) * max(ss - s * s / n, 0.0)
            # A spread of the size of rounding counts as zero: a constant has no correlation.
            varies = spread > 1e-20 * cc * ss
            comparisons[level] = CoefficientComparison(
                as_code(terms[level]),
                (off / ss) ** 0.5 if ss else float("nan"),
                (cs - c * s / n) / spread**0.5 if varies else float("nan"),
                cs / ss if ss else float("nan"),
                float(self.largest[0]),
                sound,
            )
        return comparisons


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
    logp, ref_logp, mask = (x.detach()[index] for x in (rollout.logp, rollout.ref_logp, rollout.mask))
    behavior = rollout.behavior_logp
    return Rollout(logp, ref_logp, mask, None if behavior is None else behavior.detach()[index])

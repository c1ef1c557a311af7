"""One pass over a log."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import KlgradError, LogError, MissingExtraError
from ..reports import KLSums, MismatchSums, Report
from ..zoo import Cell
from .coefficients import CoefficientSums, LabelSums, cell_of
from .columns import Chunk, Known, PaddedBatch, padded_batches
from .log_report import LogReport
from .mismatch import Evidence, Lags, Padding, cause_of
from .reader import CHUNK_TOKENS, Log, describe, files_of, open_log

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
    given = [path] if isinstance(path, Path) else list(path)
    files, known = files_of(given), Known()
    wanted = {**(columns or {}), **({} if by is None else {"by": by})}
    logs = [_named(file, len(files), lambda file=file: open_log(file, wanted)) for file in files]
    _check_columns(files, logs)
    sums = _Sums(chosen, logs[0].columns)
    for done, total in _read(sums, files, logs, chunk_tokens, known):
        progress(done, total)
    if not sums.kl.lengths.tokens:
        rows = sums.kl.lengths.rows
        raise LogError(
            "a log with at least one live token",
            f"{rows} row{'s' * (rows != 1)} without live tokens" if rows else f"{files[0]}, which has no rows",
            "check that the mask is 1 at the completion's tokens" if rows else "write the log again",
        )
    report = sums.report(describe(given, files), list(known.get("by", {})))
    return replace(report, cell_is_assumed=cell is None)


def _read(
    sums: "_Sums", files: list[Path], logs: list[Log], chunk_tokens: int, known: Known
) -> Iterator[tuple[float, float]]:
    """Add all chunks of all files; the progress after each."""
    for i, (file, log) in enumerate(zip(files, logs, strict=True)):
        chunks = log.chunks(chunk_tokens, known)
        while (chunk := _named(file, len(files), lambda chunks=chunks: next(chunks, None))) is not None:
            _named(file, len(files), lambda chunk=chunk: sums.add_chunk(chunk))
            yield (chunk.share, 1) if len(files) == 1 else (i, len(files))


def _named(file: Path, count: int, work: Callable[[], Any]) -> Any:
    """Do some work; an error about one of several files names the file."""
    try:
        return work()
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


class _Sums:
    """All sums over the log."""

    def __init__(self, cell: Cell, columns: dict[str, str]) -> None:
        self.cell, self.columns = cell, columns
        self.kl, self.lags, self.padding = KLSums(), Lags(), Padding()
        self.coefficients = CoefficientSums(cell, "behavior_logp" in columns or "old_logp" in columns)
        # Without an old policy the trainer is π itself, and has the same ratios to the sampler.
        self.mismatch = MismatchSums(ratios=None if "old_logp" in columns else self.kl.ratios)
        self.evidence = Evidence() if "behavior_logp" in columns else None
        self.by = LabelSums(columns["by"], "old_logp" in columns) if "by" in columns else None

    def add_chunk(self, chunk: Chunk) -> None:
        self.check_padding(chunk)
        for batch in padded_batches(chunk):
            self.add(batch)

    def check_padding(self, chunk: Chunk) -> None:
        if chunk.mask is None:  # rows that end in exact zeros are then probably padded
            self.padding.add(chunk)

    def add(self, batch: PaddedBatch) -> None:
        rollout = batch.rollout
        self.kl.add(rollout, batch.group)
        if self.by is not None:
            self.by.add(batch)
        self.coefficients.add(rollout)
        self.lags.add(rollout.logp.detach(), rollout.ref_logp, rollout.mask)
        if self.evidence is not None and batch.trainer is not None:
            self.mismatch.add(batch.trainer, batch.group)
            self.evidence.add(batch.trainer, batch.group)

    def report(self, file: str, labels: list[object]) -> LogReport:
        evidence, kl = self.evidence, self.kl.report()
        return LogReport(
            file=file,
            columns=self.columns,
            rows=self.kl.lengths.rows,
            tokens=self.kl.lengths.tokens,
            kl=kl,
            cell=self.cell,
            comparisons=self.coefficients.comparisons(on_policy=_is_on_policy(kl)),
            dead_share=self.coefficients.dead_share,
            mismatch=None if evidence is None else self.mismatch.report(),
            cause=None if evidence is None else cause_of(evidence),
            reference=self.lags,
            padding=self.padding,
            parts=[] if self.by is None else self.by.parts(labels),
        )


ON_POLICY = 0.01
"""If the mean and the effective sample size of sequence ratios are this near to 1, the data count as on-policy."""


def _is_on_policy(kl: Report) -> bool:
    """Whether the sampler is π itself on these data."""
    found = [kl.scalars.get(f"ratio/sequence/{name}") for name in ("mean", "effective_sample_size")]
    return all(x is not None and abs(float(x) - 1) < ON_POLICY for x in found)

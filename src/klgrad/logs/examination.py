"""One pass over a log."""

from collections.abc import Callable
from pathlib import Path

from ..reports.divergence import KLSums, MismatchSums, Report
from ..zoo import Cell
from .chunk import Block, Chunk, blocks
from .coefficients import CoefficientSums, cell_of
from .diagnosis.causes import cause_of
from .diagnosis.evidence import Evidence, Lags, Padding
from .log_errors import LogError
from .log_report import LogReport
from .read import CHUNK_TOKENS, open_log

Progress = Callable[[int, int], None]
"""Called with how far the file is read, and where it ends."""


def examine(
    path: Path,
    cell: str = "k3-loss",
    columns: dict[str, str] | None = None,
    *,
    progress: Progress = lambda done, total: None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> LogReport:
    """Read the file once, a bounded number of tokens at a time, and report.

    Args:
        path: Parquet, JSONL or NPZ.
        cell: the name of the KL loss in use, of `klgrad.zoo`.
        columns: role to column, where the recognised names are not meant.
        progress: told how far it is.
        chunk_tokens: about as many tokens as are held at a time.
    """
    chosen = cell_of(cell)
    log = open_log(path, columns or {}, chunk_tokens)
    sums = _Sums(chosen, log.columns)
    for chunk in log.chunks():
        sums.look(chunk)
        for block in blocks(chunk):
            sums.add(block)
        progress(chunk.done, log.total)
    if not sums.kl.lengths.tokens:
        rows = sums.kl.lengths.rows
        raise LogError(
            "a log with at least one live token",
            f"{rows} row{'s' * (rows != 1)} without any" if rows else f"{path}, which has no rows",
            "check that the mask is 1 at the completion's tokens" if rows else "write the log again",
        )
    return sums.report(path)


class _Sums:
    """Everything that is accumulated."""

    def __init__(self, cell: Cell, columns: dict[str, str]) -> None:
        self.cell, self.columns = cell, columns
        self.kl, self.lags, self.padding = KLSums(), Lags(), Padding()
        self.coefficients = CoefficientSums(cell, "behavior_logp" in columns or "old_logp" in columns)
        # Without an old policy the trainer is π itself, and so are its ratios to the sampler.
        self.mismatch = MismatchSums(ratios=None if "old_logp" in columns else self.kl.ratios)
        self.evidence = Evidence() if "behavior_logp" in columns else None

    def look(self, chunk: Chunk) -> None:
        """Without a mask, rows that end in exact zeros look like padding."""
        if chunk.mask is None:
            self.padding.add(chunk)

    def add(self, block: Block) -> None:
        rollout = block.rollout
        self.kl.add(rollout, block.group)
        self.coefficients.add(rollout)
        self.lags.add(rollout.logp.detach(), rollout.ref_logp, rollout.mask)
        if self.evidence is not None and block.trainer is not None:
            self.mismatch.add(block.trainer, block.group)
            self.evidence.add(block.trainer, block.group)

    def report(self, path: Path) -> LogReport:
        evidence, kl = self.evidence, self.kl.report()
        return LogReport(
            file=str(path),
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
        )


ON_POLICY = 0.01
"""Mean and effective sample size of whole completions' ratios, this near to 1, leave nothing to weight."""


def _is_on_policy(kl: Report) -> bool:
    """Whether the sampler is π itself, on this data."""
    found = [kl.scalars.get(f"ratio/sequence/{name}") for name in ("mean", "effective_sample_size")]
    return all(x is not None and abs(float(x) - 1) < ON_POLICY for x in found)

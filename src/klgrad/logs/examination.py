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
"""Called with the position in the file and its end, in a unit of the format."""


def examine(
    path: Path,
    cell: str = "k3-loss",
    columns: dict[str, str] | None = None,
    *,
    progress: Progress = lambda done, total: None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> LogReport:
    r"""Read a log once, a bounded number of tokens at a time, and report on it.

    Args:
        path: a Parquet, JSONL or NPZ file with per-token log-probs.
        cell: the name, in `klgrad.zoo`, of the KL loss in use.
        columns: role to column name, to override the recognised names; an empty name leaves an optional role out.
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
    chosen = cell_of(cell)
    log = open_log(path, columns or {}, chunk_tokens)
    sums = _Sums(chosen, log.columns)
    for chunk in log.chunks():
        sums.check_padding(chunk)
        for block in blocks(chunk):
            sums.add(block)
        progress(chunk.done, log.total)
    if not sums.kl.lengths.tokens:
        rows = sums.kl.lengths.rows
        raise LogError(
            "a log with at least one live token",
            f"{rows} row{'s' * (rows != 1)} without live tokens" if rows else f"{path}, which has no rows",
            "check that the mask is 1 at the completion's tokens" if rows else "write the log again",
        )
    return sums.report(path)


class _Sums:
    """All sums over the log."""

    def __init__(self, cell: Cell, columns: dict[str, str]) -> None:
        self.cell, self.columns = cell, columns
        self.kl, self.lags, self.padding = KLSums(), Lags(), Padding()
        self.coefficients = CoefficientSums(cell, "behavior_logp" in columns or "old_logp" in columns)
        # Without an old policy the trainer is π itself, and has the same ratios to the sampler.
        self.mismatch = MismatchSums(ratios=None if "old_logp" in columns else self.kl.ratios)
        self.evidence = Evidence() if "behavior_logp" in columns else None

    def check_padding(self, chunk: Chunk) -> None:
        if chunk.mask is None:  # rows that end in exact zeros are then probably padded
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
"""If the mean and the effective sample size of sequence ratios are this near to 1, the data count as on-policy."""


def _is_on_policy(kl: Report) -> bool:
    """Whether the sampler is π itself on these data."""
    found = [kl.scalars.get(f"ratio/sequence/{name}") for name in ("mean", "effective_sample_size")]
    return all(x is not None and abs(float(x) - 1) < ON_POLICY for x in found)

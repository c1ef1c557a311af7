"""The report on a log, as text and as JSON."""

import json
from dataclasses import asdict, dataclass, field

from ..reports.divergence import Report
from ..support.atomic_files import finite
from ..targets import TARGETS, UNCORRECTED
from ..zoo import Cell
from .by_label import Part
from .coefficients import Comparison
from .diagnosis.causes import Cause
from .diagnosis.evidence import Lags, Padding

HARDLY = 0.05
"""Relative difference of coefficients below which an unsound cell makes little difference on this data."""

STALE = 0.5
"""Effective sample size of sequence ratios, as a share, below which the tokens count as sampled from another policy."""

RARE = 1e-4
"""Smallest share of tokens in a dead zone that is mentioned."""

APART = 0.5
"""Relative difference from the sequence-level coefficients above which the report explains it."""


@dataclass(frozen=True, eq=False)
class LogReport:
    """The result of `examine`.

    Attributes:
        file: the path of the log, or what was given and how many files that is.
        columns: role to the name of the column that was read.
        rows: number of completions.
        tokens: number of live tokens.
        kl: the `kl_report` of the whole file.
        cell: the KL loss in use.
        comparisons: its coefficients compared with the sound ones, by level.
        dead_share: share of tokens in a dead zone: the sound coefficient is not zero, but that of the cell is.
        mismatch: the `mismatch_report`; None without log-probs of the sampler.
        cause: the likely cause of the mismatch; None without log-probs of the sampler.
        reference: how well π and ref are aligned.
        padding: rows that look padded.
        parts: the same KLs for each value of the column `by`; empty without one.
        cell_is_assumed: whether `cell` was not named.

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
        ['advice', 'cell', 'columns']
    """

    file: str
    columns: dict[str, str]
    rows: int
    tokens: int
    kl: Report
    cell: Cell
    comparisons: dict[str, Comparison]
    dead_share: float
    mismatch: Report | None
    cause: Cause | None
    reference: Lags
    padding: Padding
    parts: list[Part] = field(default_factory=list)
    cell_is_assumed: bool = False

    @property
    def notes(self) -> list[str]:
        """Remarks on how the file was read, and on the limits of its numbers."""
        found = []
        if "logp" in self.columns and self.columns["logp"].lower().startswith(
            ("old", "prev", "prox", "pi_old", "b_log")
        ):
            found.append(f"`{self.columns['logp']}` is used as logp: at the start of an update π is the old policy.")
        if self.padding.share > 0.01:
            found.append(
                f"There is no mask, and {self.padding.share:.0%} of the rows end in log-probs of exactly 0. If these "
                "are padding, every mean per token is too small: log the completion mask."
            )
        if "behavior_logp" not in self.columns and "old_logp" in self.columns:
            found.append("Ratios are π/old; the sampler's own log-probs are not in the file.")
        if self._is_at_the_reference:
            found.append(
                "π equals ref at every token: this is expected before the first update; later it means that ref is "
                "not held fixed."
            )
        elif self._is_stale:
            found.append("The tokens are not sampled from π, and the KLs to the reference are not corrected for this.")
        if self.cell_is_assumed and not self._is_at_the_reference:
            found.append(
                f"The log does not say which KL loss the run has: {self.cell.name} is assumed. Name yours by --cell; "
                "if β is 0 there is none, and what follows about its coefficients does not apply."
            )
        return found

    @property
    def _is_at_the_reference(self) -> bool:
        return float(self.kl.scalars["log_ratio/abs_max"]) == 0

    @property
    def _is_stale(self) -> bool:
        return float(self.kl.scalars.get("ratio/sequence/effective_sample_size", 1.0)) < STALE

    @property
    def explanation(self) -> str:
        """Why a token-level loss is far from the sequence-level KL; empty if it is not."""
        token, sequence = (self.comparisons[level].relative_difference for level in ("token", "sequence"))
        if not sequence > max(APART, token):
            return ""
        return (
            "Whole completions: here the coefficient of a token also contains the KL of all later tokens. A "
            "token-level loss always differs much from this, so a large difference in this column is no error: compare "
            "such a loss token by token."
        )

    @property
    def advice(self) -> list[str]:
        """What to change, most important first. Findings that depend on misaligned columns are left out."""
        misaligned = self._misaligned()
        found = [*misaligned, *self._cause(), *([] if misaligned else self._unsound()), *self._stale()]
        return found or [self._nothing()]

    def _nothing(self) -> str:
        if self._is_at_the_reference:
            return "The KL term cannot be examined: π equals ref at every token."
        if self.cause is None:
            return "Nothing to change in reference and KL term; whether trainer and sampler agree is unknown."
        return "Nothing to change: no fault of trainer, reference or KL term was found in these data."

    def _misaligned(self) -> list[str]:
        shift = self.reference.shift()
        if not shift:
            return []
        where = "next" if shift > 0 else "previous"
        return [
            f"Align `{self.columns['ref_logp']}`: its entry for the {where} token fits `{self.columns['logp']}` better "
            f"(root mean square difference {self.reference.rms(shift):.3g}, {self.reference.rms(0):.3g} as logged)."
        ]

    def _cause(self) -> list[str]:
        if self.cause is None or not self.cause.remedy:
            return []
        return [self.cause.remedy + (" Then log again: there is another cause." if self.cause.alone is False else "")]

    def _unsound(self) -> list[str]:
        off = self.comparisons["token"].relative_difference
        what = TARGETS[self.cell.descends.on_policy].phrase
        if self.cell.instead is None or off != off:  # if π equals ref, there is nothing to compare
            return []
        dead_zone = self.dead_share >= RARE
        if off < HARDLY and not dead_zone and self.cell.descends.on_policy == "reverse-kl-token":
            return []
        if off < HARDLY and not dead_zone:
            return [
                f"{self._named} descends {what}. This near to ref, its coefficients differ from those of the "
                f"token-level reverse KL by only {off:.1%}; the difference grows when π moves away from ref. "
                f"{self.cell.instead}"
            ]
        dead = f", and are zero on {self.dead_share:.2%} of the tokens" if dead_zone else ""
        return [
            f"{self._named} descends {what}: on these tokens its coefficients differ from those of the token-level "
            f"reverse KL by {off:.0%}{dead}. {self.cell.instead}"
        ]

    @property
    def _named(self) -> str:
        return f"If the KL loss of the run is {self.cell.name}: it" if self.cell_is_assumed else self.cell.name

    def _stale(self) -> list[str]:
        has_cause = self.cause is not None and self.cause.name not in ("none", "systematic", "unexplained")
        off_policy = self.cell.descends.off_policy
        is_kl = TARGETS[off_policy].has_gradient and off_policy not in UNCORRECTED
        if not self._is_stale or has_cause or is_kl:
            return []
        left = float(self.kl.scalars["ratio/sequence/effective_sample_size"])
        return [
            f"The tokens are sampled from another policy (effective sample size {left:.0%} of the completions): use "
            f"importance weights in the KL term, {self.comparisons['sequence'].term}."
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        mismatch = None
        if self.mismatch is not None and self.cause is not None:
            mismatch = {
                "metrics": self.mismatch.metrics(),
                "intervals": self.mismatch.intervals(),
                "cause": asdict(self.cause),
            }
        return {
            "file": self.file,
            "columns": self.columns,
            "rows": self.rows,
            "tokens": self.tokens,
            "report": self.kl.metrics(),
            "intervals": self.kl.intervals(),
            "cell": {
                "name": self.cell.name,
                "descends_on_policy": self.cell.descends.on_policy,
                "descends_off_policy": self.cell.descends.off_policy,
                "share_in_dead_zone": self.dead_share,
                "against": {level: asdict(x) for level, x in self.comparisons.items()},
            },
            "mismatch": mismatch,
            **({"by": [part.to_dict() for part in self.parts]} if "by" in self.columns else {}),
            "notes": self.notes,
            "advice": self.advice,
        }


def to_json(report: LogReport) -> str:
    """The report as JSON; numbers that are not finite are null."""
    return json.dumps(finite(report.to_dict()), indent=2, ensure_ascii=False) + "\n"

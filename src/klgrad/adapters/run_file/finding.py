"""What each KL of a run descends: by the audit of the installed framework, or as it was recorded."""

from dataclasses import dataclass
from typing import Any

from ...errors import NotAuditableError
from ..recorded import recorded
from ..registry import FRAMEWORKS
from .run import Part, Run


@dataclass(frozen=True)
class Finding:
    """What one KL of a run descends.

    Attributes:
        part: the KL.
        verdict, verdict_off_policy: on fresh and on stale samples; empty if these settings were never audited.
        detail, detail_off_policy: `always` or `large-batches`; for `unknown`, the distance to the nearest target.
        source: where the verdicts are from.
        advice: what the audit advises; empty for a recorded one.
        notes: the notes of the audit.
    """

    part: Part
    verdict: str
    verdict_off_policy: str
    detail: str
    detail_off_policy: str
    source: str
    advice: str = ""
    notes: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        found = {name: value for name, value in vars(self).items() if name != "part"}
        part = {"place": self.part.place, "loss": self.part.loss, "beta": self.part.coefficient}
        return {**part, "caveat": self.part.caveat, **found}


def find(run: Run) -> list[Finding]:
    """Audit each KL of a run with the installed framework; take the recorded audit where it is not installed.

    Args:
        run: the run, of `read_run`.

    Returns:
        One finding for each of its KLs.
    """
    return [_audited(run, part) or _recorded(run, part) for part in run.parts]


def _audited(run: Run, part: Part) -> Finding | None:
    framework = FRAMEWORKS[run.framework]
    if framework.installed is None:
        return None
    import torch

    from ...audit import audit
    from ...audit.numbers import percent
    from ...audit.render.plain import notes

    torch.set_num_threads(1)  # the tensors are too small for threads to help
    try:
        listed = part.build() if part.build else {x.name: x for x in framework.subjects()}.get(part.loss)
    except (NotAuditableError, ImportError):
        return None
    if listed is None:
        return None
    r = audit(listed)
    source = f"audited here with {framework.name} {framework.installed}"
    near = f"{percent(r.bias[r.nearest])} from {r.nearest}" if r.verdict == "unknown" else ""
    off = r.nearest_off_policy
    near_off = f"{percent(r.bias_off_policy[off])} from {off}" if r.verdict_off_policy == "unknown" else ""
    details = (r.holds or near, r.holds_off_policy or near_off)
    return Finding(part, r.verdict, r.verdict_off_policy, *details, source, str(r.advice), "; ".join(notes(r)))


def _recorded(run: Run, part: Part) -> Finding:
    known = recorded(run.framework)
    for name, on_policy, off_policy, *_, notes in known.rows if known else ():
        if known is not None and name == part.loss:
            fresh, stale = _split(on_policy), _split(off_policy)
            source = f"recorded on {known.date} with {known.framework} {known.version}"
            return Finding(part, fresh[0], stale[0], fresh[1], stale[1], source, notes=notes)
    return Finding(part, "", "", "", "", f"not audited: install {run.framework} to audit these settings")


def _split(cell: str) -> tuple[str, str]:
    """The verdict in the cell of a table, and what stands beside it: "unknown (21% from forward-kl-token)"."""
    verdict, _, detail = cell.partition(" (")
    return verdict, detail.rstrip(")")

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
        holds: `always` if the first holds in batches of every size, or `large-batches`; None for `unknown`.
        words, words_off_policy: the verdicts in words.
        source: where the verdicts are from.
        advice: what the audit advises; empty for a recorded one.
        notes: the notes of the audit.
    """

    part: Part
    verdict: str
    verdict_off_policy: str
    holds: str | None
    words: str
    words_off_policy: str
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
    from ...audit.words import in_words, notes

    torch.set_num_threads(1)  # the tensors are too small for threads to help
    try:
        listed = part.build() if part.build else {x.name: x for x in framework.subjects()}.get(part.loss)
    except (NotAuditableError, ImportError):
        return None
    if listed is None:
        return None
    r = audit(listed)
    source = f"audited here with {framework.name} {framework.installed}"
    words = in_words(r), in_words(r, on_policy=False)
    return Finding(part, r.verdict, r.verdict_off_policy, r.holds, *words, source, str(r.advice), "; ".join(notes(r)))


def _recorded(run: Run, part: Part) -> Finding:
    known = recorded(run.framework)
    if known is None or part.loss not in known.verdicts:
        # Without `build` the framework's list has all that can be audited, installed or not.
        remedy = f"install {run.framework} to audit these settings" if part.build else "no audit has these settings"
        return Finding(part, "", "", None, "", "", f"not audited: {remedy}")
    words = next(row for row in known.rows if row[0] == part.loss)
    source = f"recorded on {known.date} with {known.framework} {known.version}"
    return Finding(part, *known.verdicts[part.loss], words[1], words[2], source, notes=words[-1])

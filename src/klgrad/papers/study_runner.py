"""Compute, judge and draw results. Files are complete or absent; numbers of an earlier run are reused."""

import hashlib
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .. import __version__
from ..support.atomic_files import finite, write_whole
from ..support.figure_files import KINDS, look, write_figure
from .study import VERDICTS, Check, Numbers, Settings, Study


@dataclass(frozen=True)
class Outcome:
    """The outcome of one result.

    Attributes:
        name: of the result.
        checks: one for each sentence of the claim.
        seconds: the time of the computation; None if the numbers of an earlier run were reused.
        measured: when and by which commit the training runs behind the numbers were made; empty without such runs.
    """

    name: str
    checks: list[Check]
    seconds: float | None
    measured: str = ""

    @property
    def decisive(self) -> list[Check]:
        """The paper's sentences; all sentences if none is from a paper."""
        return [check for check in self.checks if not check.ours] or self.checks

    @property
    def holds(self) -> bool:
        """Whether every decisive sentence holds."""
        return all(check.holds for check in self.decisive)

    @property
    def counts(self) -> str:
        """How many decisive sentences hold, are contradicted and are undecided."""
        found = Counter(check.verdict for check in self.decisive)
        words = ", ".join(f"{verdict} {found[verdict]}" for verdict in VERDICTS if found[verdict])
        return f"{words}, of {len(self.decisive)}"

    @property
    def is_contradicted(self) -> bool:
        """Whether the opposite of a decisive sentence is shown."""
        return any(check.verdict == "contradicted" for check in self.decisive)

    @property
    def verdict(self) -> str:
        """`holds`, or the decisive sentences that are contradicted and those that are undecided."""
        parts = []
        for verdict in VERDICTS[1:]:
            if found := [f"{c.claim} ({c.measured})" for c in self.decisive if c.verdict == verdict]:
                parts.append(f"{verdict}: {'; '.join(found)}")
        return ". ".join(parts) or "holds"


def reproduce(study: Study, settings: Settings, out: Path, *, fresh: bool = False) -> Outcome:
    """Compute, judge and draw one result.

    Args:
        study: the result.
        settings: how much to compute.
        out: the folder for numbers and figure, which is written as PNG and as SVG.
        fresh: compute again, even if `out` has numbers of the same settings and the same code.

    Returns:
        The outcome.
    """
    data, *pictures = files_of(study, out)
    requested = {"klgrad": __version__, "code": _code(), **asdict(settings)}
    again = fresh or study.experiment is not None  # a file of training runs is read at once, and may have changed
    numbers, seconds = None if again else _kept(study, data, requested), None
    if numbers is None:
        start = time.perf_counter()
        # Judge and draw what JSON stores, so that saved numbers give the same result.
        numbers = json.loads(json.dumps(finite(study.run(settings))))
        seconds = time.perf_counter() - start
        for picture in pictures:
            picture.unlink(missing_ok=True)
    made = numbers["made"] if study.experiment else {}
    measured = f"{', '.join(made['date'])}, commit {', '.join(made['commit'])}" if made else ""
    outcome = Outcome(study.name, study.check(numbers), seconds, measured)
    saved = {
        "result": study.name,
        "source": study.source,
        "claim": study.claim,
        "settings": requested,
        "verdict": outcome.verdict,
    }
    saved |= {"checks": [asdict(check) for check in outcome.checks], "numbers": numbers}
    # Numbers before the figure: a missing figure is drawn again, an outdated one would be kept.
    write_whole(data, json.dumps(saved, indent=1) + "\n")
    if not all(picture.exists() for picture in pictures):
        _draw(study, numbers, pictures[0])
    return outcome


def files_of(study: Study, out: Path) -> list[Path]:
    """The file for the numbers, and one for each format of the figure."""
    return [out / f"{study.name}.{kind}" for kind in ("json", *KINDS)]


def _kept(study: Study, data: Path, requested: dict[str, Any]) -> Numbers | None:
    """Numbers of an earlier run with the same settings; None if there are none, or if they cannot be judged."""
    try:
        saved = json.loads(data.read_text(encoding="utf-8"))
        if saved["settings"] != requested:
            return None
        study.check(saved["numbers"])
        return saved["numbers"]
    except Exception:  # a file may hold anything
        return None


@cache
def _code() -> str:
    """A digest of the package's sources: numbers of other code are computed again."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _draw(study: Study, numbers: Numbers, path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(look(10)):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        study.draw(numbers, figure)
        write_figure(figure, path)

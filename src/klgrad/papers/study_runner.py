"""Run results one by one; keep whole files only, and what is there already."""

import io
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..support.atomic_files import finite, write_whole
from .study import Check, Numbers, Settings, Study

DPI = 110


@dataclass(frozen=True)
class Outcome:
    """What became of one result.

    Attributes:
        name: of the result.
        checks: each sentence of the claim, judged.
        seconds: it took to compute; None if an earlier run's numbers were kept.
    """

    name: str
    checks: list[Check]
    seconds: float | None

    @property
    def reproduced(self) -> bool:
        """Whether every sentence holds."""
        return all(check.holds for check in self.checks)

    @property
    def verdict(self) -> str:
        """`reproduced`, or in what it differs."""
        failed = [f"{c.claim} ({c.measured})" for c in self.checks if not c.holds]
        return "reproduced" if not failed else "differs: " + "; ".join(failed)


def reproduce(study: Study, settings: Settings, out: Path, *, fresh: bool = False) -> Outcome:
    """Compute (unless the same settings were computed before), judge and draw one result under `out`."""
    data, picture = files_of(study, out)
    asked = {"klgrad": __version__, **asdict(settings)}
    numbers, seconds = None if fresh else _kept(data, asked), None
    if numbers is None:
        start = time.perf_counter()
        # What is judged and drawn is what JSON keeps, nothing finer.
        numbers = json.loads(json.dumps(finite(study.run(settings))))
        seconds = time.perf_counter() - start
        picture.unlink(missing_ok=True)
    outcome = Outcome(study.name, study.check(numbers), seconds)
    saved = {
        "result": study.name,
        "source": study.source,
        "claim": study.claim,
        "settings": asked,
        "verdict": outcome.verdict,
    }
    saved |= {"checks": [asdict(check) for check in outcome.checks], "numbers": numbers}
    # Numbers before the picture: one that is missing is drawn from them, one that is stale would be kept.
    write_whole(data, json.dumps(saved, indent=1) + "\n")
    if not picture.exists():
        write_whole(picture, _draw(study, numbers))
    return outcome


def files_of(study: Study, out: Path) -> tuple[Path, Path]:
    """Where its numbers and its figure go."""
    return out / f"{study.name}.json", out / f"{study.name}.png"


def _kept(data: Path, asked: dict[str, Any]) -> Numbers | None:
    """Numbers of an earlier run with the same settings; a file that cannot be read is as good as none."""
    try:
        saved = json.loads(data.read_text(encoding="utf-8"))
        return saved["numbers"] if saved["settings"] == asked else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _draw(study: Study, numbers: Numbers) -> bytes:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        study.draw(numbers, figure)
        buffer = io.BytesIO()
        FigureCanvasAgg(figure).print_figure(buffer, dpi=DPI, format="png", metadata={"Software": None})
    return buffer.getvalue()

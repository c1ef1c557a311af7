"""Side-by-side timing: the candidates run in turn in one process, and their ratio is reported.

Rows of results contain device, versions and commit; tables are generated from the rows.
"""

import csv
import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import klgrad

RESULTS = Path(__file__).parent / "results"
RECORDED = Path(klgrad.__file__).parent / "papers" / "recorded"
"""Results of experiments, which `klgrad reproduce` reads."""


def side_by_side(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each candidate in each of `rounds` rounds, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def rows(benchmark: str, seconds: dict[str, list[float]], baseline: str) -> list[dict[str, object]]:
    """One row per candidate, with its median, its spread and its speed relative to the baseline."""
    return [
        {
            "benchmark": benchmark,
            "candidate": name,
            "median_s": f"{median(x):.4g}",
            "p20_s": f"{quantiles(x, n=5)[0]:.4g}",
            "p80_s": f"{quantiles(x, n=5)[3]:.4g}",
            "times_faster": f"{median(seconds[baseline]) / median(x):.3g}",
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            **provenance(),
        }
        for name, x in seconds.items()
    ]


def provenance() -> dict[str, str]:
    """Versions, machine and commit of a measurement."""
    return {
        "torch": torch.__version__,
        "klgrad": klgrad.__version__,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def write(found: list[dict[str, object]], path: Path) -> None:
    """Write the rows as CSV; a kill meanwhile leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(dict.fromkeys(name for row in found for name in row)))
        writer.writeheader()
        writer.writerows(found)
    os.replace(partial, path)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier measurement; none if there was none."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as handle:
        return [dict(row) for row in csv.DictReader(handle)]


def save(found: list[dict[str, object]], file: str) -> None:
    """Write the rows under results/, and print them."""
    write(found, RESULTS / file)
    for row in found:
        print(f"{row['benchmark']:<28}{row['candidate']:<10}{row['median_s']:>10} s  {row['times_faster']:>8} x")


def _commit() -> str:
    if "KLGRAD_COMMIT" in os.environ:  # for a copy of the tree without its history
        return os.environ["KLGRAD_COMMIT"]
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"

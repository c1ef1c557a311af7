"""Compare the audit with an earlier one: `python benchmarks/bench_audit.py`.

The earlier commit is unpacked into a temporary folder, and both run with the packages of this environment, in turn.
Seconds are those of CPU in user mode, which other programs on the machine disturb less than those of a clock. Those of
one loss and of the catalogue begin when torch is loaded; those of TRL are the whole command's.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from harness import provenance, write

HERE = Path(__file__).parent
BEFORE = "7659611"

TIMED = """
import os, torch
torch.set_num_threads(1)
from klgrad.audit import audit, catalogue
{setup}
start = os.times().user
{run}
print(os.times().user - start)
"""
LOSS = TIMED.format(
    setup="loss = lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2", run="audit(loss, name='loss of a user')"
)
CATALOGUE = TIMED.format(setup="losses = catalogue().values()", run="for loss in losses: audit(loss)")


def timed(code: str, tree: Path) -> float:
    """Seconds that a program measures itself."""
    done = subprocess.run([sys.executable, "-c", code], env=environment(tree), capture_output=True, check=True)
    return float(done.stdout)


def command(tree: Path) -> float:
    """Seconds of `klgrad audit trl`."""
    start = os.times().children_user
    subprocess.run(
        [sys.executable, "-m", "klgrad", "audit", "trl"], env=environment(tree), capture_output=True, check=True
    )
    return os.times().children_user - start


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}


@contextmanager
def earlier() -> Iterator[Path]:
    """A folder with the earlier commit."""
    with tempfile.TemporaryDirectory() as folder:
        files = subprocess.run(["git", "archive", BEFORE], cwd=HERE.parent, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=files, check=True)
        yield Path(folder)


BENCHMARKS: dict[str, tuple[Callable[[Path], float], int]] = {
    "one loss": (lambda tree: timed(LOSS, tree), 5),
    "the catalogue": (lambda tree: timed(CATALOGUE, tree), 1),
    "klgrad audit trl": (command, 1),
}
"""By name, the seconds in a folder, and how often they are measured."""


def main() -> None:
    found = []
    with earlier() as before:
        trees = {"before": before, "after": HERE.parent}
        for benchmark, (measure, rounds) in BENCHMARKS.items():
            seconds = {name: [measure(tree) for _ in range(rounds)] for name, tree in trees.items()}
            for name, x in seconds.items():
                found.append(
                    {
                        "benchmark": benchmark,
                        "candidate": name,
                        "median_user_s": f"{median(x):.4g}",
                        "rounds": rounds,
                        "times_faster": f"{median(seconds['before']) / median(x):.3g}",
                        "threads": torch.get_num_threads(),
                        **provenance(),
                        "commit": BEFORE if name == "before" else provenance()["commit"],
                    }
                )
                print(f"{benchmark:<20}{name:<10}{median(x):>10.3g} s", flush=True)
    write(found, HERE / "results" / "audit.csv")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

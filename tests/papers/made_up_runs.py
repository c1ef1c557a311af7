"""CSV files of training runs with chosen numbers, and of the recorded runs with changed ones, for studies to read."""

import csv
import json
from functools import partial
from pathlib import Path

import pytest

from klgrad.papers import Settings
from klgrad.papers.runs import COMMITTED

MADE = {"torch": "2", "klgrad": "0", "commit": "0000000", "date": "2026-01-01"}
START = {"kl_per_token": 4.0, "forward_kl_per_token": 8.0, "correct": 0.0}
"""Of a distilled student before training."""
ERROR = 0.01
UPDATES = (0, 20, 40, 60)
RIGHT_AT_START = 0.1
"""Right answers before training with a reward."""
near = partial(pytest.approx, rel=1e-9)
"""For sums and fits of a few float64 numbers of the order of 1."""


def evaluations(label, own, teachers, right=0.1, seeds=3, noise=ERROR, first=0):
    """Distilled students of one setting before training and after 40 updates; seeds count from `first`, and differ."""
    for seed in range(first, first + seeds):
        off = 1 + noise * (seed - first - 1)
        end = {"kl_per_token": own * off, "forward_kl_per_token": teachers * off, "correct": right}
        for update, found in ((0, START), (40, end)):
            more = {"kl_per_token_se": ERROR, "entropy_per_token": 3.0, "length": 32.0}
            yield {**label, "seed": seed, "update": update, **found, **more, **MADE}


def run(label, gain, kl, updates=UPDATES, **columns):
    """A run with a reward: right answers rise by `gain` with the root of the updates, the KL evenly to `kl`."""
    rows = []
    for update in updates:
        part = update / updates[-1]
        right, far = RIGHT_AT_START + gain * part**0.5, kl * part
        trained = {name: value if update else "" for name, value in columns.items() if name.startswith("train")}
        found = {"correct_in": right, "correct_out": right / 2, "kl_per_sequence": far, "kl_per_token": far / 10}
        found |= {"entropy_per_token": 2 - part, "length": 20 - 5 * part, "skipped_updates": 0}
        errors = {f"{name}_se": 0.001 for name in ("correct_in", "correct_out", "kl_per_sequence", "kl_per_token")}
        job = "_".join(map(str, label.values()))
        rows.append({"job": job, **label, "update": update, **found, **errors, **columns, **trained, **MADE})
    return rows


def write_file(path: Path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)


def write(folder: Path, **files) -> Settings:
    """The settings of studies that read these rows, each list under the name of its file."""
    for name, rows in files.items():
        write_file(folder / f"{name}.csv", rows)
    return Settings(measured=str(folder))


def copied(folder: Path, change, *names: str) -> Settings:
    """The recorded runs of some files, each row changed, or left out where the change is None."""
    for name in names:
        with (COMMITTED / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            write_file(folder / f"{name}.csv", [row for row in map(change, csv.DictReader(file)) if row])
    return Settings(measured=str(folder))


def saved(study, settings):
    """The numbers of a study, as they have passed through JSON."""
    return json.loads(json.dumps(study.run(settings)))


def judged(study, settings):
    """The verdict by claim."""
    return {check.claim: check.verdict for check in study.check(saved(study, settings))}


def not_held(study, settings):
    """The claims that do not hold."""
    return {claim for claim, verdict in judged(study, settings).items() if verdict != "holds"}

"""CSV files of distillation runs with chosen numbers, as the scripts of the experiments write them."""

import csv
import json
from pathlib import Path

from klgrad.papers import Settings

MADE = {"torch": "2", "klgrad": "0", "commit": "0000000", "date": "2026-01-01"}
START = {"kl_per_token": 4.0, "forward_kl_per_token": 8.0, "correct": 0.0}
ERROR = 0.01


def evaluations(label, own, teachers, right=0.1, seeds=3, noise=ERROR, first=0):
    """Runs of one setting, evaluated before training and after 40 updates; seeds count from `first`, and differ."""
    for seed in range(first, first + seeds):
        off = 1 + noise * (seed - first - 1)
        end = {"kl_per_token": own * off, "forward_kl_per_token": teachers * off, "correct": right}
        for update, found in ((0, START), (40, end)):
            more = {"kl_per_token_se": ERROR, "entropy_per_token": 3.0, "length": 32.0}
            yield {**label, "seed": seed, "update": update, **found, **more, **MADE}


def write(folder: Path, **files) -> Settings:
    """The settings of studies that read these rows, each list under the name of its file."""
    for name, rows in files.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
            writer.writeheader()
            writer.writerows(rows)
    return Settings(measured=str(folder))


def judged(study, settings):
    """The verdict by claim, from numbers that have passed through JSON."""
    checks = study.check(json.loads(json.dumps(study.run(settings))))
    return {check.claim: check.verdict for check in checks}

"""Made-up numbers of runs with a reward, with the columns of the recorded ones."""

import csv
from pathlib import Path

UPDATES = (0, 20, 40, 60)
START = 0.1
"""Right answers before training."""
MADE = {"torch": "2", "klgrad": "0", "commit": "0000000", "date": "2026-01-01"}


def run(label, gain, kl, updates=UPDATES, **columns):
    """The rows of one run: right answers rise by `gain` with the root of the updates, the KL evenly to `kl`.

    Each has an error of 0.001.
    """
    rows = []
    for update in updates:
        part = update / updates[-1]
        right, far = START + gain * part**0.5, kl * part
        trained = {name: value if update else "" for name, value in columns.items() if name.startswith("train")}
        rows.append(
            {
                "job": "_".join(map(str, label.values())),
                **label,
                "update": update,
                "skipped_updates": 0,
                "correct_in": right,
                "correct_out": right / 2,
                "kl_per_sequence": far,
                "kl_per_token": far / 10,
                "entropy_per_token": 2 - part,
                "length": 20 - 5 * part,
                **{f"{name}_se": 0.001 for name in ("correct_in", "correct_out", "kl_per_sequence", "kl_per_token")},
                **columns,
                **trained,
                **MADE,
            }
        )
    return rows


def write(path: Path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)

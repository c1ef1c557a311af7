"""Right answers at equal KL: the error of a difference has that of both sides."""

import csv

import pytest

from klgrad.papers import Settings
from klgrad.papers.runs import COMMITTED
from klgrad.papers.tang_munos import fig7_frontier

NOISIER = 8
"""Times the errors of the evaluations of one arm; then they exceed the spread between seeds."""


@pytest.mark.parametrize("arm", ["none", "k1-reward"])
def test_the_evaluations_of_both_arms_are_in_the_error_of_their_gap(arm, tmp_path):
    for name in ("comedy.csv", "std.csv", "frontier.csv"):
        with (COMMITTED / name).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            if row["arm"] == arm:
                row["correct_in_se"] = str(NOISIER * float(row["correct_in_se"]))
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    claim = "k1 in the reward at β = 0.03 answers more right than no KL"
    before, after = (fig7_frontier.run(s)["gaps"][claim] for s in (Settings(), Settings(measured=str(tmp_path))))
    assert after["difference"] == pytest.approx(before["difference"], rel=1e-9)  # fits differ in their last digits
    assert after["error"] > 2 * before["error"]

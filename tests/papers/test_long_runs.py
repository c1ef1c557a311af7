"""The study of long runs, on made-up runs: what it concludes, and from which rows."""

from itertools import product

import pytest
from papers.made_up_runs import judged, near, run, saved, write

from klgrad.papers.tang_munos import long_runs as study

UPDATES = tuple(range(0, 301, 30))
ENDS = {
    "k3-loss": (0.1, 2.0),
    "k1-reward": (0.1, 4.0),
    "k2-loss": (0.1, 3.0),
    "none": (0.08, 9.0),
    "k1-reward-near": (0.1, 2.5),
    "k3-reward-0.1": (0.05, 9.0),
    "k3-reward-1": (0.04, 9.0),
    "k1-loss-0.1": (0.06, 9.0),
    "k1-loss-1": (0.05, 9.0),
    "k1-reward-divided": (0.09, 4.0),
}
"""Right answers rise with the root of the KL, by this factor, and the KL evenly to this."""
GROWS = "the KL of k3 as loss still grows from 270 to 300 updates"
SETTLED = "the KL of k3 as loss has settled: it grows by less than a twentieth from 270 to 300 updates"
ORDER = "the order of right answers at 60 updates holds at 300"
ORDER_OF_KL = "the order of KL at 60 updates holds at 300"


def made(ends=None, left_out=()):
    found = []
    for (arm, (slope, kl)), seed in product((ENDS | (ends or {})).items(), range(3)):
        if arm not in left_out:
            label = {"arm": arm, "kl_coef": 0.0 if arm == "none" else 0.03, "learning_rate": 1e-05, "seed": seed}
            found += run(label, slope * kl**0.5, kl, UPDATES)
    return found


def numbers(folder, rows):
    return saved(study, write(folder, long=rows))


def verdicts(folder, rows):
    return judged(study, write(folder, long=rows))


def changed(rows, arm, updates, **factors):
    """The rows, with columns of one arm times a factor at some updates."""
    at = lambda row: row["arm"] == arm and row["update"] in updates
    return [{**row, **{name: row[name] * x for name, x in factors.items()}} if at(row) else row for row in rows]


def settled(rows):
    """The KL of k3 as a loss stays at the end, and the divided arm was behind at 60 updates."""
    rows = changed(rows, "k3-loss", (270,), kl_per_sequence=300 / 270 / 1.01)
    return changed(rows, "k1-reward-divided", (60,), correct_in=0.7)


def test_runs_for_which_every_sentence_holds(tmp_path):
    found = verdicts(tmp_path, settled(made()))
    assert found == dict.fromkeys(found, "holds")
    assert len(found) == 37


def test_a_kl_that_grows_with_the_updates_has_not_settled(tmp_path):
    found = verdicts(tmp_path, made())
    assert (found[GROWS], found[SETTLED]) == ("holds", "contradicted")
    growth = numbers(tmp_path, made())["growth"]["k3-loss"]
    assert growth["mean"] == near(1 / 9)


@pytest.mark.parametrize(
    ("ends", "factor", "of_right", "of_kl"),
    [
        ({}, {"correct_in": 0.2}, "contradicted", "holds"),
        ({}, {"kl_per_sequence": 0.2}, "holds", "contradicted"),
        (dict.fromkeys(ENDS, (0.1, 2.0)), {"correct_in": 2}, "undecided", "undecided"),
    ],
    ids=["right", "KL", "no pair differs early"],
)
def test_an_arm_that_falls_behind_late_breaks_the_order_of_its_measure_alone(ends, factor, of_right, of_kl, tmp_path):
    found = verdicts(tmp_path, changed(made(ends), "none", (300,), **factor))
    assert (found[ORDER], found[ORDER_OF_KL]) == (of_right, of_kl)


def test_an_arm_that_ends_below_its_start_has_collapsed(tmp_path):
    rows = changed(made(), "k2-loss", (300,), correct_in=0.2)
    found, failures = verdicts(tmp_path, rows), numbers(tmp_path, rows)["failures"]
    assert {arm: each["collapsed"] for arm, each in failures.items()} == {arm: 3 * (arm == "k2-loss") for arm in ENDS}
    ends = {claim: verdict for claim, verdict in found.items() if "ends above its start" in claim}
    assert len(ends) == len(ENDS)
    assert ends == {claim: "contradicted" if "k2" in claim else "holds" for claim in ends}
    assert found["k2 as loss answers more right at 300 updates than at 60"] == "contradicted"


def test_a_run_that_stopped_has_collapsed(tmp_path):
    rows = [row for row in made() if not (row["arm"] == "none" and row["seed"] == 0 and row["update"] > 120)]
    found, failed = verdicts(tmp_path, rows), numbers(tmp_path, rows)["failures"]["none"]
    assert failed == {"runs": 3, "collapsed": 0, "stopped": 1}
    assert found["no KL ends above its start"] == "contradicted"
    assert found[ORDER] == "undecided"  # two seeds are left


def test_right_answers_at_equal_kl(tmp_path):
    """The slopes of k3 and k1 differ by 0.04, and both have had a KL of 2."""
    rows = made({"k3-loss": (0.14, 2.0)})
    gap = numbers(tmp_path, rows)["equal_kl"]["k3-loss k1-reward"]
    assert gap["mean"] == near(0.04 * 2**0.5)
    assert gap["kl"] == near(2)
    equal = {claim: verdict for claim, verdict in verdicts(tmp_path, rows).items() if "equally" in claim}
    assert equal == {claim: "contradicted" if "k3" in claim else "holds" for claim in equal}


def test_a_curve_without_an_evaluation_so_near_to_ref_has_no_chance(tmp_path):
    """The first evaluation without a KL is at a tenth of its last KL."""
    claim = "at equal KL, k3 as loss answers more right than no KL"
    of = lambda kl: {c.claim: c for c in study.check(numbers(tmp_path, made({"none": (0.08, kl)})))}[claim]
    near, far = of(19.0), of(21.0)
    assert near.verdict == far.verdict == "holds"
    assert near.chance is not None
    assert far.chance is None
    assert ["no evaluation" in each.measured for each in (near, far)] == [False, True]


def test_a_run_whose_kl_falls_for_a_while_is_compared_at_equal_kl_without_those_evaluations(tmp_path):
    whole = numbers(tmp_path, made())["equal_kl"]
    rows = changed(made(), "k3-loss", (120, 210), kl_per_sequence=0.1, correct_in=0.0)
    fallen = numbers(tmp_path, rows)["equal_kl"]
    for pair, gap in fallen.items():
        assert gap["seeds"] == 3
        assert gap["mean"] == near(whole[pair]["mean"])


@pytest.mark.parametrize(("slope", "caught_up"), [(0.09, "holds"), (0.02, "contradicted")])
def test_whether_the_divided_arm_catches_up(slope, caught_up, tmp_path):
    """Its right answers end 0.02 or 0.16 below those of the undivided arm, and are behind by more at 60 updates."""
    rows = changed(made({"k1-reward-divided": (slope, 4.0)}), "k1-reward-divided", (60,), correct_in=0.5)
    found = verdicts(tmp_path, rows)
    of = lambda part: next(verdict for claim, verdict in found.items() if part in claim)
    assert of("catches up") == caught_up
    assert of("less far behind") == ("holds" if slope == 0.09 else "contradicted")

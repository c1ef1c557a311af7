"""Studies that read recorded runs: what counts as a difference, what they conclude, and how `--run` repeats them."""

import math
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from papers.made_up_runs import copied, judged, near
from tolerances import DRAWN_AGAIN, EXACT
from typer.testing import CliRunner

from klgrad.cli import app, reproduce as command
from klgrad.errors import ExperimentError
from klgrad.papers import Settings, frpo, runs
from klgrad.papers.comedy import on_policy
from klgrad.papers.study import exceeds, no_gain, studies
from klgrad.papers.tang_munos import fig8_language_model

STUDIES = studies()
EXPERIMENTS = [name for name, study in STUDIES.items() if study.experiment]
FIG7 = STUDIES["tang-munos/fig7"].computation
ROUNDED = 0.005
"""Of a share that a page gives with two digits."""
DRAWN = 2000
"""Repetitions, each with other errors of the evaluations: they give a standard error to 1.6%, 1/√(2 · 2000)."""


def rows(*values, error=0.0, seeds="01234567"):
    return [{"seed": seed, "x": value, "x_se": error} for seed, value in zip(seeds, values, strict=False)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (rows(1, 2, 3), 3**-0.5),  # over the seeds
        (rows(1, 2, 3, error=0.1), 3**-0.5),
        (rows(2, 2, 2, error=0.3), 0.3 / 3**0.5),  # of the evaluations; the seeds agree
        (rows(9, error=0.1), 0.1),
        (rows(0, 2, 0, 2, seeds="0011"), (4 / 3 / 4) ** 0.5),  # over the four runs; the seeds agree
        (rows(0, 0, 2, 2, seeds="0011"), 1.0),  # over the two seeds, which have two runs each
        (rows(1, 1, 1, 1, seeds="0011", error=0.2), 0.2 / 4**0.5),
    ],
)
def test_the_error_is_the_largest_of_those_over_runs_over_seeds_and_of_the_evaluations(found, expected):
    assert runs.over_seeds(found, "x")["error"] == near(expected)


@pytest.mark.parametrize(
    ("gap", "seeds", "verdict", "of_a_collapse"),
    [
        (2.1, 3, "holds", "holds"),
        (1.9, 3, "undecided", "undecided"),
        (-2.1, 3, "contradicted", "undecided"),
        (9, 2, "undecided", "undecided"),
        (-9, 2, "undecided", "undecided"),
    ],
)
def test_a_sentence_is_decided_beyond_two_errors_with_three_seeds(gap, seeds, verdict, of_a_collapse):
    """A run that has not collapsed yet does not contradict that it would."""
    found = {"mean": gap, "error": 1.0, "seeds": seeds}
    assert runs.exceeds_over_seeds("", found).verdict == verdict
    assert runs.counts(found) is (verdict == "holds")
    collapse = runs.collapses("", found, "after 60 updates")
    assert collapse.verdict == of_a_collapse
    assert collapse.measured.endswith("; after 60 updates") == (verdict == "contradicted")


def test_a_sentence_without_runs_waits():
    none = runs.difference([], rows(1), "x")
    equal, collapsed = runs.equal_over_seeds("", none, 1.0), runs.collapses("", none, "")
    for check in (runs.exceeds_over_seeds("", none), equal, collapsed):
        assert (check.verdict, check.waits, check.measured) == ("undecided", True, "no value: runs are missing")


over = lambda x, seeds=3, error=1.0: {"mean": x, "error": error, "seeds": seeds}
SENTENCES = {
    # contradicted only if the opposite is significant
    "repeats": (lambda z: exceeds("", over(z)), "-4.1 contradicted -3.9 undecided 3.9 undecided 4.1 holds"),
    "several": (lambda z: exceeds("", over(9), over(z)), "-4.1 contradicted -3.9 undecided 3.9 undecided 4.1 holds"),
    "negative": (lambda z: exceeds("", over(z), sign=-1), "-4.1 holds -3.9 undecided 3.9 undecided 4.1 contradicted"),
    # contradicted only by a gain beyond the margin of 0.25, by two standard errors
    "no gain": (lambda x: no_gain("", over(x, error=0.1)), "0 holds 0.2 undecided 0.3 undecided 0.5 contradicted"),
    # a margin of 3 and an error of 1: equal below a difference of 1, unequal beyond 5
    "equal": (
        lambda x: runs.equal_over_seeds("", over(x), margin=3.0),
        "-0.5 holds 0.5 holds 2 undecided 9 contradicted",
    ),
    "two seeds": (lambda x: runs.equal_over_seeds("", over(x, seeds=2), margin=3.0), "0.5 undecided"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_a_sentence_holds_or_is_contradicted_or_undecided(case):
    judge, expected = SENTENCES[case]
    values = expected.split()[::2]
    assert " ".join(f"{value} {judge(float(value)).verdict}" for value in values) == expected


def test_runs_of_one_seed_are_compared_with_each_other():
    """The seeds are far apart and their differences are not; a seed that one setting has alone is left out."""
    own, other = rows(1.0, 6.1, 10.9, 7), rows(0, 5, 10)
    gap = runs.difference(own, other, "x")
    assert gap == near({"mean": 1.0, "error": 0.1 / 3**0.5, "seeds": 3})
    share, error = runs.excess(rows(1.2, 12, error=0.1), rows(1, 10, error=0.1), "x"), (0.1, 0.12, 0.01, 0.012)
    assert share == near({"mean": 0.2, "error": math.hypot(*error) / 2, "seeds": 2})


def test_more_runs_do_not_make_the_error_before_training_smaller():
    """All runs of a seed begin with one model on the same questions, and each seed has questions of its own."""
    first = [{"update": 0, **row} for row in rows(1, 3, 3, 3, seeds="1333", error=0.3)]
    found = runs.at_start([*first, {"update": 20, "seed": "1", "x": 9}], "x")
    assert found == {"mean": 2, "error": near(1), "seeds": 2}


@pytest.mark.parametrize(("mean", "column"), [(runs.summaries, ["x"]), (runs.paths, "x")])
def test_runs_that_differ_in_something_else_than_their_seed_are_not_pooled(mean, column):
    same = {"arm": "a", "update": 60, "x": 1}
    rates = [{**same, "seed": seed, "rate": rate} for seed in ("0", "1") for rate in ("1e-4", "3e-4")]
    assert len(mean(rates, column, "{arm} {rate}")) == 2
    with pytest.raises(ExperimentError, match="each setting, seed and update; received 2 rows of the setting 'a' with"):
        mean(rates, column, "{arm}")


def test_the_nearest_run_of_each_arm_is_one_of_the_first_seed_that_did_not_diverge():
    ends = [("a", "0", 0.9), ("b", "0", 10.0), ("a", "0", 0.8), ("a", "1", 0.1), ("a", "0", float("nan"))]
    ends += [("b", "0", 9.0), ("c", "0", float("inf")), ("c", "2", 0.1), ("a", "0", 0.8)]
    found = [{"arm": arm, "seed": seed, "kl_per_token": kl, "place": i} for i, (arm, seed, kl) in enumerate(ends)]
    assert {arm: row["place"] for arm, row in runs.nearest(found, "{arm}").items()} == {"a": 2, "b": 5}


# At equal KL.


def evaluations(slope, *kls, seeds=(0, 1, 2), error=0.0):
    """Right answers of 0.1 + slope √KL."""
    right = lambda kl: {"kl_per_sequence": kl, "correct_in": 0.1 + slope * kl**0.5, "correct_in_se": error}
    return [{"seed": str(s), "update": 20 + 20 * i, **right(kl)} for s in seeds for i, kl in enumerate(kls)]


@pytest.mark.parametrize(("right", "expected"), [(0.3, 1.0), (0.6, None), (0.05, None)])
def test_the_kl_of_a_reward_is_not_extrapolated(right, expected):
    """Right answers of 0.1 + 0.2 √KL, seen from 0.2 to 0.5."""
    found = runs.Rise(evaluations(0.2, 0.25, 4.0, seeds=(0,)), start=0.1).kl_of(right)
    assert found is None if expected is None else found == near(expected)


def test_two_arms_are_compared_at_the_largest_kl_that_both_have_had():
    found = runs.gap_at_equal_kl(evaluations(0.3, 0.5, 2, 4), evaluations(0.2, 0.3, 0.6, 1), start=0.1)
    assert found == pytest.approx({"mean": 0.1, "error": 0, "seeds": 3, "kl": 1}, rel=1e-9, abs=1e-12)


def test_the_error_of_a_comparison_at_equal_kl_has_that_of_the_evaluations():
    """At the last of three KLs; by hand: its variance is the sum over evaluations of their squared weights there."""
    kls, error = (1.0, 2.0, 4.0), 0.01
    powers = torch.tensor([[kl**0.5, kl] for kl in kls], dtype=torch.float64)
    weights = powers[-1] @ torch.linalg.inv(powers.T @ powers) @ powers.T
    expected = error * float(weights.norm()) * 2**0.5 / 3**0.5  # of two arms, and of the mean of three seeds
    found = runs.gap_at_equal_kl(evaluations(0.3, *kls, error=error), evaluations(0.2, *kls, error=error), start=0.1)
    EXACT.check(found["error"], expected)


def test_the_error_of_the_kl_of_a_reward_is_the_spread_over_evaluations_that_are_drawn_again():
    run = evaluations(0.2, 0.25, 1.0, 4.0, seeds=(0,))
    for row, error in zip(run, (0.003, 0.001, 0.002), strict=True):
        row["correct_in_se"] = error
    run[-1]["correct_in"] += 0.1  # so that the curve bends
    draw, rise = random.Random(0), runs.Rise(run, 0.1)
    again = lambda: [{**row, "correct_in": draw.gauss(row["correct_in"], row["correct_in_se"])} for row in run]
    before = rise.kl_of(0.35)
    spread = sum((runs.Rise(again(), 0.1).kl_of(0.35) - before) ** 2 for _ in range(DRAWN)) / DRAWN
    DRAWN_AGAIN.check(spread**0.5, rise.error_of_kl(before))


@pytest.mark.parametrize("kls", [(1, 4, 2), (4, 1, 0.5), (1, 2, 2)])
def test_a_run_whose_kl_does_not_rise_has_no_value_at_equal_kl(kls):
    """Its right answers are no function of its KL."""
    rising, other = evaluations(0.3, 1, 2, 4), evaluations(0.2, 1, 2, 4, seeds=(1, 2))
    mixed = [*evaluations(0.3, *kls, seeds=(0, 1)), *evaluations(0.3, 1, 2, 4, seeds=(2,))]
    for one, another in ((mixed, other), (other, mixed)):
        assert runs.gap_at_equal_kl(one[::-1], another, start=0.1)["seeds"] == 1  # whatever the order of the rows
    assert runs.gap_at_equal_kl(evaluations(0.3, *kls), rising, start=0.1)["seeds"] == 0


# Studies of the recorded runs, as they are and changed.


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_nothing_is_decided_with_two_seeds(name, tmp_path):
    """Of the runs that judge a sentence; seeds that choose settings are kept."""
    kept = {"discount": "012", "reuse_seeds": "012", "reuse_trl": "012", "fig8_seeds": "0134"}
    for path in runs.COMMITTED.glob("*.csv"):
        seeds = kept.get(path.stem, "01")
        copied(tmp_path, lambda row, seeds=seeds: row if row.get("seed", "0") in seeds else None, path.stem)
    checks = STUDIES[name].computation.check(STUDIES[name].computation.run(Settings(measured=str(tmp_path))))
    assert [check.claim for check in checks if check.chance is not None and check.decided] == []


@pytest.mark.parametrize(("left_out", "pairs"), [((), 9), (("long",), 6), (("std", "long"), 3)])
def test_k1_in_the_reward_and_k3_as_loss_are_compared_over_all_experiments(tmp_path, left_out, pairs):
    """Runs with divided advantages, with another seed in one arm, or at another coefficient have no part in it."""
    copied(tmp_path, lambda row: row, *{"comedy", "std", "long"} - {*left_out})
    settings = copied(tmp_path, lambda row: {**row, "division": "divided"}, *left_out)
    found = on_policy.run(settings)["pooled"]["0.03"]["correct_in"]
    assert found["pairs"] == pairs
    assert found["mean"] > 2 * found["error"]


def test_little_progress_of_k3_is_a_share_of_that_of_k2(tmp_path):
    """The committed students, and such that k3 as a loss comes a quarter of the way that k2 as a loss does."""
    column, file = fig8_language_model.KL, "fig8_seeds"
    committed = runs.rows_in(runs.COMMITTED / f"{file}.csv")
    at = {(row["lengths"], row["arm"], row["seed"], row["update"]): row[column] for row in committed}

    def near_its_start(row):
        if (row["arm"], row["update"]) != ("k3-loss", "40"):
            return row
        start, end = (at[row["lengths"], "k2-loss", row["seed"], update] for update in (0, 40))
        return {**row, column: start - (start - end) / 4}

    changed = copied(tmp_path, near_its_start, file)
    for settings, share, verdict in ((Settings(), 0.88, "contradicted"), (changed, 0.25, "holds")):
        numbers = fig8_language_model.run(settings)
        assert numbers["progress"]["fixed-length"]["mean"] == pytest.approx(share, abs=ROUNDED)
        little = [check for check in fig8_language_model.check(numbers) if "little progress" in check.claim]
        assert [check.verdict for check in little] == [verdict] * 2


def test_figure_8_is_judged_by_seeds_that_chose_no_rate(tmp_path):
    """Seeds 0 to 2 of arms that have others change nothing; k3 as a loss has no others."""

    def far(row):
        chose = row["arm"] not in ("k3-loss", "k2-loss") and row["seed"] in "012"
        return {**row, fig8_language_model.KL: "999"} if chose else row

    found, changed = (fig8_language_model.run(s) for s in (Settings(), copied(tmp_path, far, "fig8_seeds")))
    assert changed["differences"] == found["differences"]
    gaps = found["differences"]["may-end"]
    assert {gap["seeds"] for claim, gap in gaps.items() if "k3" not in claim} == {6}
    assert {gap["seeds"] for claim, gap in gaps.items() if "k3" in claim} == {3}


def test_a_collapse_is_judged_by_the_long_runs(tmp_path):
    """The committed ones end far above their start; if they ended at 0, the paper's sentences would hold."""
    fallen = lambda row: {**row, "correct_in": "0" if row["update"] == "300" else row["correct_in"]}
    changed = copied(tmp_path, fallen, "comedy", "std", "long")
    for settings, verdict in ((Settings(), "contradicted"), (changed, "holds")):
        found = judged(on_policy, settings)
        assert [found[claim] for claim in found if "after 300 updates" in claim] == [verdict] * 3


def test_the_opposite_numbers_give_the_opposite_verdict(tmp_path):
    other = {"divided": "undivided", "undivided": "divided"}
    settings = copied(tmp_path, lambda row: {**row, "division": other[row["division"]]}, "std")
    assert "holds" not in judged(frpo, settings).values()


def test_the_effective_coefficient_without_division_is_known():
    """β in the reward, and n/(n - 1) β outside it: tests/facts sums the factor over all outcomes."""
    end = frpo.run(Settings())["end"]
    assert end["k1-reward undivided 0.1"]["effective"]["mean"] == near(0.1)
    assert end["k2-loss undivided 0.1"]["effective"]["mean"] == near(0.1 * 8 / 7)


def test_the_curve_finds_an_arm_that_is_off(tmp_path):
    higher = lambda row: 0.1 * (row["arm"] == "k3-loss" and row["division"] == "divided")
    raised = lambda row: {**row, "correct_in": float(row["correct_in"]) + higher(row)}
    before, after = (frpo.run(s)["curve"]["off"] for s in (Settings(), copied(tmp_path, raised, "std")))
    moved = {name: after[name]["mean"] - before[name]["mean"] for name in before}
    assert moved.pop("k3-loss divided") == near(0.1)  # the others' curve does not contain it
    assert max(moved.values()) < 0.01


@pytest.mark.parametrize(("arm", "change", "fails"), [("k1-loss", 0.3, "k1 as loss"), ("none", 0.2, "no KL")])
def test_other_right_answers_at_equal_kl_give_another_verdict(arm, change, fails, tmp_path):
    def moved(row):
        off = change * (row["arm"] == arm and row["update"] != "0")
        return {**row, "correct_in": float(row["correct_in"]) + off}

    changed = copied(tmp_path, moved, "comedy", "std", "frontier")
    before, after = (FIG7.check(FIG7.run(s))[:4] for s in (Settings(), changed))
    assert all(check.holds for check in before)
    assert [check.holds for check in after] == [fails not in check.claim for check in after]


@pytest.mark.parametrize("arm", ["none", "k1-reward"])
def test_the_evaluations_of_both_arms_are_in_the_error_of_their_gap_at_equal_kl(arm, tmp_path):
    """Of evaluations that are eight times as noisy the errors exceed the spread between seeds."""
    noisier = lambda row: {**row, "correct_in_se": (8 if row["arm"] == arm else 1) * float(row["correct_in_se"])}
    changed = copied(tmp_path, noisier, "comedy", "std", "frontier")
    claim = "k1 in the reward at β = 0.03 answers more right than no KL"
    before, after = (FIG7.run(s)["gaps"][claim] for s in (Settings(), changed))
    assert after["mean"] == near(before["mean"])  # fits differ in their last digits
    assert after["error"] > 2 * before["error"]


# The command.


def test_the_command_says_that_the_numbers_are_recorded(tmp_path):
    done = CliRunner().invoke(app, ["reproduce", "frpo/kl-in-reward", "--jobs", "1", "--out", str(tmp_path)])
    assert "committed numbers of runs of language models (20" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("tang-munos/fig8", ["exp_fig8.py sweep", "exp_fig8.py seeds", "exp_fig8.py fresh"]),
        ("frpo/kl-in-reward", ["exp_std.py"]),
        ("tang-munos/fig7", ["exp_comedy.py", "exp_std.py", "exp_frontier.py"]),
        ("klgrad/discount", ["exp_discount.py sweep", "exp_discount.py seeds", "exp_gradient.py"]),
    ],
)
def test_run_calls_the_scripts_of_all_files_in_order(name, calls, tmp_path):
    found = list(command.commands([STUDIES[name]], Path("benchmarks"), "MODEL", tmp_path))
    assert [" ".join([Path(each[1]).name, *each[2:-5]]) for each in found] == calls
    assert all((each[0], *each[-5:-2]) == (sys.executable, "MODEL", "--out", str(tmp_path)) for each in found)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_script_of_an_experiment_exists(name):
    experiment = STUDIES[name].experiment
    script = Path(__file__).parents[2] / "benchmarks" / experiment.script
    assert experiment.file.removesuffix(".csv").split("_")[0] in script.read_text(encoding="utf-8")
    assert (runs.COMMITTED / experiment.file).is_file()


NAMES = f"choose from {', '.join(EXPERIMENTS)}"


@pytest.mark.parametrize(
    ("names", "gpu", "status", "message"),
    [
        ("", True, 0, NAMES),
        ("schulman/table", True, 0, NAMES),
        ("tang-munos/fig8 schulman/table", True, 0, NAMES),
        ("tang-munos/fig8", False, 0, "expected a CUDA GPU"),
        ("tang-munos/fig8", True, 1, r"a failure of .*exp_fig8\.py"),
        ("tang-munos/fig8", True, 0, None),
    ],
)
def test_run_needs_names_of_experiments_a_gpu_and_scripts_that_succeed(
    names, gpu, status, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("klgrad.models.resolve", lambda _: "MODEL")
    monkeypatch.setattr(command.subprocess, "run", lambda call, **_: subprocess.CompletedProcess(call, status))
    with pytest.raises(ExperimentError, match=message) if message else nullcontext():
        assert command.measure([STUDIES[name] for name in names.split()], tmp_path) == str(tmp_path / "runs")

"""What the study of reused completions concludes from made-up runs, and from too few of them."""

import math

import pytest
from papers.made_up_runs import ERROR, MADE, START, judged, write

from klgrad.papers import Settings, reproduce
from klgrad.papers.own import reuse as study
from klgrad.papers.study import Study

BEST = ("0.0006", "cosine")
ENDS = {("klgrad", 1): 0.8, ("klgrad", 2): 0.7, ("klgrad", 4): 0.6, ("klgrad", 8): 0.5}
ENDS |= {("trl-reverse", 1): 0.82, ("trl-jsd", 1): 0.9, ("trl-forward", 1): 0.85}
"""KL(student‖teacher) after the last update; KL(teacher‖student) is twice that, right answers fall with it."""
EVERY_SENTENCE = 24


def run(trainer, uses, seed, end, setting=BEST, speed=1.0):
    """The evaluations of one run: after half of the batches the KL is a tenth higher than at the end."""
    rate, schedule = setting
    label = {"trainer": trainer} if trainer != "klgrad" else {}
    label |= {"uses": uses, "learning_rate": rate, "schedule": schedule, "seed": seed, "every": 10 * uses}
    seconds = speed * (2.0 if trainer != "klgrad" else 1 + 0.2 * (uses - 1))
    for batches in (0, 20, 40):
        kl = end * (1 + ERROR * (seed - 1)) * (1.1 if batches == 20 else 1)
        found = {"kl_per_token": kl, "forward_kl_per_token": 2 * kl, "correct": 0.6 - 0.4 * kl}
        more = {"kl_per_token_se": ERROR / 2, "entropy_per_token": 3.0, "length": 32.0, "seconds": batches * seconds}
        more |= {"kl_per_sequence": 32 * kl, "kl_per_sequence_se": 16 * ERROR}
        yield {**label, "update": batches * uses, **(found if batches else START), **more, **MADE}


def files(ends=None, seeds=(0, 1, 2), **how):
    """Rows by file: every arm with a second setting that is worse, whose other seeds are not run."""
    found = {"reuse_sweep": [], "reuse_seeds": [], "reuse_trl": []}
    for (trainer, uses), end in (ENDS | (ends or {})).items():
        for seed in seeds:
            name = "reuse_trl" if trainer != "klgrad" else "reuse_seeds" if seed else "reuse_sweep"
            found[name] += run(trainer, uses, seed, end, **how)
        name = "reuse_trl" if trainer != "klgrad" else "reuse_sweep"
        found[name] += run(trainer, uses, 0, 1.3 * end, ("0.001", "constant"))
    return {name: rows for name, rows in found.items() if rows}


def verdicts(folder, made):
    return judged(study, write(folder, **made))


def test_runs_as_the_claim_has_them(tmp_path):
    found = verdicts(tmp_path, files())
    assert set(found.values()) == {"holds"}, {claim: verdict for claim, verdict in found.items() if verdict != "holds"}
    assert len(found) == EVERY_SENTENCE


def test_an_arm_has_the_setting_that_was_best_with_the_first_seed(tmp_path):
    numbers = study.run(write(tmp_path, **files()))
    assert set(numbers["settings"].values()) == {" ".join(BEST)}
    assert {found["kl_per_token"]["seeds"] for found in numbers["end"].values()} == {3}
    assert numbers["sweep"]["klgrad 4"]["0.001 constant"] == pytest.approx(1.3 * 0.6 * (1 - ERROR), rel=1e-9)


def test_the_end_is_counted_in_batches_and_not_in_updates(tmp_path):
    path = study.run(write(tmp_path, **files()))["paths"]["klgrad 8"]
    assert (path["batches"], path["updates"]) == ([0, 20, 40], [0, 160, 320])
    assert path["kl_per_token"][-1]["mean"] == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize(
    ("arm", "end", "fails"),
    [
        (("klgrad", 8), 0.95, ("8 uses",)),
        (("klgrad", 4), 0.72, ("4 uses end nearer than 2", "completions are nearer than 1", "4 uses answer")),
        (("klgrad", 1), 1.0, ("1 use ends as near",)),
        (("trl-jsd", 1), 0.55, ("2 uses end nearer than TRL", "4 uses end nearer than TRL", "TRL's trainer with all",
                                "4 uses answer more right than TRL")),
    ],
)  # fmt: skip
def test_another_end_of_one_arm_changes_its_sentences_and_no_others(arm, end, fails, tmp_path):
    found = verdicts(tmp_path, files({arm: end}))
    expected = {claim for claim in found if any(part in claim for part in fails)}
    assert expected
    assert {claim for claim, verdict in found.items() if verdict == "differs"} == expected


def test_reuse_that_takes_longer_loses_by_seconds(tmp_path):
    made = files()
    for row in (*made["reuse_sweep"], *made["reuse_seeds"]):
        row["seconds"] *= 2 if row["uses"] == 4 else 1
    found = verdicts(tmp_path, made)
    by_seconds = [verdict for claim, verdict in found.items() if "seconds" in claim]
    assert by_seconds == ["differs", "differs"]


def test_runs_without_seconds_leave_only_their_sentences_open(tmp_path):
    made = files()
    for row in made["reuse_seeds"]:
        del row["seconds"]
    found = verdicts(tmp_path, made)
    assert {claim for claim, verdict in found.items() if verdict != "holds"} == {c for c in found if "seconds" in c}


def test_without_runs_of_trl_only_sentences_about_it_are_open(tmp_path):
    made = files()
    del made["reuse_trl"]
    found = verdicts(tmp_path, made)
    assert {claim for claim, verdict in found.items() if verdict != "holds"} == {c for c in found if "TRL" in c}


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_nothing_is_decided_with_fewer_than_three_seeds(seeds, tmp_path):
    assert set(verdicts(tmp_path, files(seeds=seeds)).values()) == {"open"}


def test_an_arm_without_a_first_seed_has_no_setting(tmp_path):
    made = files()
    made["reuse_sweep"] = [row for row in made["reuse_sweep"] if row["uses"] != 8]
    found = verdicts(tmp_path, made)
    assert {claim for claim, verdict in found.items() if verdict == "open"} == {c for c in found if "8 uses" in c}


def test_a_diverged_student_is_not_the_best_and_counts_as_a_missing_seed(tmp_path):
    made = files()
    for row in made["reuse_sweep"]:
        if row["uses"] == 8 and row["learning_rate"] == BEST[0] and row["update"] == 320:
            row["kl_per_token"] = math.nan
    numbers = study.run(write(tmp_path, **made))
    assert numbers["settings"]["klgrad 8"] == "0.001 constant"
    assert numbers["end"]["klgrad 8"]["kl_per_token"]["seeds"] == 1


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize("left_out", [(), ("reuse_trl", "reuse_seeds")])
def test_the_figure_is_drawn_with_all_runs_and_with_few(left_out, tmp_path):
    made = {name: rows for name, rows in files().items() if name not in left_out}
    if left_out:
        made["reuse_sweep"] = [{**row, "seconds": ""} for row in made["reuse_sweep"]]
    settings: Settings = write(tmp_path, **made)
    reproduce(Study("reuse", study), settings, tmp_path)
    assert (tmp_path / "reuse.png").read_bytes().startswith(b"\x89PNG")

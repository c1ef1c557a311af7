"""What the study of reused completions concludes from made-up runs, and from too few of them."""

import math

import pytest
from papers.made_up_runs import ERROR, MADE, START, judged, write

from klgrad.papers.own import reuse as study

BEST = ("0.0006", "cosine")
ENDS = {("klgrad", 1, 256): 0.8, ("klgrad", 2, 256): 0.7, ("klgrad", 4, 256): 0.6, ("klgrad", 8, 256): 0.5}
ENDS |= {("klgrad", 1, 64): 0.72, ("klgrad", 2, 64): 0.65, ("klgrad", 1, 32): 0.66}
ENDS |= {("trl-reverse", 1, 256): 0.82, ("trl-jsd", 1, 256): 0.9, ("trl-forward", 1, 256): 0.85}
ENDS |= {("trl-reverse", 1, 64): 0.81}
"""KL(student‖teacher) after the last update, by trainer, uses and completions of a batch; KL(teacher‖student) is twice
that, right answers fall with it."""
EVERY_SENTENCE = 35


def run(arm, seed, end, setting=BEST):
    """The evaluations of one run: after half of the completions the KL is a tenth higher than at the end.

    Rows of the larger batch do not have its size, as some that are recorded.
    """
    (trainer, uses, size), (rate, schedule) = arm, setting
    label = {"trainer": trainer} if trainer != "klgrad" else {}
    label |= {"uses": uses, "learning_rate": rate, "schedule": schedule, "seed": seed}
    label |= {"completions": size} if size != 256 else {}
    seconds = 2.0 if trainer != "klgrad" else 1 + 0.2 * (uses - 1)
    for share in (0, 0.5, 1):
        kl = end * (1 + ERROR * (seed - 2)) * (1.1 if share == 0.5 else 1)
        found = {"kl_per_token": kl, "forward_kl_per_token": 2 * kl, "correct": 0.6 - 0.4 * kl}
        more = {"kl_per_token_se": ERROR / 2, "entropy_per_token": 3.0, "length": 32.0, "seconds": 40 * share * seconds}
        more |= {"kl_per_sequence": 32 * kl, "kl_per_sequence_se": 16 * ERROR}
        yield {**label, "update": int(share * uses * 10240 / size), **(found if share else START), **more, **MADE}


def files(ends=None, seeds=(0, 1, 2, 3)):
    """Rows by file: every arm with a second setting that is worse, whose other seeds are not run."""
    found = {"reuse_sweep": [], "reuse_seeds": [], "reuse_trl": []}
    for arm, end in (ENDS | (ends or {})).items():
        first, others = ("reuse_sweep", "reuse_seeds") if arm[0] == "klgrad" else ("reuse_trl", "reuse_trl")
        for seed in seeds:
            found[others if seed else first] += run(arm, seed, end)
        found[first] += run(arm, 0, 1.3 * end, ("0.001", "constant"))
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
    assert set(numbers["settings"]) == set(numbers["end"])
    assert numbers["sweep"]["klgrad 4 256"]["0.001 constant"] == pytest.approx(1.3 * 0.6 * (1 - 2 * ERROR), rel=1e-9)


def test_an_arm_is_not_judged_by_the_seed_that_chose_its_setting(tmp_path):
    """A first seed that ends far below the others leaves the means as they are."""
    made = files()
    for row in (*made["reuse_sweep"], *made["reuse_trl"]):
        row["kl_per_token"] *= 0.1 if (row["seed"], row["learning_rate"]) == (0, BEST[0]) else 1
    numbers = study.run(write(tmp_path, **made))
    for (trainer, uses, size), end in ENDS.items():
        found = numbers["end"][f"{trainer} {uses} {size}"]["kl_per_token"]
        assert (found["mean"], found["seeds"]) == (pytest.approx(end, rel=1e-9), 3)


@pytest.mark.parametrize(
    ("arm", "updates"),
    [("klgrad 8 256", 320), ("klgrad 1 64", 160), ("klgrad 2 64", 320), ("trl-reverse 1 64", 160)],
)
def test_runs_are_compared_by_completions_and_not_by_batches_or_updates(arm, updates, tmp_path):
    numbers = study.run(write(tmp_path, **files()))
    path, (trainer, uses, size) = numbers["paths"][arm], arm.split()
    assert (path["completions"], path["updates"]) == ([0, 5120, 10240], [0, updates // 2, updates])
    end = ENDS[trainer, int(uses), int(size)]
    assert numbers["half"][arm]["kl_per_token"]["mean"] == pytest.approx(1.1 * end, rel=1e-9)
    assert numbers["end"][arm]["kl_per_token"]["mean"] == pytest.approx(end, rel=1e-9)


def test_a_run_that_has_not_used_all_completions_has_not_ended(tmp_path):
    """After 40 updates with batches of 64 a run has a quarter of the completions."""
    made = files()
    early = [{**row, "update": 40, "kl_per_token": 0.1} for row in made["reuse_sweep"] if row["update"] == 160]
    made["reuse_sweep"] += [{**row, "learning_rate": "0.0003"} for row in early if row.get("completions") == 64]
    assert set(study.run(write(tmp_path, **made))["settings"].values()) == {" ".join(BEST)}


@pytest.mark.parametrize(
    ("arm", "end", "fails"),
    [
        (("klgrad", 8, 256), 0.95, ("8 uses",)),
        (("klgrad", 4, 256), 0.72, ("4 uses end nearer than 2", "4 uses of half of the completions are nearer than 1",
                                    "4 uses answer", "4 uses of batches of 256")),
        (("klgrad", 1, 256), 1.0, ("1 use ends as near",)),
        (("klgrad", 1, 64), 0.9, ("1 use of batches of 64",)),
        (("klgrad", 1, 64), 0.55, ("4 uses of batches of 256", "nearer than 1 of batches of 64")),
        (("klgrad", 2, 64), 0.45, ("8 uses of batches of 256 end nearer than 2",)),
        (("klgrad", 1, 32), 0.45, ("8 uses of batches of 256 end nearer than 1 of batches of 32",)),
        (("trl-jsd", 1, 256), 0.55, ("2 uses end nearer than TRL", "4 uses end nearer than TRL",
                                     "TRL's trainer with all", "4 uses answer more right than TRL")),
        (("trl-reverse", 1, 64), 0.55, ("2 uses end nearer than TRL", "4 uses end nearer than TRL",
                                        "TRL's trainer with all", "4 uses answer more right than TRL")),
    ],
)  # fmt: skip
def test_another_end_of_one_arm_changes_its_sentences_and_no_others(arm, end, fails, tmp_path):
    found = verdicts(tmp_path, files({arm: end}))
    expected = {claim for claim in found if any(part in claim for part in fails)}
    assert expected
    assert {claim for claim, verdict in found.items() if verdict != "holds"} == expected


def test_reuse_that_takes_longer_loses_by_seconds(tmp_path):
    made = files()
    for row in (*made["reuse_sweep"], *made["reuse_seeds"]):
        row["seconds"] *= 2 if row["uses"] == 4 else 1
    found = verdicts(tmp_path, made)
    assert [verdict for claim, verdict in found.items() if "seconds" in claim] == ["contradicted"]


def test_runs_without_seconds_leave_only_their_sentences_open(tmp_path):
    made = files()
    for row in made["reuse_seeds"]:
        del row["seconds"]
    found = verdicts(tmp_path, made)
    assert {claim for claim, verdict in found.items() if verdict != "holds"} == {c for c in found if "seconds" in c}


def diverged(rows, **label):
    """The rows; a run of the best setting with this label has diverged at its end."""
    for row in rows:
        if all(row[name] == value for name, value in {"learning_rate": BEST[0], "update": 320, **label}.items()):
            row["kl_per_token"] = math.nan
    return rows


def test_a_setting_whose_student_diverged_is_not_the_best(tmp_path):
    made = files()
    diverged(made["reuse_sweep"], uses=8)
    numbers = study.run(write(tmp_path, **made))
    assert numbers["settings"]["klgrad 8 256"] == "0.001 constant"
    assert "klgrad 8 256" not in numbers["end"], "only the first seed has that setting"

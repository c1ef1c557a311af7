"""What the study of reused completions concludes from made-up runs, and from too few of them."""

import math

import pytest
from papers.made_up_runs import ERROR, MADE, START, judged, near, write

from klgrad.papers.own import reuse as study

BEST = ("0.0006", "cosine")
ENDS = {("klgrad", 1, 256): 0.8, ("klgrad", 2, 256): 0.7, ("klgrad", 4, 256): 0.6, ("klgrad", 8, 256): 0.5}
ENDS |= {("klgrad", 1, 64): 0.72, ("klgrad", 2, 64): 0.65, ("klgrad", 1, 32): 0.66}
ENDS |= {("trl-reverse", 1, 256): 0.82, ("trl-jsd", 1, 256): 0.9, ("trl-forward", 1, 256): 0.85}
ENDS |= {("trl-reverse", 1, 64): 0.81}
"""KL(student‖teacher) after the last update, by trainer, uses and completions of a batch; KL(teacher‖student) is twice
that, right answers fall with it."""


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


def numbers(folder, made):
    return study.run(write(folder, **made))


def test_runs_as_the_claim_has_them(tmp_path):
    found = verdicts(tmp_path, files())
    assert found == dict.fromkeys(found, "holds")
    assert len(found) == 35


def test_an_arm_has_the_setting_that_was_best_with_the_first_seed(tmp_path):
    found = numbers(tmp_path, files())
    assert found["settings"] == dict.fromkeys(found["end"], " ".join(BEST))
    assert found["sweep"]["klgrad 4 256"]["0.001 constant"] == near(1.3 * 0.6 * (1 - 2 * ERROR))


def test_an_arm_is_not_judged_by_the_seed_that_chose_its_setting(tmp_path):
    """A first seed that ends far below the others leaves the means as they are."""
    made = files()
    for row in (*made["reuse_sweep"], *made["reuse_trl"]):
        row["kl_per_token"] *= 0.1 if (row["seed"], row["learning_rate"]) == (0, BEST[0]) else 1
    ends = numbers(tmp_path, made)["end"]
    for (trainer, uses, size), end in ENDS.items():
        found = ends[f"{trainer} {uses} {size}"]["kl_per_token"]
        assert (found["mean"], found["seeds"]) == (near(end), 3)


@pytest.mark.parametrize(
    ("arm", "updates"),
    [("klgrad 8 256", 320), ("klgrad 1 64", 160), ("klgrad 2 64", 320), ("trl-reverse 1 64", 160)],
)
def test_runs_are_compared_by_completions_and_not_by_batches_or_updates(arm, updates, tmp_path):
    found, (trainer, uses, size) = numbers(tmp_path, files()), arm.split()
    path, end = found["paths"][arm], ENDS[trainer, int(uses), int(size)]
    assert (path["completions"], path["updates"]) == ([0, 5120, 10240], [0, updates // 2, updates])
    assert [found[part][arm]["kl_per_token"]["mean"] for part in ("half", "end")] == [near(1.1 * end), near(end)]


def test_a_run_that_has_not_used_all_completions_has_not_ended(tmp_path):
    """After 40 updates with batches of 64 a run has a quarter of the completions."""
    made = files()
    early = [{**row, "update": 40, "kl_per_token": 0.1} for row in made["reuse_sweep"] if row["update"] == 160]
    made["reuse_sweep"] += [{**row, "learning_rate": "0.0003"} for row in early if row.get("completions") == 64]
    assert set(numbers(tmp_path, made)["settings"].values()) == {" ".join(BEST)}


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


@pytest.mark.parametrize(("times", "verdict"), [(2, "contradicted"), (None, "undecided")], ids=["slower", "unknown"])
def test_reuse_that_takes_longer_loses_by_seconds_and_without_them_it_is_open(times, verdict, tmp_path):
    made = files()
    for row in made["reuse_seeds"]:
        seconds = row.pop("seconds")
        row |= {"seconds": seconds * (times if row["uses"] == 4 else 1)} if times else {}
    found = verdicts(tmp_path, made)
    assert found == {claim: verdict if "seconds" in claim else "holds" for claim in found}


def test_a_setting_whose_student_diverged_is_not_the_best(tmp_path):
    made = files()
    for row in made["reuse_sweep"]:
        if (row["uses"], row["learning_rate"], row["update"]) == (8, BEST[0], 320):
            row["kl_per_token"] = math.nan
    found = numbers(tmp_path, made)
    assert found["settings"]["klgrad 8 256"] == "0.001 constant"
    assert "klgrad 8 256" not in found["end"], "only the first seed has that setting"

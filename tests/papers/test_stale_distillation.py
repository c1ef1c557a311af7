"""What the study of stale distillation concludes from made-up runs, and from too few of them."""

import math

import pytest
from papers.made_up_runs import evaluations, judged, near, write

from klgrad.papers.asyncopd import stale_distillation as study

FRESH = {
    "reverse-exact": (0.8, 2.7),
    "reverse-top-64": (0.8, 2.7),
    "reverse-sampled": (1.1, 4.0),
    "forward-exact": (1.2, 1.5),
    "forward-top-64": (1.2, 1.5),
    "forward-sampled": (1.6, 3.0),
}
AS_CLAIMED = {"reverse-exact": 1.05, "reverse-top-64": 1.5, "reverse-sampled": 1.6, "forward-sampled": 1.3}
"""By which factor a lag of 16 raises the KLs; 1.01 for the others."""


def rows(factors=None, scale=None, fewer=1.01, **how):
    """Runs of every age: those that are old are higher by a factor, and those with fewer fresh batches by `fewer`."""
    found = []
    for arm, kls in FRESH.items():
        late = (AS_CLAIMED if factors is None else factors).get(arm, 1.01)
        ages = {"fresh": 1, "fresh-24": fewer, "filled-16": late, "lag-16": late * fewer, "reuse-16": late}
        for stale, factor in ages.items():
            own, teachers = (kl * factor * (scale or {}).get(arm, 1) for kl in kls)
            found += evaluations({"arm": arm, "stale": stale}, own, teachers, **how)
    return found


def verdicts(folder, made):
    return judged(study, write(folder, stale_distill=made))


def costs(folder, made, column="kl_per_token"):
    """The mean cost by arm and comparison."""
    return {name: x["mean"] for name, x in study.run(write(folder, stale_distill=made))["costs"][column].items()}


EXACT = ("makes the exact reverse KL worse", "makes the exact forward KL worse", "exact reverse KL more than the exact")
"""Parts of sentences that do not hold if the exact KLs hardly lose by their age."""


def test_runs_as_the_paper_claims_them(tmp_path):
    found = verdicts(tmp_path, rows())
    assert {verdict for claim, verdict in found.items() if not any(part in claim for part in EXACT)} == {"holds"}
    assert len(found) == 44


def test_the_opposite_runs_give_the_opposite_verdict(tmp_path):
    opposite = {"reverse-sampled": 0.9, "reverse-top-64": 0.9, "reverse-exact": 1.2, "forward-exact": 1.3}
    found = verdicts(tmp_path, rows(opposite))
    theirs = (*study.WORSE, *study.COSTS_MORE)
    assert {verdict for claim, verdict in found.items() if claim.startswith(theirs)} == {"contradicted"}
    little = {claim: verdict for claim, verdict in found.items() if "less than a tenth" in claim}
    assert little == {claim: "holds" if "24 batches" in claim else "contradicted" for claim in little}
    assert len(little) == 12


def test_a_cost_is_a_share_of_the_kl_with_fresh_completions(tmp_path):
    """Else an arm that ends at a larger KL would seem to lose more by the same staleness."""
    for scale in (None, {"reverse-sampled": 3.0}):
        cost = costs(tmp_path, rows(dict.fromkeys(FRESH, 1.2), scale))
        assert cost["reverse-sampled filled-16"] == near(0.2)


def test_age_and_number_of_batches_are_told_apart(tmp_path):
    """Old completions cost a fifth, and fewer batches as much again: a plain lag has both."""
    cost = costs(tmp_path, rows({"reverse-exact": 1.2}, fewer=1.2))
    found = [cost[f"reverse-exact {name}"] for name in (study.OLD, study.SAME_BATCHES, study.FEWER, study.LATE)]
    assert found == near([0.2, 0.2, 0.2, 0.44])


@pytest.mark.parametrize(("factor", "verdict"), [(1.3, "holds"), (4.0, "contradicted")])
def test_settings_with_fewer_seeds_have_no_part_in_whether_all_end_nearer(tmp_path, factor, verdict):
    """One that ends farther has two seeds and does not count; their number is in the measured text."""
    made = rows({**AS_CLAIMED, "forward-sampled": 4.0, "reverse-sampled": factor})
    made = [row for row in made if (row["arm"], row["seed"]) != ("forward-sampled", 2)]
    settings = write(tmp_path, stale_distill=made)
    nearer = {claim: found for claim, found in judged(study, settings).items() if claim.startswith(study.NEARER)}
    assert list(nearer.values()) == [verdict, verdict]
    texts = [check.measured for check in study.check(study.run(settings)) if check.claim in nearer]
    assert all(text.endswith("3 seeds; without 3 of 18 settings, with fewer seeds") for text in texts)


def test_a_diverged_student_counts_as_a_missing_seed(tmp_path):
    made = rows()
    lost = next(r for r in made if (r["arm"], r["stale"], r["update"]) == ("reverse-sampled", "filled-16", 40))
    lost["kl_per_token"] = math.nan
    found = verdicts(tmp_path, made)
    assert found[f"{next(iter(study.WORSE))}, on the student's completions"] == "undecided"


def test_a_cost_in_right_answers_is_what_staleness_loses(tmp_path):
    made = rows()
    for row in made:
        row["correct"] = 0.06 if (row["stale"], row["update"]) == ("filled-16", 40) else row["correct"]
    assert costs(tmp_path, made, "correct")["reverse-exact filled-16"] == near(0.04)


def test_right_answers_have_the_error_of_their_questions(tmp_path):
    """The three seeds agree, but 182 questions have an error of their own."""
    end = study.run(write(tmp_path, stale_distill=rows()))["end"]["forward-exact fresh"]
    assert end["correct"]["error"] == near((0.1 * 0.9 / 182 / 3) ** 0.5)

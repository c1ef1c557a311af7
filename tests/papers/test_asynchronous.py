"""The study of stale completions, on made-up runs: what it concludes, and from which rows."""

from itertools import product

import pytest
from papers.made_up_runs import near, run, write_file

from klgrad.papers import Settings
from klgrad.papers.comedy import asynchronous

AS_CLAIMED = {"none": -0.05, "k3-reward": -0.06, "k1-loss": -0.04, "k1-reward": 0.2, "k3-loss": 0.1}
AS_CLAIMED |= {asynchronous.CONTROL: 0.2} | dict.fromkeys(asynchronous.CORRECTED, 0.3)
"""Gains in right answers at a lag of 10 that make every sentence hold; with fresh completions every gain is 0.4."""
SEEDS = (0, 1, 2)
EVERY = [(lag, coef) for coef, lag in product((0.05, 0.1, 0.2), (4, 6, 8))]
"""Lags and coefficients at which k1 as a loss falls."""
LONG_UPDATES = (0, 60, 120, 180)


def label(arm, lag, seed, coef=0.1):
    return {"arm": arm, "lag": lag, "kl_coef": 0.0 if arm == "none" else coef, "learning_rate": 1e-05, "seed": seed}


def fresh(arm, seed, gain=0.4, coef=0.1):
    own = {name: value for name, value in label(arm, 0, seed, coef).items() if name != "lag"}
    return run(own, gain, kl=4.0)


def numbers(folder, gains=None, left_out=(), kl=2.0, changed=lambda rows: rows, fallen=EVERY, long_k1_loss=None):
    """The study's numbers: two lags with the same gains, without the settings that are left out."""
    gains = AS_CLAIMED | (gains or {})
    stale = [
        row
        for lag, arm, seed in product((10, 2), gains, SEEDS)
        if f"{arm} {lag}" not in left_out
        for row in run(label(arm, lag, seed), gains[arm], kl=kl)
    ]
    for (lag, coef), seed in product(EVERY, SEEDS[:2]):
        gain = -0.05 if (lag, coef) in fallen else 0.2
        stale += run(label("k1-loss", lag, seed, coef), gain, kl=kl)
    write_file(folder / "async.csv", changed(stale))
    long = {(arm, 10, seed, 0.1): gains[arm] for arm in ("none", "k1-reward", "k3-loss") for seed in SEEDS}
    long |= {("k1-loss", lag, seed, 0.05): gain for (lag, seed), gain in (long_k1_loss or {}).items()}
    long = [row for key, gain in long.items() for row in run(label(*key), gain, kl=kl, updates=LONG_UPDATES)]
    write_file(folder / "async_long.csv", long)
    others = [row for arm in asynchronous.UNCORRECTED for seed in SEEDS for row in fresh(arm, seed)]
    others += [row for seed in SEEDS for row in fresh("k1-reward", seed, gain=-0.09, coef=1.0)]
    write_file(folder / "comedy.csv", others)
    return asynchronous.run(Settings(measured=str(folder)))


def verdicts(found):
    return {check.claim: check for check in asynchronous.check(found)}


def test_every_sentence_holds_on_numbers_that_are_as_claimed(tmp_path):
    found = verdicts(numbers(tmp_path, {"k1-loss": -0.04}))
    assert all(check.holds for check in found.values()), [name for name, check in found.items() if not check.holds]
    claims = asynchronous.CLAIMED | asynchronous.LONG_CLAIMED | asynchronous.OUR_CLAIMS | asynchronous.STEADIER
    assert len(found) == len(claims) + 4


@pytest.mark.parametrize(
    ("arm", "gain", "fails"),
    [
        ("none", 0.4, ("without a KL", "than no KL")),
        ("k3-reward", 0.3, ("k3 in the reward ends",)),
        ("k1-loss", 0.3, ("k1 as loss ends below its start, lag 10", "product of lag")),
        ("k3-loss", -0.05, ("k3 as loss ends", "k3 as loss answers more right than no KL", "costs k3 as loss")),
        ("k1-reward", 0.05, ("k1 in the reward answers more right than k3 as loss",)),
    ],
)
def test_other_right_answers_of_one_arm_change_its_sentences_and_no_others(arm, gain, fails, tmp_path):
    found = verdicts(numbers(tmp_path, {arm: gain}))
    expected = {name for name in found if any(part in name for part in fails)}
    assert expected
    assert {name for name, check in found.items() if not check.holds} == expected


@pytest.mark.parametrize(
    ("fallen", "by_coefficient", "by_product"),
    [
        (EVERY, ["holds"] * 3, "undecided"),  # a product of 0.2 falls as 4 x 0.05, and not as 2 x 0.1
        (EVERY[1:], ["undecided", "holds", "holds"], "holds"),  # 0.2 never falls
        (EVERY[3:], ["undecided", "holds", "holds"], "undecided"),  # 0.4 falls as 4 x 0.1, and not as 8 x 0.05
        ([], ["undecided"] * 3, "undecided"),
    ],
)
def test_runs_of_k1_as_a_loss_at_lags_between_are_counted(fallen, by_coefficient, by_product, tmp_path):
    """With a lag of 2 none falls at 0.1, a product of 0.2, and with 10 all do."""

    def at_two(rows):
        return [{**r, "correct_in": 0.5} if (r["arm"], r["lag"]) == ("k1-loss", 2) and r["update"] else r for r in rows]

    found = [check.verdict for check in asynchronous.check(numbers(tmp_path, fallen=fallen, changed=at_two))][-4:]
    assert found[:3] == by_coefficient
    assert found[3] == by_product


@pytest.mark.parametrize(
    ("gains", "verdict", "measured"),
    [
        ((-0.05, -0.04, -0.03), "holds", "in 3 of 3 runs, 3 seeds"),
        ((-0.05, -0.04, 0.2), "undecided", "in 2 of 3 runs, 3 seeds; after 180 updates, which may be too few"),
    ],
)
def test_longer_runs_of_k1_as_a_loss_replace_the_shorter_ones(gains, verdict, measured, tmp_path):
    """After 60 updates none of the same setting has fallen."""
    kept = lambda rows: [row for row in rows if (row["kl_coef"], row["lag"]) not in {(0.05, 6), (0.05, 8)}]
    long = {(4, seed): gain for seed, gain in enumerate(gains)}
    claims = verdicts(numbers(tmp_path, fallen=EVERY[3:], changed=kept, long_k1_loss=long))
    found = claims["k1 as loss at β = 0.05 ends below its start in every run, lags 4 to 8"]
    assert (found.verdict, found.measured) == (verdict, measured)


def test_an_arm_with_weights_is_compared_with_the_same_term_without_at_its_lag(tmp_path):
    gains = {"k1-prefix-unbounded": 0.1, "k1-reward": 0.2, asynchronous.CONTROL: 0.25}
    found = numbers(tmp_path, gains, left_out=["k1-sequence-bounded 2"])
    for lag, arms in found["weighted"].items():
        assert arms["k1-prefix-unbounded"]["correct_in"]["mean"] == near(-0.15)
        assert arms["k1-prefix-bounded"]["equal_kl"]["mean"] == near(0.05)
        assert arms["k1-sequence-bounded"]["correct_in"]["seeds"] == (3 if lag == "10" else 0)
    assert found["cost"]["k1-unweighted 10"]["mean"] == near(0.15)


def test_the_start_is_that_of_the_runs_with_old_completions(tmp_path):
    """The same model was evaluated again for them."""
    shifted = lambda rows: [{**row, "correct_in": row["correct_in"] + 0.05} for row in rows]
    start = numbers(tmp_path, changed=shifted)["start"]["correct_in"]
    assert (start["mean"], start["seeds"]) == (near(0.15), 3)


def test_the_weights_are_compared_at_equal_kl(tmp_path):
    """As many right answers at four times the KL are fewer at an equal KL."""

    times = lambda row: 4 if row["arm"] == "k1-prefix-bounded" else 1
    farther = lambda rows: [{**row, "kl_per_sequence": times(row) * row["kl_per_sequence"]} for row in rows]
    found = numbers(tmp_path, {"k1-prefix-bounded": 0.25}, changed=farther)
    gap = found["weighted"]["10"]["k1-prefix-bounded"]["equal_kl"]
    assert gap["mean"] == near(0.125 - 0.2)  # half of the gain, at a quarter of the KL
    assert gap["kl"] == near(2.0)


def test_the_cost_of_a_lag_is_against_fresh_completions_at_the_same_coefficient(tmp_path):
    cost = numbers(tmp_path)["cost"]
    assert cost["k1-reward 10"]["mean"] == near(0.2)
    assert cost["k1-prefix-bounded 10"]["mean"] == near(0.1)
    assert cost["none 2"]["mean"] == near(0.45)


def test_runs_that_collapse_or_stop_are_counted_and_the_stopped_are_in_no_mean(tmp_path):
    stopped = lambda rows: [row for row in rows if row["job"] != "none_10_0.0_1e-05_1" or row["update"] < 60]
    found = numbers(tmp_path, changed=stopped)
    assert found["failures"]["none 10"] == {"runs": 3, "collapsed": 2, "stopped": 1}
    assert found["failures"]["k1-reward 10"] == {"runs": 3, "collapsed": 0, "stopped": 0}
    assert found["end"]["none 10"]["correct_in"]["seeds"] == 2
    assert not verdicts(found)["k1 in the reward answers more right than no KL, lag 10"].decided

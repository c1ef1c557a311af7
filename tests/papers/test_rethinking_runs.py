"""The study of GRPO with k1, k2 or k3 as a loss, on made-up runs: what it concludes, and from which rows."""

import pytest
import torch
from papers.made_up_runs import run, write_file

from klgrad.papers import Settings
from klgrad.papers.rethinking import language_model

RATES = (1e-05, 3e-05)
AS_CLAIMED = {
    "none": {"kl": 5.0, "train_reward": 0.5, "train_reward_noise": 0.02, "entropy_per_token": 0.5},
    "k1-loss": {"kl": 5.0, "train_reward": 0.5, "train_reward_noise": 0.02, "entropy_per_token": 0.5},
    "k2-loss": {"kl": 1.0, "train_reward": 0.4, "train_reward_noise": 0.02, "entropy_per_token": 1.5},
    "k3-loss": {"kl": 2.0, "train_reward": 0.4, "train_reward_noise": 0.04, "entropy_per_token": 1.0},
}
"""Numbers that make every sentence hold."""
ROUNDING = 1e-12
"""Sums of a few float64 numbers of the order of 1."""


def numbers(folder, arms=AS_CLAIMED, seeds=(0, 1, 2), rates=RATES, changed=lambda rows: rows):
    rows = []
    for rate in rates:
        for arm, columns in arms.items():
            for seed in seeds:
                label = {"arm": arm, "kl_coef": 0.0 if arm == "none" else 0.1, "learning_rate": rate, "seed": seed}
                rows += run(label, gain=0.4, **columns)
    write_file(folder / "rethinking.csv", changed(rows))
    return language_model.run(Settings(measured=str(folder)))


def verdicts(found):
    return {check.claim: check for check in language_model.check(found)}


def test_every_sentence_holds_on_numbers_that_are_as_claimed(tmp_path):
    found = verdicts(numbers(tmp_path))
    assert all(check.holds for check in found.values()), [name for name, check in found.items() if not check.holds]
    assert len(found) == 2 * (len(language_model.HIGHER) + 2)


@pytest.mark.parametrize(
    ("arm", "columns", "fails"),
    [
        ("k1-loss", {"kl": 2.0}, "k1 as loss changes the KL"),
        ("k1-loss", {"kl": 8.0}, "k1 as loss changes the KL"),
        ("k1-loss", {"train_reward": 0.4}, "training reward of no KL"),
        ("k1-loss", {"train_reward": 0.6}, "training reward of no KL"),
        ("k3-loss", {"kl": 0.5}, "k2 as loss ends nearer to ref than k3"),
        ("k3-loss", {"kl": 6.0}, "k3 as loss ends nearer to ref than no KL"),
        ("k3-loss", {"train_reward_noise": 0.015}, "noisier"),
        ("k3-loss", {"train_reward_noise": 0.021}, "noisier"),
        ("k3-loss", {"entropy_per_token": 2.0}, "entropy"),
    ],
)
def test_another_number_of_one_arm_changes_its_sentence_and_no_other(arm, columns, fails, tmp_path):
    found = verdicts(numbers(tmp_path, AS_CLAIMED | {arm: AS_CLAIMED[arm] | columns}))
    failed = {name for name, check in found.items() if not check.holds}
    assert failed == {name for name in found if fails in name}
    assert len(failed) == len(RATES)


def test_without_an_effect_of_k2_there_is_no_margin_for_k1(tmp_path):
    found = verdicts(numbers(tmp_path, AS_CLAIMED | {"k2-loss": AS_CLAIMED["none"]}))
    judged = [check for name, check in found.items() if "k1 as loss changes the KL" in name]
    assert [(check.holds, check.decided) for check in judged] == [(False, False)] * 2
    assert "k2 as loss is not nearer" in judged[0].measured


def test_the_noise_of_a_run_is_that_of_all_its_updates(tmp_path):
    def rising(rows):
        for row in rows:
            if row["update"]:
                row["train_reward_noise"] = {20: 0.03, 40: 0.04, 60: 0.12}[row["update"]]
        return rows

    noise = numbers(tmp_path, changed=rising)["end"]["none 1e-05"]["noise"]
    assert noise["mean"] == pytest.approx((0.0169 / 3) ** 0.5, rel=ROUNDING)
    assert noise["error"] == pytest.approx(noise["mean"] * (3 / (4 * 57)) ** 0.5 / 3**0.5, rel=ROUNDING)


def test_the_error_of_the_noise_is_that_of_normal_noise(tmp_path):
    """The spread of 4000 simulated runs, which is known to about 1%."""
    rewards = torch.randn(4000, 3, language_model.EVERY, generator=torch.Generator().manual_seed(0))
    found = (rewards.diff(dim=-1).square().mean((1, 2)) / 2).sqrt()
    noise = numbers(tmp_path)["end"]["none 1e-05"]["noise"]
    assert noise["error"] * 3**0.5 / noise["mean"] == pytest.approx(float(found.std() / found.mean()), rel=0.05)


def test_the_training_reward_has_the_error_of_its_updates(tmp_path):
    reward = numbers(tmp_path)["end"]["none 1e-05"]["train_reward"]
    assert reward["error"] == pytest.approx(0.02 / 20**0.5 / 3**0.5, rel=ROUNDING)


def test_a_run_that_stopped_is_counted_and_in_no_mean(tmp_path):
    stopped = lambda rows: [row for row in rows if row["job"] != "k3-loss_0.1_3e-05_1" or row["update"] < 40]
    found = numbers(tmp_path, changed=stopped)
    assert {name for name, count in found["stopped"].items() if count} == {"k3-loss 3e-05"}
    assert found["end"]["k3-loss 3e-05"]["noise"]["seeds"] == 2

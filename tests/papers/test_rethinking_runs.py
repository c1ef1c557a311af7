"""The study of GRPO with k1, k2 or k3 as a loss, on made-up runs: what it concludes, and from which rows."""

from itertools import product

import pytest
import torch
from papers.made_up_runs import judged, near, not_held, run, write

from klgrad.papers.rethinking import language_model

RATES = (1e-05, 3e-05)
AS_CLAIMED = {
    "none": {"kl": 5.0, "train_reward": 0.5, "train_reward_noise": 0.02, "entropy_per_token": 0.5},
    "k1-loss": {"kl": 5.0, "train_reward": 0.5, "train_reward_noise": 0.02, "entropy_per_token": 0.5},
    "k2-loss": {"kl": 1.0, "train_reward": 0.4, "train_reward_noise": 0.02, "entropy_per_token": 1.5},
    "k3-loss": {"kl": 2.0, "train_reward": 0.4, "train_reward_noise": 0.04, "entropy_per_token": 1.0},
}
"""Numbers that make every sentence hold."""


def settings(folder, arms=AS_CLAIMED, changed=lambda rows: rows):
    rows = []
    for rate, arm, seed in product(RATES, arms, range(3)):
        label = {"arm": arm, "kl_coef": 0.0 if arm == "none" else 0.1, "learning_rate": rate, "seed": seed}
        rows += run(label, gain=0.4, **arms[arm])
    return write(folder, rethinking=changed(rows))


def end_of(folder, arm="none 1e-05", **how):
    return language_model.run(settings(folder, **how))["end"][arm]


def test_every_sentence_holds_on_numbers_that_are_as_claimed(tmp_path):
    found = judged(language_model, settings(tmp_path))
    assert found == dict.fromkeys(found, "holds")
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
    failed = not_held(language_model, settings(tmp_path, AS_CLAIMED | {arm: AS_CLAIMED[arm] | columns}))
    assert failed == {claim for claim in judged(language_model, settings(tmp_path)) if fails in claim}
    assert len(failed) == len(RATES)


def test_without_an_effect_of_k2_there_is_no_margin_for_k1(tmp_path):
    found = language_model.run(settings(tmp_path, AS_CLAIMED | {"k2-loss": AS_CLAIMED["none"]}))
    same = [check for check in language_model.check(found) if "k1 as loss changes the KL" in check.claim]
    assert [check.verdict for check in same] == ["undecided"] * 2
    assert "k2 as loss is not nearer" in same[0].measured


def test_the_noise_of_a_run_is_that_of_all_its_updates(tmp_path):
    noises = {0: "", 20: 0.03, 40: 0.04, 60: 0.12}
    rising = lambda rows: [{**row, "train_reward_noise": noises[row["update"]]} for row in rows]
    noise = end_of(tmp_path, changed=rising)["noise"]
    assert noise["mean"] == near((0.0169 / 3) ** 0.5)
    assert noise["error"] == near(noise["mean"] * (3 / (4 * 57)) ** 0.5 / 3**0.5)


def test_the_error_of_the_noise_is_that_of_normal_noise(tmp_path):
    """The spread of 4000 simulated runs, which is known to about 1%."""
    rewards = torch.randn(4000, 3, language_model.EVERY, generator=torch.Generator().manual_seed(0))
    found = (rewards.diff(dim=-1).square().mean((1, 2)) / 2).sqrt()
    noise = end_of(tmp_path)["noise"]
    assert noise["error"] * 3**0.5 / noise["mean"] == pytest.approx(float(found.std() / found.mean()), rel=0.05)


def test_the_training_reward_has_the_error_of_its_updates(tmp_path):
    reward = end_of(tmp_path)["train_reward"]
    assert reward["error"] == near(0.02 / 20**0.5 / 3**0.5)


def test_a_run_that_stopped_is_counted_and_in_no_mean(tmp_path):
    stopped = lambda rows: [row for row in rows if row["job"] != "k3-loss_0.1_3e-05_1" or row["update"] < 40]
    found = language_model.run(settings(tmp_path, changed=stopped))
    assert {name for name, count in found["stopped"].items() if count} == {"k3-loss 3e-05"}
    assert found["end"]["k3-loss 3e-05"]["noise"]["seeds"] == 2

"""verl's own command with a declared KL: runs and refusals."""

import pytest
from on_verl.configuration import HAS_TRAINERS
from on_verl.whole_runs import main_ppo, steps

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.many,
    pytest.mark.skipif(not HAS_TRAINERS, reason="verl with TransferQueue is not installed"),
]

MODE = "trainer.v1.trainer_mode=klgrad_sync"


def test_a_kl_in_the_loss_of_two_workers_with_an_adaptive_beta(tmp_path):
    declared = ["+klgrad.ratio=prefix", "+klgrad.coef=0.1", "+klgrad.target=1000", "+klgrad.horizon=2"]
    status, output = main_ppo(tmp_path, MODE, *declared, "trainer.total_training_steps=2", workers=2)
    assert status == 0, output[-3000:]
    assert "klgrad is active in the driver and in every worker: reverse-sequence-k1-prefix-ratio" in output
    first, second = steps(output)
    assert first["actor/klgrad/coef"] == pytest.approx(0.1)
    assert second["actor/klgrad/coef"] == pytest.approx(0.1 * 2.718281828 ** (-0.2 / 2))  # the KL is far below 1000
    assert first["kl/reverse/k3/per_token"] < 1e-3 < second["kl/reverse/k3/per_token"]  # π has left ref
    assert second["actor/klgrad/loss"] > 0
    wanted = {"kl/reverse/k1/per_token/standard_error", "kl/mismatch/k3/per_token"}
    assert {*wanted, "ratio/sequence/effective_sample_size"} <= set(second)


def test_a_kl_in_the_advantages_with_leave_one_out(tmp_path):
    declared = ["+klgrad.placement=advantage", "+klgrad.baseline=leave_one_out", "+klgrad.coef=5"]
    status, output = main_ppo(tmp_path, MODE, *declared, "trainer.total_training_steps=2")
    assert status == 0, output[-3000:]
    found = steps(output)[1]
    assert "actor/klgrad/loss" not in found
    # verl's own advantages are group-normalised: with 4 completions none is beyond 1.5.
    assert max(abs(found["critic/advantages/max"]), abs(found["critic/advantages/min"])) > 1.5


def test_an_asynchronous_run_is_off_policy_and_weighted(tmp_path):
    mode = "trainer.v1.trainer_mode=klgrad_colocate_async"
    status, output = main_ppo(tmp_path, mode, "+klgrad.ratio=prefix", "trainer.total_training_steps=2")
    assert status == 0, output[-3000:]
    found = steps(output)[1]
    assert found["training/off_policy/trajectory_staleness/mean"] == 1  # one update behind
    assert found["actor/klgrad/ratio/max"] > 1.05
    assert 0 < found["actor/klgrad/ratio/effective_sample_size"] < 1


@pytest.mark.parametrize(
    ("mode", "variables", "said"),
    [
        ("trainer.v1.trainer_mode=sync", {}, "received PPOTrainerSync, which trains without them"),
        ("trainer.use_v1=false", {}, "received RayPPOTrainer, which trains without them"),
        (MODE, {"VERL_USE_EXTERNAL_PLUGINS": "none"}, "Unknown trainer 'klgrad_sync'"),
    ],
    ids=["another trainer", "an older trainer", "no plug-in in the driver"],
)
def test_settings_that_would_not_be_trained_stop_the_run(mode, variables, said, tmp_path):
    status, output = main_ppo(tmp_path, mode, "+klgrad.coef=0.1", "trainer.total_training_steps=1", **variables)
    assert status != 0
    assert said in output, output[-3000:]

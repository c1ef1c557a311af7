"""A `KLTrainer` that resumes from a checkpoint continues the run, by `Trainer`'s own argument."""

import pytest
import tiny
from tolerances import SAME_STEPS

from klgrad.trl import KLConfig, KLTrainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CASES = {
    "an adapted coefficient": {"kl_target": 1000.0, "kl_horizon": 1},
    "completions that wait": {"rollout_lag": 2, "kl_ratio": "prefix"},
    "a generation in the middle": {"num_iterations": 2, "kl_ratio": "prefix"},
}
LOGGED = ("loss", "kl/coef", "kl/reverse/k3/per_token", "grad_norm")


def built(folder, **settings):
    saved = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    return tiny.trainer(KLTrainer, KLConfig, folder, kl_coef=0.05, **saved, **settings)


@pytest.mark.parametrize("case", CASES)
def test_it_continues_as_if_it_had_not_stopped(case, tmp_path):
    whole = built(tmp_path, **CASES[case])
    whole.train()
    resumed = built(tmp_path, **CASES[case])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name in LOGGED:
        assert tiny.logged(resumed, name) == pytest.approx(tiny.logged(whole, name), rel=1e-5)
    SAME_STEPS.check(tiny.weights(resumed), tiny.weights(whole))


def test_a_checkpoint_of_another_trainer_is_resumed_with_a_warning(tmp_path):
    built(tmp_path, kl_target=1000.0, kl_horizon=1).train()
    checkpoint = tmp_path / "checkpoint-3"
    for file in checkpoint.glob("klgrad_*"):
        file.unlink()
    resumed = built(tmp_path, kl_target=1000.0, kl_horizon=1)
    with pytest.warns(UserWarning, match=r"will start again with kl_coef.*a checkpoint of 1 processes"):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert tiny.logged(resumed, "kl/coef")[3] == 0.05


class Odd:
    """A part whose state is no plain data."""

    def state_dict(self):
        return {"image": object()}

    def load_state_dict(self, state):
        raise AssertionError("there is nothing to load")


def test_a_state_that_cannot_be_loaded_is_resumed_with_a_warning(tmp_path):
    trainer = built(tmp_path)
    trainer.checkpointed = {**trainer.checkpointed, "odd": Odd()}
    trainer.train()
    with pytest.warns(UserWarning, match="will start again with kl_coef"):
        built(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

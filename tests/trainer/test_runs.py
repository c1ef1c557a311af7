"""Short runs of a `KLTrainer`: staleness, an adaptive β, a teacher, what is logged and what is warned of."""

import pytest
import tiny
import torch

from klgrad.errors import KernelInputError
from klgrad.trl import KLConfig, KLTrainer
from klgrad.trl.gather import with_peers

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made(path, **settings):
    return tiny.trainer(KLTrainer, KLConfig, path, **settings)


def test_lag(tmp_path):
    """From the third update on, completions are two generations old, and their own log-probs came along."""
    trainer = made(tmp_path, rollout_lag=2, kl_ratio="prefix", max_steps=5)
    seen, fresh = [], []
    score, loss = trainer._generate_and_score_completions, trainer._compute_loss

    def scored(inputs):
        batch = score(inputs)
        fresh.append(trainer._lagging[-1]["completion_ids"] if trainer._lagging else batch["completion_ids"])
        return batch

    def computed(model, inputs):
        seen.append(inputs["completion_ids"])
        assert "old_per_token_logps" in inputs
        return loss(model, inputs)

    trainer._generate_and_score_completions, trainer._compute_loss = scored, computed
    trainer.train()
    rows = lambda ids: sorted(map(tuple, ids.tolist()))
    assert [rows(ids) for ids in seen[2:]] == [rows(ids) for ids in fresh[:3]]
    assert tiny.logged(trainer, "ratio/prefix/effective_sample_size")[-1] < 1


def test_beta_is_adapted_towards_its_target(tmp_path):
    far = made(tmp_path / "far", kl_target=1e-6, kl_horizon=2, max_steps=4)
    far.train()
    near = made(tmp_path / "near", kl_target=100.0, kl_horizon=2, max_steps=4)
    near.train()
    assert far.coefficient.value > 0.05 > near.coefficient.value
    assert tiny.logged(far, "kl/coef")[-1] > tiny.logged(far, "kl/coef")[0]


def test_teacher_and_student_of_different_sizes(tmp_path):
    """Distillation: no reward, another model as reference, and the KL falls."""
    teacher = tiny.folder(layers=1, hidden=64)
    trainer = made(
        tmp_path,
        reward_funcs=None,
        teacher=teacher,
        kl_estimator="exact",
        kl_coef=1.0,
        kl_discount=0.0,
        kl_reduction="sequence",
        max_steps=12,
        learning_rate=3e-2,
    )
    assert trainer.ref_model.config.hidden_size == 64
    assert trainer.model.config.hidden_size == 32
    assert trainer.model.config._name_or_path == tiny.folder()
    trainer.train()
    kl = tiny.logged(trainer, "kl/reverse/exact/per_token")
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3])


def test_vocabularies_must_agree(tmp_path):
    with pytest.raises(KernelInputError, match="one vocabulary"):
        made(tmp_path, teacher=tiny.folder(words=40), reward_funcs=None)


def test_a_kl_that_does_not_start_at_zero_is_told_of(tmp_path):
    import warnings

    trainer = made(tmp_path, max_steps=1)
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    assert any("not about 0" in str(w.message) and "another checkpoint" in str(w.message) for w in told)


def test_the_reward_placement_warns_of_the_deviation(tmp_path):
    with pytest.warns(UserWarning, match="β differs from prompt to prompt"):
        made(tmp_path, kl_placement="reward")


def test_what_is_logged(tmp_path):
    trainer = made(tmp_path, kl_estimator="exact", max_steps=2)
    trainer.train()
    last = trainer.state.log_history[-2]
    for name in ("kl/reverse/k1", "kl/reverse/k2", "kl/reverse/k3", "kl/reverse/exact"):
        for unit in ("per_token", "per_sequence"):
            assert f"{name}/{unit}" in last
            assert f"{name}/{unit}/standard_error" in last
    assert {"kl/coef", "length/mean", "entropy"} <= set(last)


def test_two_kls_are_one_too_many(tmp_path):
    with pytest.raises(ValueError, match="two KL terms"):
        made(tmp_path, beta=0.1)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 1]),
        ([0, 0, 1, 2], [0, 0, 3, 3]),
        ([0, 0, 0, 1], [0, 0, 0, 0]),
        ([7], [7]),
        ([4, 5], [6, 6]),
    ],
)
def test_nobody_is_left_alone(group, expected):
    assert with_peers(torch.tensor(group)).tolist() == expected


def test_groups_that_micro_batches_cut_apart(tmp_path):
    trainer = made(tmp_path, kl_baseline="leave_one_out", per_device_train_batch_size=4, gradient_accumulation_steps=4)
    trainer.train()
    assert len(tiny.logged(trainer, "grad_norm")) == 3

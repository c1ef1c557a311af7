"""klgrad's trainers as verl builds them: the reference is loaded without verl's own KL, and β is in the checkpoints."""
# pyright: reportMissingImports=false

from pathlib import Path

import pytest
import tiny
from on_verl.configuration import HAS_TRAINERS, composed

from klgrad.errors import MeaningError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRAINERS, reason="verl with TransferQueue is not installed"),
]

SIZES = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    *(f"actor_rollout_ref.{part}.log_prob_micro_batch_size_per_gpu=4" for part in ("rollout", "ref")),
    "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=grpo",
    "critic.enable=false",
    "+klgrad.level=token",
]
SEPARATE = [
    "data.train_batch_size=1024",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]


def built(mode, *overrides):
    from verl.trainer.ppo.v1 import get_trainer_cls

    import klgrad.verl.trainers as _  # noqa: F401  (registered here even if this environment lacks the entry point)

    model = [f"actor_rollout_ref.model.path={tiny.folder()}"]
    more = SEPARATE if "separate" in mode else []
    config = composed(*SIZES, *model, *more, f"trainer.v1.trainer_mode={mode}", *overrides)
    return get_trainer_cls(mode)(config=config)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_verl_loads_the_reference_and_its_own_kl_stays_off(mode):
    from verl.trainer.ppo.utils import Role
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    trainer = built(f"klgrad_{mode}")
    assert trainer.trainer_mode == mode  # verl asks for this name in many places
    assert type(trainer.replay_buffer) is (ReplayBuffer if mode == "sync" else ReplayBufferAsync)
    trainer._init_resource_pool_mgr()
    assert trainer.use_reference_policy
    assert not trainer.config.algorithm.use_kl_in_reward
    assert not trainer.config.actor_rollout_ref.actor.use_kl_loss
    (role,) = trainer.role_worker_mapping
    assert role == Role.ActorRolloutRef
    name = trainer.role_worker_mapping[role].__ray_metadata__.class_name
    assert name.endswith("KLDetachActorWorker" if mode == "separate_async" else "KLActorWorker")


def test_without_hybrid_replicas_the_reference_is_a_worker_of_its_own():
    from verl.trainer.ppo.utils import Role

    trainer = built("klgrad_separate_async", "actor_rollout_ref.hybrid_engine=false")
    trainer._init_resource_pool_mgr()
    assert set(trainer.role_worker_mapping) == {Role.Actor, Role.RefPolicy}


@pytest.mark.parametrize(
    ("setting", "error", "said"),
    [
        ("ref.log_prob_micro_batch_size_per_gpu=null", ValueError, "log_prob_micro_batch_size_per_gpu"),  # by verl
        ("actor.use_kl_loss=true", MeaningError, r"`klgrad` and actor_rollout_ref\.actor\.use_kl_loss=True"),
    ],
)
def test_what_a_reference_needs_and_verls_own_kl_beside_it_are_checked(setting, error, said):
    with pytest.raises(error, match=said):
        built("klgrad_sync", f"actor_rollout_ref.{setting}")


def test_verls_own_trainer_without_settings_is_as_before():
    trainer = built("sync", "~klgrad")
    assert not trainer.use_reference_policy
    with pytest.raises(MeaningError, match="which trains without them"):
        built("sync")


# The configurations of `examples/verl`, composed and checked by verl's own code.

EXAMPLES = Path(__file__).parents[2] / "examples" / "verl"
FILES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


EXPECTED = {
    "distillation": "reverse-token-k1-prefix-ratio-truncate2",
    "multi_node": "reverse-sequence-k1-prefix-ratio-truncate2",
}


@pytest.mark.parametrize("name", FILES)
def test_verl_builds_the_trainer_of_an_example(name):
    import hydra

    from klgrad.verl.trainers import KLTrainerSync

    assert list(EXPECTED) == FILES
    with hydra.initialize_config_dir(str(EXAMPLES), version_base=None):
        trainer = KLTrainerSync(hydra.compose(name, overrides=[f"actor_rollout_ref.model.path={tiny.folder()}"]))
    trainer._init_resource_pool_mgr()
    assert trainer.use_reference_policy == (name == "multi_node")
    assert trainer.declaration.term.name == EXPECTED[name]
    if name == "multi_node":  # workers of two nodes
        assert trainer.resource_pool_manager.resource_pool_spec["global_pool"] == [8, 8]

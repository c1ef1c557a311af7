"""verl's trainers with a declared KL: `klgrad_sync`, `klgrad_colocate_async` and `klgrad_separate_async`."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.utils import Role, need_critic
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import validate_config
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_to_nested

from ..errors import ActivationError, MeaningError
from ..support import Json
from . import handshake
from .declaration import NODE, Config, notes, read_declaration, skips_scoring
from .guards import PREFIX
from .handshake import (
    NODE_OF_WORKERS,
    PLUGIN,
    Status,
    check_status,
    expected_status,
    from_worker_node,
    to_worker_node,
    worker_status,
)
from .loss import BETA, KLLoss, check_one_row_per_session, lowered_advantages, rollout_of_step, step_kl, step_metrics

# verl's actor workers with the declared KL in their loss.
#
# The class itself comes from klgrad, so that every worker has the KL as soon as it is set up, and a node without klgrad
# cannot start one.

# pyright: reportMissingImports=false


class WithDeclaredKL:
    """Wraps the loss that verl sets up, and reports what this process has."""

    actor: Any
    config: Config
    loss_fn: Any
    role: str

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Verl's set-up; then the loss, and a refusal if klgrad is not active here."""
        super().init_model()  # pyright: ignore[reportAttributeAccessIssue]
        if "actor" not in self.role:
            return
        declaration, wanted = from_worker_node(self.config[NODE_OF_WORKERS])
        config = self.loss_fn.keywords["config"]
        policy_loss = partial(ppo_loss, config=config) if declaration.from_teacher else self.loss_fn
        self.actor.set_loss_fn(KLLoss(policy_loss, declaration))
        check_status(wanted, [self.klgrad_status()])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def klgrad_status(self) -> Status:
        return worker_status(None if self.actor is None else self.actor.loss_fn)  # None before `init_model`


class KLActorWorker(WithDeclaredKL, ActorRolloutRefWorker):
    """For the trainer modes `sync` and `colocate_async`."""


class KLDetachActorWorker(WithDeclaredKL, DetachActorWorker):
    """For the trainer mode `separate_async`."""


# pyright: reportMissingImports=false


logger = logging.getLogger(__name__)

ACTORS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
FIELDS = ["uid", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages"]


class DeclaredKL(PPOTrainer):
    """What klgrad adds to each of verl's trainers.

    The methods without a docstring override verl's of the same name, and call them.
    """

    base_mode: str
    worker: type

    def __init__(self, config: Config) -> None:
        self.declaration = read_declaration(config)
        self.beta = self.declaration.beta()
        self._step_kl: float | None = None
        needs_reference = not self.declaration.from_teacher
        validate_config(config, use_reference_policy=needs_reference, use_critic=need_critic(config))
        with open_dict(config):
            # verl compares this name with those of its own modes, and looks up their settings by it.
            config.trainer.v1.trainer_mode = self.base_mode
            config.actor_rollout_ref[NODE_OF_WORKERS] = to_worker_node(self.declaration)
        super().__init__(config)
        if needs_reference:
            self.use_reference_policy = True

    def _init_resource_pool_mgr(self) -> None:
        with reference_is_built(self.config, wanted=not self.declaration.from_teacher):
            super()._init_resource_pool_mgr()
        for role in ACTORS:
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.worker)

    def _setup(self) -> None:
        try:
            super()._setup()
        except ray.exceptions.RayError as error:
            if "No module named 'klgrad" not in str(error):  # or 'klgrad.verl', in an older klgrad
                raise
            raise ActivationError(
                f"klgrad {version('klgrad')} on every node",
                "a worker without it, or with an older one",
                "install the driver's version of klgrad on the node that Ray names above",
            ) from error
        self.check_active()
        logger.warning("klgrad is active in the driver and in every worker: %s", self.declaration)
        for sentence in notes(self.config, self.declaration):
            logger.warning("klgrad: %s", sentence)

    def check_active(self) -> None:
        """Raise `ActivationError` unless the declared KL is active here and in every actor worker."""
        check_status({"plugin": True}, [{"where": "the driver", "plugin": PLUGIN in sys.modules}])
        check_status(expected_status(self.declaration), self.actor_rollout_wg.klgrad_status())

    def _compute_advantage(self, batch: Any, metrics: Json) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        if self.declaration.from_teacher:
            return batch
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
        response_mask, uid = data["response_mask"], data.pop("uid").tolist()
        padded = data.to_padded_tensor()
        rollout = rollout_of_step(padded, uid, scored=not skips_scoring(self.config))
        metrics.update(step_metrics(self.declaration, self.beta.value, rollout))
        self._step_kl = step_kl(self.declaration, rollout) if self.beta.target is not None else None
        if not self.declaration.in_advantage:
            return batch
        if self.declaration.term.baseline == "leave_one_out":
            check_one_row_per_session(batch.keys)
        lower = lowered_advantages(self.declaration.term, self.beta.value, rollout, padded["advantages"])
        fields = TensorDict({"advantages": response_to_nested(lower, response_mask)}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        return batch

    def _update_actor(self, batch: Any, metrics: Json) -> Any:
        self.check_active()  # a worker may have been started again since the last step
        batch.extra_info[BETA] = self.beta.value
        batch = super()._update_actor(batch, metrics)
        metrics["klgrad/active_workers"] = self.actor_rollout_wg.world_size
        self.beta.update(self._step_kl)
        return batch

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        handshake.save_beta(self.beta, folder)  # first: verl calls a checkpoint complete at its end
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps and not handshake.load_beta(
            self.beta, handshake.step_folder(self.config, self.global_steps)
        ):
            logger.warning("klgrad: the checkpoint has no %s; β starts at %g", handshake.STATE_FILE, self.beta.value)


@contextmanager
def reference_is_built(config: Config, *, wanted: bool) -> Iterator[None]:
    """While verl chooses its workers, make it choose those with a reference, as for its own KL in the reward."""
    before = config.algorithm.use_kl_in_reward
    config.algorithm.use_kl_in_reward = before or wanted
    try:
        yield
    finally:
        config.algorithm.use_kl_in_reward = before


@register_trainer(f"{PREFIX}sync")
class KLTrainerSync(DeclaredKL, PPOTrainerSync):
    base_mode, worker = "sync", KLActorWorker


@register_trainer(f"{PREFIX}colocate_async")
class KLTrainerColocateAsync(DeclaredKL, PPOTrainerColocateAsync):
    base_mode, worker = "colocate_async", KLActorWorker


@register_trainer(f"{PREFIX}separate_async")
class KLTrainerSeparateAsync(DeclaredKL, PPOTrainerSeparateAsync):
    base_mode, worker = "separate_async", KLDetachActorWorker


def require_klgrad_mode(trainer: type[PPOTrainer], mode: str) -> type[PPOTrainer]:
    """Verl's own trainer, which without this would train without the KL that is declared under `klgrad`."""

    def init(self: Any, config: Config) -> None:
        if config.get(NODE) is not None:
            raise MeaningError(
                f"trainer.v1.trainer_mode={PREFIX}{mode} with settings under `{NODE}`",
                f"trainer.v1.trainer_mode={mode}, which trains without them",
                f"set trainer.v1.trainer_mode={PREFIX}{mode}, or remove the settings",
            )
        trainer.__init__(self, config)

    return type(trainer.__name__, (trainer,), {"__init__": init, "__module__": trainer.__module__})


for _own in (KLTrainerSync, KLTrainerColocateAsync, KLTrainerSeparateAsync):
    _mode = _own.base_mode
    TRAINER_REGISTRY[_mode] = require_klgrad_mode(TRAINER_REGISTRY[_mode], _mode)

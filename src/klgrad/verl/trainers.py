"""verl's trainers with a declared KL: `klgrad_sync`, `klgrad_colocate_async` and `klgrad_separate_async`."""

import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.utils import Role, need_critic
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import validate_config
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_to_nested

from ..integrations import lend
from ..support import Json
from .declaration import (
    NODE,
    PREFIX,
    STATE_FILE,
    CheckedConfig,
    Config,
    VerlObjective,
    load_beta,
    notes,
    read_declaration,
    save_beta,
    skips_scoring,
    step_folder,
)
from .loss import BETA, KLLoss, check_one_row_per_session, lowered_advantages, rollout_of_step, step_kl, step_metrics

# verl's actor workers with the declared KL in their loss.
#
# The class itself comes from klgrad, so that every worker has the KL as soon as it is set up, and a node without klgrad
# cannot start one.

# pyright: reportMissingImports=false


class WithDeclaredKL:
    """Wraps the loss that verl sets up."""

    actor: Any
    config: Config
    loss_fn: Any
    role: str

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Verl's set-up; then the loss."""
        super().init_model()  # pyright: ignore[reportAttributeAccessIssue]
        if "actor" not in self.role:
            return
        declaration = VerlObjective(**self.config[NODE])
        config = self.loss_fn.keywords["config"]
        policy_loss = partial(ppo_loss, config=config) if declaration.from_teacher else self.loss_fn
        self.actor.set_loss_fn(KLLoss(policy_loss, declaration))


class KLActorWorker(WithDeclaredKL, ActorRolloutRefWorker):
    """For the trainer modes `sync` and `colocate_async`."""


class KLDetachActorWorker(WithDeclaredKL, DetachActorWorker):
    """For the trainer mode `separate_async`."""


logger = logging.getLogger(__name__)

ACTORS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
FIELDS = ["uid", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages"]


class DeclaredKL(PPOTrainer):
    """What klgrad adds to each of verl's trainers.

    The methods without a docstring override verl's of the same name, and call them.
    """

    base_mode: str
    worker: type
    config: Config = None  # in front of the `CheckedConfig` of verl's own trainers

    def __init__(self, config: Config) -> None:
        self.declaration = read_declaration(config)
        self.beta = self.declaration.beta()
        self._step_kl: float | None = None
        needs_reference = not self.declaration.from_teacher
        validate_config(config, use_reference_policy=needs_reference, use_critic=need_critic(config))
        with open_dict(config):
            # verl compares this name with those of its own modes, and looks up their settings by it.
            config.trainer.v1.trainer_mode = self.base_mode
            config.actor_rollout_ref[NODE] = asdict(self.declaration)
        super().__init__(config)
        if needs_reference:
            self.use_reference_policy = True

    def _init_resource_pool_mgr(self) -> None:
        # As for verl's own KL in the reward, so that it chooses workers with a reference.
        own = self.config.algorithm.use_kl_in_reward
        with lend(self.config.algorithm, use_kl_in_reward=own or not self.declaration.from_teacher):
            super()._init_resource_pool_mgr()
        for role in ACTORS:
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.worker)

    def _setup(self) -> None:
        super()._setup()
        logger.warning("klgrad is active in the driver and in every worker: %s", self.declaration)
        for sentence in notes(self.config, self.declaration):
            logger.warning("klgrad: %s", sentence)

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
        batch.extra_info[BETA] = self.beta.value
        batch = super()._update_actor(batch, metrics)
        self.beta.update(self._step_kl)
        return batch

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        save_beta(self.beta, folder)  # first: verl calls a checkpoint complete at its end
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        folder = step_folder(self.config, self.global_steps)
        if self.global_steps and not load_beta(self.beta, folder):
            logger.warning("klgrad: the checkpoint has no %s; β starts at %g", STATE_FILE, self.beta.value)


@register_trainer(f"{PREFIX}sync")
class KLTrainerSync(DeclaredKL, PPOTrainerSync):
    base_mode, worker = "sync", KLActorWorker


@register_trainer(f"{PREFIX}colocate_async")
class KLTrainerColocateAsync(DeclaredKL, PPOTrainerColocateAsync):
    base_mode, worker = "colocate_async", KLActorWorker


@register_trainer(f"{PREFIX}separate_async")
class KLTrainerSeparateAsync(DeclaredKL, PPOTrainerSeparateAsync):
    base_mode, worker = "separate_async", KLDetachActorWorker


PPOTrainer.config = CheckedConfig()

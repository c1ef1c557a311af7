"""verl's actor workers with the declared KL in their loss.

The class itself comes from klgrad, so that every worker has the KL as soon as it is set up, and a node without klgrad
cannot start one.
"""
# pyright: reportMissingImports=false

from functools import partial
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.losses import ppo_loss

from .active import Status, check_status, status
from .loss import KLLoss
from .sent import NODE_OF_WORKERS, received


class WithDeclaredKL:
    """Wraps the loss that verl sets up, and reports what this process has."""

    actor: Any
    config: Any
    loss_fn: Any
    role: str

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Verl's set-up; then the loss, and a refusal if klgrad is not active here."""
        super().init_model()  # pyright: ignore[reportAttributeAccessIssue]
        if "actor" not in self.role:
            return
        declaration, wanted = received(self.config[NODE_OF_WORKERS])
        config = self.loss_fn.keywords["config"]
        policy_loss = partial(ppo_loss, config=config) if declaration.from_teacher else self.loss_fn
        self.actor.set_loss_fn(KLLoss(policy_loss, declaration))
        check_status(wanted, [self.klgrad_status()])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def klgrad_status(self) -> Status:
        """What this process has."""
        return status(None if self.actor is None else self.actor.loss_fn)  # None before `init_model`


class KLActorWorker(WithDeclaredKL, ActorRolloutRefWorker):
    """For the trainer modes `sync` and `colocate_async`."""


class KLDetachActorWorker(WithDeclaredKL, DetachActorWorker):
    """For the trainer mode `separate_async`."""

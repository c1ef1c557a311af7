"""What is registered where klgrad's trainers fail to import: names that stop the run with the reason."""
# pyright: reportMissingImports=false

from typing import Any

from ..errors import ActivationError
from .modes import MODES, PREFIX


def register(error: BaseException) -> None:
    """Register, under each of klgrad's names, a trainer that raises when it is built."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, register_trainer

    def refuse(self: Any, config: Any) -> None:
        raise ActivationError(
            "klgrad's trainers to import",
            f"{type(error).__name__}: {error}",
            "install what is missing, and verl 0.9.1, which this klgrad was tested with",
        ) from error

    # verl's two abstract methods: without them, Python would refuse the class itself, without the reason.
    body = {"__init__": refuse, "on_step_end": None, "on_sample_end": None}
    for mode in MODES:
        if f"{PREFIX}{mode}" not in TRAINER_REGISTRY:
            register_trainer(f"{PREFIX}{mode}")(type(f"Refused{mode}", (PPOTrainer,), body))

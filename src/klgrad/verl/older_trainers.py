"""verl's trainers that are not registered: `trainer.use_v1=False`, one step off-policy, fully asynchronous.

klgrad's trainers are based on the registered ones. The others would ignore the settings under `klgrad`, and train
without the declared KL.
"""

from types import ModuleType
from typing import Any

from ..errors import MeaningError
from .modes import PREFIX
from .settings import NODE


class CheckedConfig:
    """The attribute `config` of a trainer: it refuses a configuration that declares a KL.

    A wrapper of `__init__` is not enough: verl's fully asynchronous trainers do not call that of their base.
    """

    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        if "config" not in vars(trainer):
            raise AttributeError("config")
        return vars(trainer)["config"]

    def __set__(self, trainer: Any, config: Any) -> None:
        if config.get(NODE) is not None:
            raise MeaningError(
                f"one of the trainers of trainer.use_v1=True with settings under `{NODE}`",
                f"{type(trainer).__name__}, which trains without them",
                f"run verl.trainer.main_ppo with trainer.use_v1=True and trainer.v1.trainer_mode={PREFIX}sync, "
                f"{PREFIX}colocate_async or {PREFIX}separate_async, or remove the settings",
            )
        vars(trainer)["config"] = config


def refuse_settings(module: ModuleType) -> None:
    """Make the base of verl's older trainers check its configuration.

    Args:
        module: `verl.trainer.ppo.ray_trainer`; a verl without these trainers has nothing to guard.
    """
    base = getattr(module, "RayPPOTrainer", None)
    if base is not None:
        base.config = CheckedConfig()

"""What stops a run whose settings of klgrad would be ignored: failed imports, and verl's older trainers."""

from types import ModuleType

from ..errors import ActivationError, MeaningError
from .declaration import NODE, Config

# The names of klgrad's trainers in `trainer.v1.trainer_mode`.

MODES = ("sync", "colocate_async", "separate_async")
"""verl's own trainer modes."""

PREFIX = "klgrad_"
"""Before the name of the mode that a trainer of klgrad's is based on."""


# What is registered where klgrad's trainers fail to import: names that stop the run with the reason.

# pyright: reportMissingImports=false


def register(error: BaseException) -> None:
    """Register, under each of klgrad's names, a trainer that raises when it is built."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, register_trainer

    def refuse(self: object, config: Config) -> None:
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


# verl's trainers that are not registered: `trainer.use_v1=False`, one step off-policy, fully asynchronous.
#
# klgrad's trainers are based on the registered ones. The others would ignore the settings under `klgrad`, and train
# without the declared KL.


class CheckedConfig:
    """The attribute `config` of a trainer: it refuses a configuration that declares a KL.

    A wrapper of `__init__` is not enough: verl's fully asynchronous trainers do not call that of their base.
    """

    def __get__(self, trainer: object, owner: type) -> object:
        if trainer is None:
            return self
        if "config" not in vars(trainer):
            raise AttributeError("config")
        return vars(trainer)["config"]

    def __set__(self, trainer: object, config: Config) -> None:
        if config.get(NODE) is not None:
            raise MeaningError(
                f"one of the trainers of trainer.use_v1=True with settings under `{NODE}`",
                f"{type(trainer).__name__}, which trains without them",
                f"run verl.trainer.main_ppo with trainer.use_v1=True and trainer.v1.trainer_mode={PREFIX}sync, "
                f"{PREFIX}colocate_async or {PREFIX}separate_async, or remove the settings",
            )
        vars(trainer)["config"] = config


def guard_older_trainers(module: ModuleType) -> None:
    """Make the base of verl's older trainers check its configuration; a verl without them has nothing to guard."""
    base = getattr(module, "RayPPOTrainer", None)
    if base is not None:
        base.config = CheckedConfig()

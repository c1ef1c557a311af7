"""Observe a trainer of transformers or TRL from outside, while it trains.

Touches `Trainer._prepare_inputs` and TRL's `_generate_and_score_completions`, which are replaced on the instance by
functions that call them and look at what they return; the public `compute_loss` and `log` likewise. Also touches
`_metrics`, `_entropy_window_stats`, `entropy_coef` and `_last_world_entropy`, which a loss of TRL changes.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer, TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from .version import ContractError

PREPARE, GENERATE, LOSS, LOG = "_prepare_inputs", "_generate_and_score_completions", "compute_loss", "log"
CHANGED_BY_A_LOSS = ("_metrics", "_entropy_window_stats", "entropy_coef", "_last_world_entropy")
PARAMETERS = {PREPARE: 1, GENERATE: 1, LOSS: 2, LOG: 1}
"""How many parameters of each method are relied on; `compute_loss` takes the model and the batch first."""


def trainer_of(callback: TrainerCallback, state: Any) -> Any:
    """The trainer that is calling this callback with this state.

    transformers does not give a callback its trainer, but one of the trainer's methods is on the call stack. The
    trainer is the one whose list of callbacks has this callback and whose state is this state; both are compared by
    identity, so that no other trainer can be taken for it. (A search among all objects, `gc.get_objects`, is no
    alternative: it breaks a tuple that another thread is building.)
    """
    frame = inspect.currentframe()
    while frame is not None:
        for x in frame.f_locals.values():
            # `type`, and not `isinstance`, which would run code of lazy modules and proxies.
            if issubclass(type(x), Trainer) and getattr(x, "state", None) is state and _has(x, callback):
                return x
        frame = frame.f_back  # no further than needed: reading the variables of a frame keeps them alive
    raise ContractError(
        "a trainer that calls this callback",
        "none on the call stack",
        "attach it explicitly, before training: callback.attach(trainer)",
    )


def _has(trainer: Any, callback: TrainerCallback) -> bool:
    handler = getattr(trainer, "callback_handler", None)
    return any(each is callback for each in getattr(handler, "callbacks", ()))


class Observer:
    """Replaces methods of one trainer object, and restores them.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._restore: dict[str, tuple[Any, bool, Any]] = {}
        for name, count in PARAMETERS.items():
            if name != GENERATE or self.generates:
                _check_parameters(trainer, name, count)

    @property
    def generates(self) -> bool:
        """Whether the trainer samples completions as TRL's trainers do."""
        return hasattr(self._trainer, GENERATE)

    def on_batch(self, look: Callable[[Any], None]) -> None:
        """Call `look` with every micro-batch that is trained on, before its loss is computed."""

        def prepare(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            batch = before(*args, **kwargs)
            if self._trainer.model.training:
                look(batch)
            return batch

        self._replace(PREPARE, prepare)

    def on_generation(self, look: Callable[[], None]) -> None:
        """Call `look` whenever completions were sampled for training."""

        def generate(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found = before(*args, **kwargs)
            if self._trainer.model.training:
                look()
            return found

        if self.generates:
            self._replace(GENERATE, generate)

    def on_loss(self, around: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        """Let `around(loss, model, batch)` compute the training loss by a call of `loss(model, batch)`."""

        def compute(before: Callable[..., Any], model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._trainer.model.training:
                return before(model, batch, *args, **kwargs)
            return around(lambda model, batch: before(model, batch, *args, **kwargs), model, batch)

        self._replace(LOSS, compute)

    def on_log(self, add: Callable[[], dict[str, float]]) -> None:
        """Add numbers to each row that training logs; a number that the trainer itself logs keeps its value."""

        def log(before: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if not any(name.startswith("eval_") for name in logs):
                logs.update({name: value for name, value in add().items() if name not in logs})
            return before(logs, *args, **kwargs)

        self._replace(LOG, log)

    def release(self, *names: str) -> None:
        """Restore these methods, or all; a replacement that another library put over ours stays."""
        for name in names or tuple(self._restore):
            ours, was_own, before = self._restore.pop(name, (None, False, None))
            if ours is None or vars(self._trainer).get(name) is not ours:
                continue
            if was_own:
                setattr(self._trainer, name, before)
            else:
                delattr(self._trainer, name)

    def _replace(self, name: str, with_: Callable[..., Any]) -> None:
        before, was_own = getattr(self._trainer, name), name in vars(self._trainer)
        ours = lambda *args, **kwargs: with_(before, *args, **kwargs)
        setattr(self._trainer, name, ours)
        self._restore[name] = (ours, was_own, before)


def _check_parameters(trainer: Any, name: str, count: int) -> None:
    method = getattr(trainer, name, None)
    expected = f"{type(trainer).__name__}.{name} with at least {count} positional parameters"
    if method is None:
        raise ContractError(expected, "no such method")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    if sum(kind in positional for kind in kinds) < count and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ContractError(expected, f"{len(kinds)} parameters")


@contextmanager
def loss_leaves_no_trace(trainer: Any) -> Iterator[None]:
    """Lend a loss of TRL copies of what it changes beside its value: metrics, and the adaptive entropy's state."""
    before = {name: getattr(trainer, name) for name in CHANGED_BY_A_LOSS if hasattr(trainer, name)}
    for name, value in before.items():
        setattr(trainer, name, copy.deepcopy(value))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)


def scores_a_reference(trainer: Any) -> bool:
    """Whether the trainer is TRL's GRPO or a subclass, whose loss reads the reference's log-probs from the batch."""
    return isinstance(trainer, GRPOTrainer)

"""TRL's metrics, and the state of TRL and transformers that their checkpoints leave out.

Touches `GRPOTrainer._metrics`, `_step`, `_buffered_inputs`, `_total_train_tokens`, `entropy_coef` and
`_last_world_entropy`, and `Trainer._tr_loss` and `_globalstep_last_logged`.
"""

from typing import Any, Literal

from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

Mode = Literal["train", "eval"]


def current_mode(trainer: GRPOTrainer) -> Mode:
    """`train` or `eval`: under which of the two TRL logs now."""
    return "train" if trainer.model.training else "eval"  # pyright: ignore[reportOptionalMemberAccess]


def log_metrics(trainer: GRPOTrainer, mode: Mode, metrics: dict[str, float]) -> None:
    """Add numbers to those that TRL averages and logs next."""
    for name, value in metrics.items():
        trainer._metrics[mode][name].append(value)


class GenerationState:
    """Where training is within a generation batch, that batch, and the metrics that are not logged yet."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The state between two updates; lists that change later are copied."""
        trainer = self._trainer
        adaptive = trainer.use_adaptive_entropy
        return {
            "step": trainer._step,
            "total_tokens": trainer._total_train_tokens,
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "entropy": [trainer.entropy_coef, trainer._last_world_entropy] if adaptive else None,
            "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
            "buffer": None if self._generates_next() else trainer._buffered_inputs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the state back, in this process or in another."""
        trainer = self._trainer
        trainer._step, trainer._total_train_tokens = state["step"], state["total_tokens"]
        trainer.state.num_input_tokens_seen = state["tokens_seen"]
        if state["entropy"] is not None:
            trainer.entropy_coef, trainer._last_world_entropy = state["entropy"]
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update({name: list(values) for name, values in state["metrics"].items()})
        trainer._buffered_inputs = state["buffer"]

    def _generates_next(self) -> bool:
        """Whether the next step samples a new batch, so that the last one is not needed."""
        trainer: Any = self._trainer
        every = trainer.args.steps_per_generation * trainer.num_iterations
        return trainer._buffered_inputs is None or trainer._step % every == 0


class LossSinceLog:
    """The loss since the last logged row. `Trainer` sets it to 0 after it has loaded a checkpoint."""

    NAMES = ("_tr_loss", "_globalstep_last_logged")

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Empty before training has begun. The loss is added to in place, so it is copied."""
        found = {name: getattr(self._trainer, name) for name in self.NAMES if hasattr(self._trainer, name)}
        return {name: _copied(value) for name, value in found.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the state back."""
        for name, value in state.items():
            setattr(self._trainer, name, _copied(value))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value

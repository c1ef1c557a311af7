"""mlx-tune: the loss of its GRPO.

`grpo_loss` receives beta = 1 and generates by itself: the completions of the batch stand in the place of those that it
would sample, one call for each group, and `reward_fn` returns the advantages of the audit. Only this file is loaded.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from .framework import Default, Framework
from .harness import load, of_arrays, subject

if TYPE_CHECKING:
    from ..audit import Subject


def subjects() -> list[Subject]:
    """GRPO as it is."""

    def loss(x: dict[str, Any]) -> Any:
        import mlx.core as mx  # pyright: ignore[reportMissingImports]

        rows = iter(mx.where(x["mask"], x["logp"], 0))
        losses = _losses()
        vars(losses)["generate_with_log_probs"] = lambda *_, **__: (mx.array([0, 0]), next(rows))
        rewards = iter(x["rewards"])
        return losses.grpo_loss(
            None,
            SimpleNamespace(decode=str),
            mx.array([0]),
            lambda *_: next(rewards),
            "",
            num_generations=len(x["logp"]),
            beta=1.0,
        )[0]

    return [subject("mlx-tune", "mlx-tune grpo beta", of_arrays(loss, "mlx"))]


@cache
def _losses() -> ModuleType:
    return load("mlx-tune", "mlx_tune/losses.py", replaced=("mlx_tune",))


FRAMEWORK = Framework(
    "mlx-tune",
    "mlx-tune",
    "0.6.0",
    subjects,
    Default("GRPO with beta=0.04, which is not read: no KL", "mlx-tune grpo beta"),
)

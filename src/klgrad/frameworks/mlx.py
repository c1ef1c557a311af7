"""MLX-LM-LoRA and mlx-tune: the losses of their GRPO, and the REINFORCE of MLX-LM-LoRA, whose KL is in the reward.

`_grpo_objective` of MLX-LM-LoRA receives logp, ref_logp, the mask, one advantage per completion and beta = 1: its
update follows the rollout at once, and the ratio is 1. `_rlhf_reinforce_logp_loss` receives rewards of 0, or the
advantages of the audit. Both cast to float32. `grpo_loss` of mlx-tune receives beta = 1 and generates by itself: the
completions of the batch stand in the place of those that it would sample, one call for each group, and `reward_fn`
returns the advantages of the audit. Only these files are loaded.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from .framework import Default, Framework
from .harness import load, of_arrays, subject

if TYPE_CHECKING:
    from ..audit import Subject

REDUCTIONS = ("grpo", "bnpo", "dr_grpo")


def _of_lora() -> list[Subject]:
    """GRPO with each reduction, the default first; and REINFORCE, with and without a model of the reference."""
    return [*map(_grpo, REDUCTIONS), _reinforce(reference=True), _reinforce(reference=False)]


def _grpo(reduction: str) -> Subject:
    objective = _function("grpo_trainer", "_grpo_objective")

    def loss(x: dict[str, Any]) -> Any:
        width = x["mask"].shape[1]
        arguments = (x["logp"], x["ref_logp"], x["mask"], x["rewards"], 1.0, 1e-4, 1e-4, width, "token", reduction)
        return objective(*arguments)[0]

    name = f"mlx-lm-lora grpo_loss_type={reduction}"
    # A mean over the tokens of the batch couples its groups.
    return subject("mlx-lm-lora", name, of_arrays(loss, "mlx"), stacks=reduction != "bnpo")


def _reinforce(*, reference: bool) -> Subject:
    function = _function("rlhf_reinforce_trainer", "_rlhf_reinforce_logp_loss")

    def loss(x: dict[str, Any]) -> Any:
        import mlx.core as mx  # pyright: ignore[reportMissingImports]

        ref = x["ref_logp"] if reference else mx.stop_gradient(x["logp"])
        return function(x["logp"], ref, x["rewards"], x["mask"], 1.0)[0]

    name = f"mlx-lm-lora rlhf_reinforce{'' if reference else ' without a reference model'}"
    return subject("mlx-lm-lora", name, of_arrays(loss, "mlx"))


@cache
def _function(file: str, name: str) -> Any:
    path = f"mlx_lm_lora/trainer/{file}.py"
    stand_ins = ("mlx_lm", "tqdm", "numpy")
    module = load("mlx-lm-lora", path, stand_ins=stand_ins, replaced=("mlx_lm_lora",), package="mlx_lm_lora.trainer")
    return getattr(module, name)


def _of_tune() -> list[Subject]:
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


MLX_LM_LORA = Framework(
    "mlx-lm-lora",
    "mlx-lm-lora",
    "5.10.2",
    _of_lora,
    Default("GRPO with beta=0.1: k3 as a loss, a mean per completion", "mlx-lm-lora grpo_loss_type=grpo"),
)
MLX_TUNE = Framework(
    "mlx-tune",
    "mlx-tune",
    "0.6.0",
    _of_tune,
    Default("GRPO with beta=0.04, which is not read: no KL", "mlx-tune grpo beta"),
)

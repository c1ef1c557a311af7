"""MaxText: its RL, which is Tunix's GRPO; its experimental GRPO; and its distillation.

`train_rl.py` passes these settings to Tunix's `GRPOConfig`, and no `kl_loss_mode`. The experimental
`grpo_loss_fn_nnx` receives β = 1 and rewards of 0; logp and ref_logp stand for the two models.
`CombinedDistillationStrategy.compute_loss` receives the logits of the student and the teacher, and the sampled tokens
as labels; offline the teacher has its two most likely entries. Only these files are loaded.
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from . import tunix
from .formulae import AsLoss, part_of
from .framework import Default, Framework
from .harness import load, of_arrays, subject
from .run_settings import Reader, Run, RunDraft

if TYPE_CHECKING:
    from ..audit import Subject

STAND_INS = ("pathwaysutils", "transformers", "tensorflow", "orbax", "jetstream", "grain")
TOP_K = 2


def subjects() -> list[Subject]:
    """RL, the default first; the experimental GRPO; distillation online with and without labels, and offline."""
    return [
        *map(_rl, (tunix.PER_COMPLETION, tunix.PER_TOKEN)),
        _experimental(),
        *(_distillation(*settings) for settings in ((0.5, False), (1.0, False), (1.0, True))),
    ]


def _rl(reduction: str) -> Subject:
    config = tunix.modules()["grpo_learner"].GRPOConfig(
        num_generations=2, num_iterations=1, beta=1.0, epsilon=0.2, loss_algo="grpo", loss_agg_mode=reduction
    )
    return tunix.of_grpo("maxtext", f"maxtext rl.grpo_beta rl.loss_agg_mode={reduction}", config)


def _experimental() -> Subject:
    config = SimpleNamespace(
        train_data_columns="prompt", num_generations=1, grpo_epsilon=0.2, grpo_beta=1.0, num_experts=1
    )

    def loss(x: dict[str, Any]) -> Any:
        import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

        live = jnp.pad(x["mask"].astype(int), ((0, 0), (1, 0)))  # with a prompt of one token, which it leaves out
        names = ("completions", "completions_position", "completions_segmentation")
        data = {f"prompt_{name}": x["tokens"] for name in names}
        data |= {"ar_completions_segmentation": live, "completions_logprobs": x["old_logp"]}
        return _trainer().grpo_loss_fn_nnx(x["logp"], config, data, None, None, x["ref_logp"])[0]

    return subject("maxtext", "maxtext experimental.rl grpo_beta", of_arrays(loss, "jax"), stacks=True)


def _distillation(alpha: float, offline: bool) -> Subject:
    file = _distillation_file()
    strategy = file.CombinedDistillationStrategy(None, None, temperature=1.0, alpha=alpha)
    output = file.DistillationForwardOutput

    def loss(x: dict[str, Any]) -> Any:
        import jax  # pyright: ignore[reportMissingImports]

        teacher = output(x["ref_logits"])
        if offline:
            logits, indices = jax.lax.top_k(x["ref_logits"], TOP_K)
            teacher = output(logits, top_k_indices=indices)
        labels = jax.nn.one_hot(x["tokens"], x["logits"].shape[-1]) * x["mask"][..., None]
        return strategy.compute_loss(output(x["logits"]), teacher, labels)[0]

    name = f"maxtext distill_alpha={alpha:g}{f' offline, top {TOP_K}' * offline}"
    return subject("maxtext", name, of_arrays(loss, "jax"))


@cache
def _trainer() -> ModuleType:
    file = "maxtext/experimental/rl/grpo_trainer.py"
    stub: Any = ModuleType("gcloud_stub")
    stub.vertex_tensorboard_modules = lambda: (None, None)
    loaded = {"maxtext.common.gcloud_stub": stub}
    module = load("maxtext", file, stand_ins=STAND_INS, replaced=("maxtext",), loaded=loaded)
    models_and_rewards = SimpleNamespace(
        compute_log_probs_nnx=lambda logp, *_, **__: (logp, None), dummy_reward_len=lambda mask: 0.0 * mask.sum(-1)
    )
    vars(module).update(EPS=1e-8, grpo_utils=models_and_rewards)
    return module


@cache
def _distillation_file() -> ModuleType:
    file = "maxtext/trainers/post_train/distillation/distillation_utils.py"
    return load("maxtext", file, stand_ins=STAND_INS, replaced=("maxtext", "tunix", "orbax"))


# Its RL trainer passes `rl` to Tunix, and no `kl_loss_mode`.

RL = "rl."
KNOWN: dict[str, Any] = {
    f"{RL}grpo_beta": 0.08,
    f"{RL}loss_agg_mode": tunix.PER_COMPLETION,
    f"{RL}num_iterations": 1,
    f"{RL}off_policy_steps": 0,
}
NO_MODE = (
    "MaxText has no setting for Tunix's kl_loss_mode, whose default is k1: no setting makes this KL act. Pass "
    'kl_loss_mode="mse_kl" to GrpoConfig in train_rl.py.'
)


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read `rl` of a configuration of MaxText's RL trainer."""
    draft = RunDraft("maxtext", given, KNOWN, RL)
    unit = draft.one_of("loss_agg_mode", tunix.REDUCTIONS)
    if draft["grpo_beta"]:
        draft.change("grpo_beta", 0.0, "k1 as a loss descends nothing; or patch the trainer")
    name = f"rl.grpo_beta rl.loss_agg_mode={unit}"
    draft.parts = [part_of("maxtext", name, AsLoss("k1"), tunix.REDUCTIONS[unit], draft["grpo_beta"])]
    draft.notes.append(NO_MODE)
    return draft.run("Tunix's GRPO", tunix.stale(draft), None)


FRAMEWORK = Framework(
    "maxtext",
    "maxtext",
    "0.2.5",
    subjects,
    Default(
        "RL with rl.grpo_beta=0.08, which Tunix 0.1.7 trains: k1 as a loss, a mean per completion",
        f"maxtext rl.grpo_beta rl.loss_agg_mode={tunix.PER_COMPLETION}",
    ),
    reader=Reader(
        "MaxText",
        KNOWN,
        read_config,
        re.compile(r"(.*/)?(src\.)?maxtext[./]trainers[./]post_train[./]rl[./]train_rl(\.py)?"),
        beginnings=(f"{RL}grpo_", f"{RL}use_agentic_rollout"),
        source="AI-Hypercomputer/maxtext: trainers/post_train/rl/train_rl.py, configs/types.py of the wheel; read on "
        "2026-11-18",
    ),
)

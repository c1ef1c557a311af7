"""Tunix: the loss of its GRPO, also in its agentic learner, and its PPO from the rewards to the loss.

`grpo_loss_fn` and `ppo_policy_loss_fn` receive a batch with the mask, the log-probs of ref and those before the
update, and β = 1; in the place of the model stand logp and the logits. The advantages of PPO are made by
`PPOLearner._generate_and_compute_advantage` with a cluster that has these completions, scores of 0, and a critic that
is 0. Only these files are loaded. The functions cast to float32.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from .framework import Default, Framework
from .harness import instead, load, of_arrays, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

PER_COMPLETION, PER_TOKEN, SUM = "sequence-mean-token-mean", "token-mean", "seq-mean-token-sum"


def subjects() -> list[Subject]:
    """GRPO with each estimator and reduction, the default first; the agentic default; PPO with each estimator."""
    modes, reductions = ("kl", "mse_kl", "low_var_kl"), (PER_COMPLETION, PER_TOKEN, SUM)
    return [
        *(in_loss("grpo", mode, reduction) for mode, reduction in product(modes, reductions)),
        in_loss("agentic_grpo", "kl", PER_COMPLETION),
        *(in_reward(method, 0.95) for method in ("low_var_kl", "kl", "mse_kl")),
        in_reward("kl", 1.0),
    ]


def in_loss(learner: str, mode: str, reduction: str) -> Subject:
    """The KL of `grpo_loss_fn` with the configuration of a learner."""
    config = modules()[f"{learner}_learner"].GRPOConfig(beta=1.0, kl_loss_mode=mode, loss_agg_mode=reduction)
    return of_grpo("tunix", f"tunix {learner} kl_loss_mode={mode} loss_agg_mode={reduction}", config)


def of_grpo(framework: str, name: str, config: Any) -> Subject:
    """Tunix's GRPO with a configuration, as a loss of a framework."""
    config.temperature = 1.0
    grpo = modules()["algo_core"].grpo_loss_fn

    def loss(x: dict[str, Any]) -> Any:
        example = _example(x, x["advantages"][:, 0])
        return grpo((x["logp"], x["logits"]), example, config, pad_id=0, eos_id=1)[0]

    # A mean over the tokens of the batch couples its groups.
    return subject(framework, name, of_arrays(loss, "jax"), stacks=config.loss_agg_mode != PER_TOKEN)


def _example(x: dict[str, Any], advantages: Any) -> SimpleNamespace:
    """Tunix's `TrainExample`."""
    return SimpleNamespace(
        prompt_ids=x["tokens"],
        completion_ids=x["tokens"],
        completion_mask=x["mask"],
        advantages=advantages,
        ref_per_token_logps=x["ref_logp"],
        old_per_token_logps=x["old_logp"],
    )


def in_reward(method: str, gae_lambda: float) -> Subject:
    """The KL in the rewards of PPO, with a critic that is 0."""
    config = modules()["ppo_learner"].PPOConfig(beta=1.0, kl_method=method, gae_lambda=gae_lambda)
    ppo = modules()["algo_core"].ppo_policy_loss_fn

    def of_advantages(x: dict[str, Any]) -> Any:
        example = _example(x, x["advantages"])
        return ppo((x["logp"], x["logits"]), example, config, pad_id=0, eos_id=1)[0]

    policy_loss = of_arrays(of_advantages, "jax")

    def loss(batch: Batch) -> Tensor:
        from dataclasses import replace

        return policy_loss(replace(batch, advantages=_advantages(config, batch)))

    name = f"tunix ppo kl_method={method} gae_lambda={gae_lambda:g}"
    # GAE ends with a division by the standard deviation of the batch.
    return subject("tunix", name, loss, instead=instead(k1="" if method == "kl" else "kl_method=kl"))


def _advantages(config: Any, batch: Batch) -> Tensor:
    """By the learner, which needs the values of its arrays: it runs without compilation, in float32."""
    import jax.numpy as jnp
    import torch

    from .harness import scores

    rows, width = batch.mask.shape
    array = lambda x: jnp.asarray(x.detach().float().numpy())
    rollout = SimpleNamespace(
        tokens=batch.mask.long().numpy(), left_padded_prompt_tokens=[[1]] * rows, text=[""] * rows
    )
    cluster = SimpleNamespace(
        cluster_config=SimpleNamespace(rollout_config=SimpleNamespace(max_tokens_to_generate=width)),
        rollout=SimpleNamespace(pad_id=lambda: 0, eos_id=lambda: 1),
        generate=lambda **_: rollout,
        get_ref_per_token_logps=lambda **_: array(batch.ref_logp),
        get_old_per_token_logps=lambda **_: array(batch.old_logp),
        get_values=lambda **_: jnp.zeros((rows, width + 1)),
        buffer_metrics=lambda *_, **__: None,
    )
    learner = object.__new__(modules()["ppo_learner"].PPOLearner)
    learner.rl_cluster, learner.algo_config, learner.metric_fns = cluster, config, ()
    learner._rollout_micro_batch_size = learner._compute_logps_micro_batch_size = rows
    learner._use_reward_model = False
    learner._compute_rewards = lambda **_: scores(batch).sum(-1).detach().float().numpy()
    example = learner._generate_and_compute_advantage({"prompts": [""] * rows}, mode=None)
    return torch.from_dlpack(example.advantages).to(batch.logp.dtype)


@cache
def modules() -> dict[str, ModuleType]:
    """The files by name; each can import those before it. Log-probs and logits stand for the model."""
    found, loaded = {}, {}
    for name in (
        *("sft/utils", "rl/function_registry", "rl/algorithm_config", "rl/common", "rl/algo_core"),
        *("rl/agentic/agentic_rl_learner", "rl/grpo/grpo_learner", "rl/agentic/agentic_grpo_learner"),
        "rl/ppo/ppo_learner",
    ):
        module = load("google-tunix", f"tunix/{name}.py", stand_ins=("humanize",), replaced=("tunix",), loaded=loaded)
        found[name.rpartition("/")[2]] = loaded[f"tunix.{name.replace('/', '.')}"] = module
    found["algo_core"].nnx = SimpleNamespace(split=lambda model: (None, model))
    found["common"].compute_per_token_logps = lambda _, model, **__: model
    found["ppo_learner"].utils = SimpleNamespace(pad_to_length=lambda ids, **_: ids)  # they have one length
    return found


FRAMEWORK = Framework(
    "tunix",
    "google-tunix",
    "0.1.7",
    subjects,
    Default(
        "GRPO with beta=0.04: k1 as a loss (kl_loss_mode=kl), a mean per completion",
        f"tunix grpo kl_loss_mode=kl loss_agg_mode={PER_COMPLETION}",
    ),
)

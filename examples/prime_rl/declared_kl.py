"""A declared KL in prime-rl (read at commit 559b447, 0.8.1.dev67), by a custom loss. Untested with prime-rl itself.

    [trainer.loss]
    type = "custom"
    import_path = "declared_kl.loss"

    [trainer.loss.kwargs]
    beta = 0.01

with this folder on PYTHONPATH. The loss is prime-rl's default one plus β times the KL; other `kwargs` are settings of
the default loss. prime-rl divides both by the number of tokens of the batch.

prime-rl passes reference log-probs only where the algorithm has scored the completions by another model, and its `opd`
and `opsd` hand their tokens to a fixed loss instead of this one. So this needs an algorithm of one's own: a subclass of
prime-rl's GRPO whose `score_episode` calls `assign_reference_logprobs`, as that of `opd` does.
"""
# pyright: reportMissingImports=false

from typing import Any

from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs, default_loss_fn

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate

TERM = KLTerm(weighting=ImportanceWeighting("prefix", Truncate(2.0)))
"""KL(π‖ref) between completions, weighted back from the inference engine; write another term here for another KL."""


def loss(inputs: LossInputs, beta: float, **settings: Any) -> LossOutputs:
    """The loss of one completion, whose tensors have one entry per token."""
    if inputs.ref_logprobs is None:
        raise ValueError("The declared KL needs ref_logprobs: use an algorithm that scores completions by a reference.")
    found = TERM(
        Rollout(
            inputs.trainer_logprobs[None],
            inputs.ref_logprobs[None],
            inputs.loss_mask[None],
            behavior_logp=inputs.inference_logprobs[None],
        )
    )
    policy = default_loss_fn(inputs, DefaultLossConfig(**settings))
    # `loss` has the estimate as its value and the sum over tokens as its gradient.
    return LossOutputs(policy.loss + beta * found.loss, {**policy.metrics, "klgrad/kl": found.value.mean})

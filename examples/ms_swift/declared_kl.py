"""A declared KL in ms-swift 4.6.0, by `--external_plugins`.

    swift rlhf --rlhf_type grpo --external_plugins examples/ms_swift/declared_kl.py --beta 0.04 ...

`--beta` is β; ms-swift loads the reference unless it is 0. This KL takes the place of ms-swift's own, with every
`--loss_type`: it is summed over each completion, averaged over completions, and divided by `--max_completion_length`,
so that β has about the scale of a mean over tokens. It is weighted back to the policy from what sampled: the rollout
engine if ms-swift has its log-probs, or else the policy before the update.
"""

from typing import Any

from swift.rlhf_trainers import GRPOTrainer  # pyright: ignore[reportMissingImports]
from swift.trainers.trainer_factory import TrainerFactory  # pyright: ignore[reportMissingImports]
from torch import Tensor

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate

ON_POLICY = KLTerm()
OFF_POLICY = KLTerm(weighting=ImportanceWeighting("prefix", Truncate(2.0)))
"""KL(π‖ref) between completions; write another term here for another KL."""


class DeclaredKLTrainer(GRPOTrainer):
    """ms-swift's GRPO with the declared KL in its loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.use_liger_loss or self.kl_in_reward or self.beta == 0.0:
            raise ValueError(
                "The declared KL is in ms-swift's own loss: drop --use_liger_kernel and --kl_in_reward, set --beta."
            )
        print(f"klgrad is active: {OFF_POLICY}, β={self.beta:g}")

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logp = found[0]  # for the KL: the loss calls this once, and does not return it
        return found

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> tuple[Tensor, Any]:
        beta, self.beta = self.beta, 0.0  # without ms-swift's own KL
        try:
            loss, metrics = super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        finally:
            self.beta = beta
        sampler = grpo_batch.rollout_per_token_logps
        sampler = grpo_batch.old_per_token_logps if sampler is None else sampler
        term, ref_logp = ON_POLICY if sampler is None else OFF_POLICY, grpo_batch.ref_per_token_logps
        found = term(Rollout(self._logp, ref_logp, grpo_batch.completion_mask, behavior_logp=sampler))
        # In nats per completion; ms-swift's own is per token.
        metrics["kl"] = self.accelerator.gather_for_metrics(found.value.mean).mean().item()
        return loss + beta * found.loss / self.max_completion_length, metrics


TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{DeclaredKLTrainer.__name__}"

"""A declared KL in NeMo-RL (read at commit 7ea279a, after 0.6.0), by a loss function. Untested with NeMo-RL itself.

In a copy of its `examples/run_grpo.py`, after `setup(...)` has returned `loss_fn`:

    from declared_kl import DeclaredKLLossFn
    loss_fn = DeclaredKLLossFn(master_config.loss_fn)

with this folder on PYTHONPATH on every node. `loss_fn.reference_policy_kl_penalty` is β: NeMo-RL loads the reference
unless it is 0. This KL takes the place of NeMo-RL's own. With `token_level_loss` it is divided by the number of tokens
of the batch, like the policy loss; otherwise by the number of completions, and β is then per completion, not per token.
"""
# pyright: reportMissingImports=false

from typing import Any

from nemo_rl.algorithms.loss.interfaces import LossType
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn
from torch import Tensor

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate

TERM = KLTerm(weighting=ImportanceWeighting("prefix", Truncate(2.0)))
"""KL(π‖ref) between completions, weighted back from the generation engine; write another term here for another KL."""


class DeclaredKLLossFn(ClippedPGLossFn):
    """NeMo-RL's loss with the declared KL in the place of its own."""

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.beta, self.reference_policy_kl_penalty = self.reference_policy_kl_penalty, 0
        if self.beta == 0:
            raise ValueError(
                "The declared KL is in the loss: set reference_policy_kl_penalty above 0 and use_kl_in_reward=false."
            )

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a micro-batch, scaled by the numbers of the whole batch."""
        loss, metrics = super().__call__(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        # NeMo-RL filters these by top-k and top-p, but not those of the reference.
        logp = data.get("curr_logprobs_unfiltered", next_token_logprobs)
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        ref_logp, sampler = (data[name][:, 1:] for name in ("reference_policy_logprobs", "generation_logprobs"))
        rollout = Rollout(logp, ref_logp, mask, behavior_logp=sampler)
        total = global_valid_toks if self.loss_type == LossType.TOKEN_LEVEL else global_valid_seqs
        kl = (TERM(rollout).per_token + rollout.log_ratio).sum() / total  # its value is k1
        return loss + self.beta * kl, {**metrics, "kl_penalty": self.beta * kl.item()}

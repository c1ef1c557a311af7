"""A declared KL in Trinity-RFT 0.6.0, by its registry of KL functions.

    trinity run --config run.yaml --plugin-dir examples/trinity

with these lines in run.yaml:

    algorithm:
      kl_loss_fn: klgrad
      kl_loss_fn_args: {kl_coef: 0.02}

Trinity passes the log-probs of the policy before the update as `old_logprob`, and no others: the ratio below is to that
policy, and a rollout engine that differs from it stays uncorrected.
"""

from typing import Any

from torch import Tensor
from trinity.algorithm.kl_fn import KL_FN, KLFn  # pyright: ignore[reportMissingImports]
from trinity.algorithm.utils import aggregate_loss  # pyright: ignore[reportMissingImports]

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate

ON_POLICY = KLTerm()
OFF_POLICY = KLTerm(weighting=ImportanceWeighting("prefix", Truncate(2.0)))
"""KL(π‖ref) between completions; write another term here for another KL."""


@KL_FN.register_module("klgrad")
class DeclaredKL(KLFn):
    """The term's gradient, reduced by `loss_agg_mode`."""

    def calculate_kl_loss(
        self,
        logprob: Tensor,
        ref_logprob: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        old_logprob: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """β times the KL, and its estimate."""
        term = ON_POLICY if old_logprob is None else OFF_POLICY
        found = term(Rollout(logprob, ref_logprob, response_mask, behavior_logp=old_logprob))
        loss = aggregate_loss(found.per_token, response_mask, loss_agg_mode=loss_agg_mode)
        metrics = {"kl/estimate_per_sequence": float(found.value.mean), "kl_coef": self.kl_coef}
        return self.kl_coef * loss, metrics

    def calculate_kl(self, logprob: Tensor, ref_logprob: Tensor, old_logprob: Tensor | None = None) -> Tensor:
        """Only the loss is declared: as a reward (`kl_penalty_fn`) the KL of a token needs the mask."""
        raise NotImplementedError("use kl_loss_fn: klgrad, and kl_penalty_fn: none")

"""The KL in the loss: a picklable function around verl's own loss, called in the workers on each micro-batch."""
# pyright: reportMissingImports=false
# (verl is in an environment of its own)

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.result import KLResult
from ..errors import RolloutError
from ..trainer_parts.kl_values import token_values
from .batch import rollout_of_micro_batch
from .declaration import Declaration

BETA = "klgrad_coef"
"""The key of the present β in a batch; it comes from the driver, which adapts it."""

FIELDS = ("response_mask", "old_log_probs", "rollout_log_probs", "ref_log_prob")


@dataclass(frozen=True)
class KLLoss:
    """verl's loss plus β times the declared term.

    Attributes:
        policy_loss: `functools.partial(ppo_loss, config=...)`, as verl sets it up.
        declaration: the term.
    """

    policy_loss: Callable[..., tuple[Tensor, dict[str, Any]]]
    declaration: Declaration

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """The loss and the metrics of a micro-batch, as verl's workers call it."""
        loss, metrics = self.policy_loss(model_output=model_output, data=data, dp_group=dp_group)
        if self.declaration.in_advantage:
            return loss, metrics
        config = self.policy_loss.keywords["config"]  # pyright: ignore[reportFunctionMemberAccess]
        kl, more = kl_loss(self.declaration, config, model_output, data)
        beta = self._beta(data)
        rest = loss if self.declaration.task_rewards else 0.0
        return rest + beta * kl, {**metrics, **more, "klgrad/coef": beta}

    def _beta(self, data: Any) -> float:
        if self.declaration.settings.target is None:
            return self.declaration.settings.coef
        from verl.utils import tensordict_utils

        found = tensordict_utils.get(data, BETA)
        if found is None:
            raise RolloutError(
                f"`{BETA}` in the batch, for an adaptive β", "none", "train with one of klgrad's trainers"
            )
        return float(found)


def kl_loss(declaration: Declaration, actor: Any, model_output: Any, data: Any) -> tuple[Tensor, dict[str, Any]]:
    """The declared term on a micro-batch, and its metrics.

    Args:
        declaration: the term, its sampler and its reduction.
        actor: verl's configuration of the actor, for the reduction.
        model_output: of the actor; its log-probs have no padding.
        data: the micro-batch.

    Returns:
        A scalar, reduced and scaled over workers and micro-batches as verl does for its own losses; metrics.
    """
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.workers.utils.padding import no_padding_2_padding

    logp = no_padding_2_padding(model_output["log_probs"], data)
    kept = data.select(*(name for name in FIELDS if name in data.keys())).to_padded_tensor()  # noqa: SIM118
    if declaration.from_teacher:
        ref_logp = no_padding_2_padding(data["teacher_logprobs"], data).squeeze(-1)
    else:
        ref_logp = kept.get("ref_log_prob", None)
    rollout = rollout_of_micro_batch(declaration, logp, ref_logp, kept)
    result = declaration.term(rollout)
    by_sequence = declaration.settings.reduction == "sequence"
    kl = agg_loss(
        loss_mat=result.per_token + token_values(declaration.term, rollout),
        loss_mask=rollout.mask,
        loss_agg_mode="seq-mean-token-sum" if by_sequence else actor.loss_agg_mode,
        dp_size=data["dp_size"],
        batch_num_tokens=data["batch_num_tokens"],
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=actor.loss_scale_factor,
    )
    return kl, _metrics(kl, result, weighted=declaration.term.weighting is not None)


WITHOUT_TOKENS = {"ratio/share_bounded": 0.0, "ratio/effective_sample_size": 1.0, "ratio/max": 0.0}
"""The ratios of a micro-batch that has only verl's padding: none is bounded, none is large."""


def _metrics(kl: Tensor, result: KLResult, *, weighted: bool) -> dict[str, Any]:
    """What is known only in the workers: the loss, and the ratios to the policy as it moves.

    verl needs the same metrics from every micro-batch of every worker, also from one that has only padding.
    """
    from verl.utils.metric import AggregationType, Metric

    found = {"klgrad/loss": Metric(AggregationType.SUM, kl.detach())}
    for name, empty in WITHOUT_TOKENS.items() if weighted else ():
        how = AggregationType.MAX if name.endswith("max") else AggregationType.MEAN
        found[f"klgrad/{name}"] = Metric(how, result.diagnostics.get(name, empty))
    return found

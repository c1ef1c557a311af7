"""The KL as a part of verl's loss or advantages, from verl's batches, with its metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.importance import ImportanceWeighting
from ..core.result import KLResult
from ..core.rollout import Rollout
from ..core.term import KLTerm
from ..errors import RolloutError
from ..integrations import token_values, total_reverse_kl
from ..kernels import head_kl, lumped_kl
from ..reports import kl_report, mismatch_report
from ..support import Json
from .declaration import Config, VerlObjective

# verl's tensors as a `Rollout`: the driver's after `_compute_advantage`, and a worker's micro-batch.
#
# The keys `response_mask`, `old_log_probs`, `rollout_log_probs`, `ref_log_prob`, `teacher_logprobs` and `uid` are
# verl's.

Batch = Any
"""A TensorDict of verl's, or tensors by name."""

SAMPLERS = {"rollout": "rollout_log_probs", "old": "old_log_probs"}
"""The key of the log-probs of each `sampler`."""


def rollout_of_step(batch: Mapping[str, Tensor], uid: Sequence[object], *, scored: bool = True) -> Rollout:
    """A batch of the driver: the policy before the update is π, the rollout engine is the sampler if it is known.

    The tensors are padded (B, T); `uid` has each row's prompt. Not `scored`: `old_log_probs` are those of the rollout
    engine, a ratio to which would be 1, not measured.
    """
    behavior, group = batch.get("rollout_log_probs") if scored else None, list(map(str, uid))
    given = batch["old_log_probs"], batch["ref_log_prob"], batch["response_mask"]
    return Rollout(*given, behavior_logp=behavior, group=group)  # pyright: ignore[reportArgumentType]


def rollout_of_micro_batch(declaration: VerlObjective, logp: Tensor, ref_logp: Tensor, batch: Batch) -> Rollout:
    """A micro-batch of a worker: the policy that is trained is π, and `sampler` says what sampled."""
    is_weighted = declaration.term.weighting is not None
    behavior = batch[SAMPLERS[declaration.sampler]] if is_weighted else None
    return Rollout(logp, ref_logp, batch["response_mask"].to(torch.bool), behavior_logp=behavior)


# The KL in the advantages: β times the term's coefficient is subtracted after verl has normalised them.


def lowered_advantages(term: KLTerm, beta: float, rollout: Rollout, advantages: Tensor) -> Tensor:
    r"""(B, T) the advantages minus β times the coefficient of the term.

    Estimates:
        nothing: these are coefficients.
    Gradient:
        verl's policy loss with these advantages descends that of the term, times β, beside that of the reward, on the
        first update on a batch. Its ratio π/π_old is then 1, and no token is clipped.
    Requires:
        `rollout.logp` of the policy that the update starts from.

    Args:
        term: the term; with a weighting, `rollout.behavior_logp` is the sampler's.
        beta: β.
        rollout: the batch of the step.
        advantages: (B, T) as verl has normalised them.
    """
    live = rollout.mask.any(-1)
    if not bool(live.any()):
        return advantages
    coefficient = torch.zeros_like(rollout.logp)
    coefficient[live] = term(rows(rollout, live)).coefficient  # rows without a token are verl's padding
    return advantages - (beta * coefficient).to(advantages.dtype)


def rows(rollout: Rollout, chosen: Tensor) -> Rollout:
    optional = ("group", "behavior_logp")
    fields = {name: x[chosen] for name in optional if (x := getattr(rollout, name)) is not None}
    return Rollout(rollout.logp[chosen], rollout.ref_logp[chosen], rollout.mask[chosen], **fields)


def check_one_row_per_session(keys: Sequence[str]) -> None:
    """Raise if a session has several rows: leave-one-out would compare a completion with parts of itself.

    verl's keys of the rows are `{uid}_{session}_{index}`.
    """
    sessions = [key.rsplit("_", 1)[0] for key in keys]
    if len(set(sessions)) < len(sessions):
        repeated = next(s for s in sessions if sessions.count(s) > 1)
        raise RolloutError(
            "one row per session with baseline=leave_one_out",
            f"several rows of session {repeated}",
            "write baseline=none: the agent loop returns several trajectories, which are not independent",
        )


# What the driver logs of each batch: every estimator with its error, the mismatch to the sampler, the ratios.


def step_metrics(declaration: VerlObjective, beta: float, rollout: Rollout) -> dict[str, float]:
    """Metrics of a step, with the policy before the update as π, under the names that `KLTrainer` logs on TRL."""
    if not bool(rollout.mask.any()):
        return {"kl/coef": beta}
    live = rows(rollout, rollout.mask.any(-1))
    metrics = {"kl/coef": beta, **kl_report(live).metrics()}
    if live.behavior_logp is not None:
        mismatch = mismatch_report(live.logp, live.behavior_logp, live.mask, group=live.group).metrics()
        metrics["mismatch/log_ratio/abs_max"] = mismatch.pop("log_ratio/abs_max")
        metrics |= mismatch
    if weighting_of_step(declaration, live) is not None:
        term = replace(declaration.term, baseline="none")
        metrics |= {name: float(x) for name, x in term(live).diagnostics.items()}
    return metrics


def weighting_of_step(declaration: VerlObjective, rollout: Rollout) -> ImportanceWeighting | None:
    """The declared importance weights of the policy before the update.

    None where they are all 1: with sampler=old, and where the rollout engine's log-probs stand for the policy's. The
    workers log how they move.
    """
    known = declaration.sampler == "rollout" and rollout.behavior_logp is not None
    return declaration.term.weighting if known else None


def step_kl(declaration: VerlObjective, rollout: Rollout) -> float | None:
    """KL(π‖ref) in the unit of `target`, for an adaptive β; None if no token is live."""
    if not bool(rollout.mask.any()):
        return None
    seen = rows(rollout, rollout.mask.any(-1))
    total = float(total_reverse_kl(seen, weighting_of_step(declaration, seen), exact=False))
    return total / (float(seen.lengths.sum()) if declaration.target_unit == "token" else len(seen.mask))


# The KL in the loss: a picklable function around verl's own loss, called in the workers on each micro-batch.

# pyright: reportMissingImports=false
# (verl is in an environment of its own)


BETA = "klgrad_coef"
"""The key of the present β in a batch; it comes from the driver, which adapts it."""

DIVERGENCE = "klgrad_divergence"
"""The key of the divergence of each token in a worker's output."""

FIELDS = ("response_mask", "old_log_probs", "rollout_log_probs", "ref_log_prob")


@dataclass(frozen=True)
class KLLoss:
    """verl's loss, `functools.partial(ppo_loss, config=...)` as verl sets it up, plus β times the declared term."""

    policy_loss: Callable[..., tuple[Tensor, Json]]
    declaration: VerlObjective

    def __call__(
        self,
        model_output: Batch = None,
        data: Batch = None,
        dp_group: object = None,
        student_logits: Tensor | None = None,
    ) -> Any:
        """The loss and the metrics of a micro-batch, as verl's workers call it.

        With the teacher's top k they call it twice: first with the logits, for the divergence of each token.
        """
        if student_logits is not None:
            return {DIVERGENCE: top_k_divergence(self.declaration, student_logits, data)}
        loss, metrics = 0.0, {}
        if self.declaration.task_rewards or not self.declaration.over_entries:  # else the worker has no log-probs
            loss, metrics = self.policy_loss(model_output=model_output, data=data, dp_group=dp_group)
        if self.declaration.in_advantage:
            return loss, metrics
        config = self.policy_loss.keywords["config"]  # pyright: ignore[reportFunctionMemberAccess]
        kl, numbers = kl_loss(self.declaration, config, model_output, data)
        beta = self._beta(data)
        rest = loss if self.declaration.task_rewards else 0.0
        return rest + beta * kl, {**metrics, **numbers, "klgrad/coef": beta}

    def _beta(self, data: Batch) -> float:
        if self.declaration.target is None:
            return self.declaration.coef
        from verl.utils import tensordict_utils

        return float(tensordict_utils.get(data, BETA))


def top_k_divergence(declaration: VerlObjective, logits: Tensor, data: Batch) -> Tensor:
    """(1, N) the declared divergence of each token over the teacher's top k and its tail, from (1, N, V) logits."""
    ids, ref_logp = (data[name].values()[None] for name in ("teacher_ids", "teacher_logprobs"))
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp = wide.gather(-1, ids) - wide.logsumexp(-1, keepdim=True)
    return (lumped_kl if declaration.tail == "lump" else head_kl)(logp, ref_logp, declaration.term.generator)


def kl_loss(declaration: VerlObjective, actor: Config, model_output: Batch, data: Batch) -> tuple[Tensor, Json]:
    """The declared term on a micro-batch, a scalar, and its metrics.

    It is reduced and scaled over workers and micro-batches as verl does for its own losses. The log-probs of the
    actor's output have no padding.
    """
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.workers.utils.padding import no_padding_2_padding

    tensors = data.select(*(name for name in FIELDS if name in data.keys())).to_padded_tensor()  # noqa: SIM118

    def reduced(per_token: Tensor) -> Tensor:
        by_sequence = declaration.reduction == "sequence"
        return agg_loss(
            loss_mat=per_token,
            loss_mask=tensors["response_mask"].to(torch.bool),
            loss_agg_mode="seq-mean-token-sum" if by_sequence else actor.loss_agg_mode,
            dp_size=data["dp_size"],
            batch_num_tokens=data["batch_num_tokens"],
            global_batch_size=data["global_batch_size"],
            loss_scale_factor=actor.loss_scale_factor,
        )

    if declaration.over_entries:
        kl = reduced(no_padding_2_padding(model_output[DIVERGENCE], data))
        return kl, _metrics(kl)
    logp = no_padding_2_padding(model_output["log_probs"], data)
    if declaration.from_teacher:
        ref_logp = no_padding_2_padding(data["teacher_logprobs"], data).squeeze(-1)
    else:
        ref_logp = tensors["ref_log_prob"]
    rollout = rollout_of_micro_batch(declaration, logp, ref_logp, tensors)
    result = declaration.term(rollout)
    kl = reduced(result.per_token + token_values(declaration.term, rollout))
    return kl, _metrics(kl, result if declaration.term.weighting is not None else None)


WITHOUT_TOKENS = {"ratio/share_bounded": 0.0, "ratio/effective_sample_size": 1.0, "ratio/max": 0.0}
"""The ratios of a micro-batch that has only verl's padding: none is bounded, none is large."""


def _metrics(kl: Tensor, weighted: KLResult | None = None) -> Json:
    """What is known only in the workers: the loss, and the ratios of a weighted term to the policy as it moves.

    verl needs the same metrics from every micro-batch of every worker, also from one that has only padding.
    """
    from verl.utils.metric import AggregationType, Metric

    metrics = {"klgrad/loss": Metric(AggregationType.SUM, kl.detach())}
    if weighted is None:
        return metrics
    for name, empty in WITHOUT_TOKENS.items():
        how = AggregationType.MAX if name.endswith("max") else AggregationType.MEAN
        metrics[f"klgrad/{name}"] = Metric(how, weighted.diagnostics.get(name, empty))
    return metrics

"""`KLTrainer`: TRL's `GRPOTrainer` with the KL that was declared, and everything else TRL's."""

import math
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from ..core.estimators import k3
from ..core.importance import token_ratio
from ..core.result import KLResult
from ..core.rollout import Rollout, checked_at_the_end
from ..kernels import TokenStatistics
from . import metrics
from .adaptive_beta import AdaptiveCoefficient
from .beta_hook import inserted
from .config import KLConfig
from .gather import everywhere, groups_together, with_peers
from .head_check import check_head
from .kl_reward import KLReward, no_reward
from .model_forward import (
    Completions,
    add_statistics_forward,
    base_of,
    exact_statistics,
    refuse_images,
    top_k_statistics,
)
from .sanity import check_built, check_prompts, check_start
from .teacher import as_reference, shared_vocabulary
from .top_k import with_top_k_kl
from .trl_methods import check_class, check_methods


@dataclass(frozen=True, eq=False)
class Seen:
    """One forward pass of the policy over a batch: log-probs that carry the gradient."""

    logp: Tensor
    entropy: Tensor | None
    aux_loss: Tensor | None
    exact: TokenStatistics | None = None


class KLTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose KL term is a `KLTerm`; see `KLConfig` for its fields.

    TRL's `beta` is 0. It is lent a 1 where TRL makes, prepares and asks the reference, so that adapters, FSDP and
    DeepSpeed are handled by TRL's own code; and our term where TRL adds its KL to a loss (`beta_hook.py`).
    """

    args: KLConfig
    model: Any

    def __init__(self, model: Any, reward_funcs: Any = None, args: KLConfig | None = None, **kwargs: Any) -> None:
        self.args = args = KLConfig("klgrad-run") if args is None else args
        check_class(args)
        check_methods(type(self), KLTrainer)
        self.objective = args.objective
        self.coefficient = AdaptiveCoefficient(args.kl_coef, args.kl_target, args.kl_horizon)
        self._answer: Seen | None = None
        self._unrecorded: tuple[Rollout, Tensor, KLResult | None] | None = None
        self._lagging: deque[dict[str, Any]] = deque()
        self._checked_start, self._checked_head, self._generations = False, False, 0
        self.evaluating, self._evaluated = False, 0
        self.windows = {"train": metrics.Window(), "eval": metrics.Window()}
        rewards, weights = [*_listed(reward_funcs)] or [no_reward], args.reward_weights
        if self.objective.placement == "reward":
            rewards.append(KLReward(self))
            args.reward_weights = [*(weights or [1.0] * (len(rewards) - 1)), -args.kl_coef]
            _warn_of_deviations(args)
        args.beta = 1.0  # so that TRL makes and prepares the reference
        try:
            with as_reference(model, args, kwargs) as (named, given):
                super().__init__(named, reward_funcs=rewards, args=args, **given)
        finally:
            args.beta, args.reward_weights = 0.0, weights
        self.beta = 0.0
        check_built(self)
        both = [base_of(self.accelerator.unwrap_model(m)) for m in (self.model, self.ref_model) if m is not None]
        self.shared_vocabulary = shared_vocabulary(both)
        if self.objective.exact:
            for each in both:
                add_statistics_forward(each)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        prompts: Any = self.train_dataset if dataset is None else dataset
        check_prompts(self.args, len(prompts))
        return super()._get_train_sampler(dataset)

    # Scoring

    def _generate(self, prompts: list[Any]) -> Any:
        made = super()._generate(prompts)
        self._last_made = made  # for a KL in the reward
        return made

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.beta = 0.0 if self.objective.exact or self.objective.placement == "reward" else 1.0
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self.beta = 0.0
        batch["group"] = self.groups(len(batch["completion_ids"])) + self._first_group()
        if not self.model.training:
            self._evaluated += len(batch["completion_ids"]) * self.accelerator.num_processes
        elif self.args.rollout_lag:
            return self._delayed(batch)
        return batch

    def groups(self, rows: int) -> Tensor:
        """(rows,) which prompt each completion is of, in the order in which TRL generates on all processes."""
        first = self.accelerator.process_index * rows
        row = torch.arange(rows, device=self.accelerator.device) + first
        if self.model.training:
            return row // self.num_generations
        return row // self.num_generations_eval + self._evaluated  # batches of one evaluation have other prompts

    def _first_group(self) -> int:
        """Generations that go into one update must not number their prompts alike."""
        if not self.model.training:
            return 0
        self._generations += 1
        steps = (self.args.steps_per_generation or 1) * self.num_iterations
        together = math.ceil(self.args.gradient_accumulation_steps / steps) + 1
        return (self._generations % together) * (self.args.generation_batch_size or 0)

    def _calculate_rewards(self, *args: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args)
        if self.objective.placement == "reward":  # what no reward could score is not scored by its KL alone
            kl = next(i for i, reward in enumerate(self.reward_funcs) if isinstance(reward, KLReward))
            others = torch.cat([rewards[:, :kl], rewards[:, kl + 1 :]], 1)
            rewards[others.isnan().all(1), kl] = torch.nan
        return rewards

    def _delayed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Put the fresh batch at the end of the queue, and take the oldest, once it is old enough.

        Until then the first batch is trained on again: there is none other that is older.
        """
        if "old_per_token_logps" not in batch:
            batch["old_per_token_logps"] = self.score(self.model, batch)
        self._lagging.append(batch)
        steps = (self.args.steps_per_generation or 1) * self.num_iterations
        generations = math.ceil(self.args.rollout_lag * self.args.gradient_accumulation_steps / steps)
        return self._lagging[0] if len(self._lagging) <= generations else self._lagging.popleft()

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self.args.kl_baseline != "leave_one_out":
            return super()._prepare_inputs(generation_batch)
        with groups_together():
            return super()._prepare_inputs(generation_batch)

    # The loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.objective.placement == "reward":
            return super()._compute_loss(model, inputs)
        with checked_at_the_end():
            return self._loss(model, inputs)

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        group = self._group(inputs)  # asked for before the device has a queue
        seen = self._forward(model, inputs)
        rollout, own = self._rollout(seen, inputs, group)
        self.check_start(rollout)
        term = self.objective.term
        if term is not None and not self.model.training:  # a value has no use for a baseline, nor a last row for peers
            term = replace(term, baseline="none")
        result = None if term is None else term(rollout)
        given, beta = inputs, self.coefficient.value
        if self.objective.placement == "advantage" and result is not None:
            advantages = inputs["advantages"]
            advantages = advantages[:, None] if advantages.dim() == 1 else advantages
            given = {**inputs, "advantages": advantages - beta * _own(result.coefficient, own, seen.logp)}
        per_token = None if result is None else self._per_token(seen, rollout, result, own)
        by_trl = None
        if per_token is not None and self.objective.reduction == "policy":
            by_trl = beta * per_token
            given = {**given, "ref_per_token_logps": seen.logp.detach()}  # TRL's own KL, which is dropped, needs one
        with self.answering(seen), inserted(self, by_trl):
            loss = super()._compute_loss(model, given)
        if by_trl is None:
            loss = loss + beta * self._summed(rollout, per_token)
        self._unrecorded = (rollout, group, result)
        if not self.model.training:
            self._record(last=not self.evaluating)
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's; what is logged of the KL is computed while the device is still at the backward pass."""
        try:
            loss = super().training_step(*args, **kwargs)
            self._record(last=self.accelerator.sync_gradients)
        finally:
            self._unrecorded = None  # it holds the graph, which a step that failed must not keep
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; what is logged of the KL is that of the whole evaluation, and not a mean over its batches."""
        self.evaluating, self._evaluated, self.windows["eval"] = True, 0, metrics.Window()
        try:
            found = super().evaluation_loop(*args, **kwargs)
            metrics.finish(self, "eval")
        finally:
            self.evaluating = False
        return found

    def _record(self, *, last: bool) -> None:
        if self._unrecorded is not None:
            metrics.record(self, *self._unrecorded, last=last)
        self._unrecorded = None

    def _per_token(self, seen: Seen, rollout: Rollout, result: KLResult, own: slice) -> Tensor | None:
        """(B, T): in value the KL, in gradient what the term declares; None where the advantages have all of it."""
        per_token = _own(result.per_token, own, seen.logp)
        if self.objective.placement == "advantage":
            if not self.objective.exact:
                return None
            return per_token - _own(result.coefficient, own, seen.logp) * (seen.logp - seen.logp.detach())
        return per_token + _own(token_values(rollout), own, seen.logp)

    def _summed(self, rollout: Rollout, per_token: Tensor | None) -> Tensor | float:
        """Over each completion, averaged over completions; or the whole loss that a cell is."""
        accumulation = self.current_gradient_accumulation_steps if self.model.training else 1
        if self.objective.cell is not None:
            # A cell is a mean over the completions of all processes, of which only this one's carry a gradient.
            # Gradients and logged losses are averaged over processes: the gradient has to be larger by their number,
            # and the value must not be.
            value = self.objective.cell(rollout) / accumulation
            return value + (self.accelerator.num_processes - 1) * (value - value.detach())
        return 0.0 if per_token is None else per_token.sum() / (len(per_token) * accumulation)

    def check_start(self, rollout: Rollout) -> None:
        """Once, on the first completions that are trained on."""
        if not self._checked_start and self.model.training:
            self._checked_start = True
            check_start(self, rollout)

    def _group(self, inputs: dict[str, Any]) -> Tensor:
        """(B,) which prompts all processes' completions of this step are of; on the CPU, where to look is free."""
        return everywhere(self.accelerator, {"group": inputs["group"]})[0]["group"].cpu()

    def _rollout(self, seen: Seen, inputs: dict[str, Any], group: Tensor) -> tuple[Rollout, slice]:
        """All processes' completions of this step, and which of its rows carry a gradient here."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        exact = seen.exact
        local = {
            "logp": seen.logp,
            "ref_logp": inputs["ref_per_token_logps"] if exact is None else exact.ref_logp,
            "mask": mask,
            "behavior_logp": self._behavior(seen.logp.detach(), inputs),
            "token_reverse_kl": None if exact is None else exact.reverse_kl,
            "token_forward_kl": None if exact is None else exact.forward_kl,
        }
        tensors, own = everywhere(self.accelerator, local)
        tensors["mask"] = tensors["mask"].bool()
        peers = with_peers(group) if self.args.kl_baseline == "leave_one_out" or self.objective.cell else None
        return Rollout(**tensors, group=peers), own

    def _behavior(self, logp: Tensor, inputs: dict[str, Any]) -> Tensor | None:
        """Log-probs of what really sampled, where that is told or asked for."""
        behavior = inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps"))
        if behavior is None:  # generation and update are aligned: π itself sampled
            weighed = self.objective.term is not None and self.objective.term.weighting is not None
            return logp if weighed else None
        return torch.where(behavior.isnan(), logp, behavior)

    # Forward passes

    def score(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Log-probs of completions by any of the models, without gradient, in batches that fit."""
        with torch.no_grad():
            return self._sampled(model, batch, batch_size=self.args.per_device_train_batch_size)[0]

    def _forward(self, model: Any, batch: dict[str, Any]) -> Seen:
        if not self.objective.exact:
            how = {"compute_entropy": True, "compute_aux_loss": self.aux_loss_enabled}
            return Seen(*self._sampled(model, batch, **how))
        refuse_images(batch.get("pixel_values") is not None, "kl_estimator='exact'")
        given = Completions.of(batch)
        if not self._checked_head:
            self._checked_head = True
            check_head(self, model, given)
        if self.objective.top_k is None:
            found = exact_statistics(self, model, given)
        else:
            found, best = top_k_statistics(self, model, given, self.objective.top_k)
            behavior = self._behavior(found.logp.detach(), batch)
            found = with_top_k_kl(found, best, self.objective, given.mask, behavior)
        return Seen(found.logp, found.entropy, None, found)

    def _sampled(self, model: Any, batch: dict[str, Any], **how: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        given = Completions.of(batch)
        extra = {name: batch.get(name) for name in MULTIMODAL if batch.get(name) is not None}
        return super()._get_per_token_logps_and_entropies(model, given.ids, given.attention, given.keep, **extra, **how)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._answer is not None:
            seen = self._answer
            entropy = torch.zeros_like(seen.logp) if seen.entropy is None else seen.entropy
            return seen.logp, entropy, seen.aux_loss
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    @contextmanager
    def answering(self, seen: "Seen | Tensor") -> Iterator[None]:
        """While TRL computes a loss, give it these log-probs instead of a second forward pass."""
        self._answer = seen if isinstance(seen, Seen) else Seen(seen, None, None)
        try:
            yield
        finally:
            self._answer = None


MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""What `_get_per_token_logps_and_entropies` takes beside text."""


def token_values(rollout: Rollout) -> Tensor:
    """(B, T) what the KL adds to the loss in value, detached: exact, or k3, on what sampled the tokens."""
    if rollout.token_reverse_kl is not None:
        return rollout.token_reverse_kl.detach()
    value = k3.value(rollout.log_ratio)
    return value if rollout.behavior_logp is None else value * token_ratio(rollout)


def _own(x: Tensor, own: slice, like: Tensor) -> Tensor:
    """This process' rows, cut to the length that they had before all processes' were padded to one."""
    return x[own, : like.shape[1]]


def _listed(reward_funcs: Any) -> list[Any]:
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]


def _warn_of_deviations(args: KLConfig) -> None:
    told = [f"scale_rewards={args.scale_rewards!r}"] if args.scale_rewards not in (False, "none") else []
    if args.multi_objective_aggregation != "sum_then_normalize":
        told = [f"multi_objective_aggregation={args.multi_objective_aggregation!r}"]
    if told:
        warnings.warn(
            f"kl_placement='reward' with {told[0]}: a standard deviation divides the KL too, so that β differs from "
            "prompt to prompt; kl_placement='advantage' keeps its meaning",
            stacklevel=3,
        )

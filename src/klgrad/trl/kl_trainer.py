"""`KLTrainer`: TRL's `GRPOTrainer` with a declared KL term; everything else is TRL's."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from ..core.result import KLResult
from ..core.rollout import Rollout, checked_at_the_end
from ..core.term import KLTerm
from ..errors import RunError
from ..models.resolve import resolve_embedded
from ..trainer_parts.adaptive_beta import AdaptiveCoefficient
from .checkpointed import Parts
from .config import KLConfig
from .declaration import declared
from .gather import everywhere
from .groups import PromptNumbers, shuffled_by_group
from .kl_reward import KLReward, check_weights, listed, no_reward
from .lag import LagQueue
from .loss_terms import own_rows, per_token_cell, per_token_loss, summed_loss, whole_cell
from .metrics import KLMetrics
from .sanity import StartCheck, check_built, check_prompts
from .scorer import Scorer
from .seam import batch as scored
from .seam.batch import Batch
from .seam.checkpoints import checkpoint_folder
from .seam.contract import check_contract
from .seam.forward import PreparedAnswer
from .seam.generation import Sampled, shuffled_by
from .seam.loss import add_to_loss, reference_is_built, reference_is_scored
from .seam.state import GenerationState, LossSinceLog, current_mode, log_metrics
from .state_files import load_parts, save_parts
from .teacher import as_reference, has_reference

START_AGAIN = "start again with kl_coef, without completions that wait (rollout_lag) and with all counts at 0"
"""What a run does that has no state to continue from."""


class KLTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose KL term is a `KLTerm`, or any loss of `klgrad.zoo`.

    TRL's `beta` is 0 except while TRL builds and scores the reference, so that adapters, FSDP and DeepSpeed are handled
    by TRL's own code, and while TRL adds the KL to its loss, when it stands for our term (`seam/loss.py`).

    Args:
        model: the policy, or its name; `smollm2` is embedded, and needs no network.
        reward_funcs: one reward function or a list of them, as TRL takes them; None trains by the KL alone.
        args: a `KLConfig`.
        kl: the KL term. Fields of `args` that describe a term must then be at their defaults or agree with it.
        kwargs: the further arguments of `GRPOTrainer`: `train_dataset`, `processing_class`, `peft_config`, ...

    Attributes:
        objective: the term and where it is placed.
        coefficient: β.
        has_reference: whether there is a reference; there is none for kl_coef=0 and a model without a name.
        scorer: forward passes of the policy and of the reference.
        checkpointed: the parts whose state a checkpoint keeps, by name.

    Example:
        >>> from klgrad import KLTerm
        >>> from klgrad.trl import KLConfig, KLTrainer
        >>> args = KLConfig("runs/mine", kl_coef=0.02, num_generations=8, use_cpu=True, bf16=False)
        >>> trainer = KLTrainer(  # doctest: +SKIP
        ...     "Qwen/Qwen2.5-0.5B-Instruct", reward, args, kl=KLTerm(baseline="leave_one_out"), train_dataset=prompts
        ... )
        >>> trainer.train()  # doctest: +SKIP
    """

    args: KLConfig
    model: Any

    # Build

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: KLConfig | None = None,
        *,
        kl: KLTerm | None = None,
        **kwargs: Any,
    ) -> None:
        check_contract(self, KLTrainer)
        self.args = args = declared(args, kl)
        self.objective = args.objective
        self.coefficient = AdaptiveCoefficient(args.kl_coef, args.kl_target, args.kl_horizon)
        self.kl_metrics = KLMetrics(args, self.objective, self.coefficient, partial(log_metrics, self))
        self.lag_queue, self.prompt_numbers = LagQueue(args), PromptNumbers(self, args)
        self.checkpointed: Parts = {
            "generation": GenerationState(self),
            "loss": LossSinceLog(self),
            "beta": self.coefficient,
            "lengths": self.kl_metrics.lengths,
            "prompts": self.prompt_numbers,
            "lag": self.lag_queue,
        }
        self._prepared, self._check_start = PreparedAnswer(), StartCheck(self, args)
        self._last_sampled: Sampled | None = None
        self._evaluating = False
        self._restored: dict[str, Any] | None = None
        model = resolve_embedded(model)
        self.has_reference = has_reference(model, args, kwargs)
        self._build(model, reward_funcs, args, kwargs)
        check_built(self, args, self.objective)
        self.scorer = Scorer(self, args, self.objective)

    def _build(self, model: Any, reward_funcs: Any, args: KLConfig, kwargs: dict[str, Any]) -> None:
        """Let TRL set up, with a reference, and with the KL as one more reward if it is placed there."""
        own, weights = listed(reward_funcs), args.reward_weights
        check_weights(weights, own)
        rewards = own or [no_reward]
        args.reward_weights = list(weights or [1.0] * len(rewards))
        if self._has_kl_reward:
            rewards = [*rewards, KLReward()]
            args.reward_weights.append(-args.kl_coef)
        if classes := listed(kwargs.get("reward_processing_classes")):
            kwargs = {**kwargs, "reward_processing_classes": [*classes, *[None] * (len(rewards) - len(own))]}
        try:
            with reference_is_built(args, self.has_reference), as_reference(model, args, kwargs) as (named, given):
                super().__init__(named, reward_funcs=[*rewards], args=args, **given)
        finally:
            args.reward_weights = weights
        self.beta = 0.0
        if len(self.reward_funcs) > len(rewards) and no_reward in self.reward_funcs:  # an environment has a reward
            self._remove_reward(self.reward_funcs.index(no_reward))

    def _remove_reward(self, index: int) -> None:
        lists: Any = (self.reward_funcs, self.reward_func_names, self.reward_processing_classes)
        for each in lists:
            del each[index]
        self.reward_weights = torch.cat([self.reward_weights[:index], self.reward_weights[index + 1 :]])

    @property
    def _has_kl_reward(self) -> bool:
        return self.objective.placement == "reward" and self.has_reference

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        prompts: Any = self.train_dataset if dataset is None else dataset
        check_prompts(self.args, len(prompts))
        return super()._get_train_sampler(dataset)

    # Score

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        self.prompt_numbers.check(generation_batch)
        if not self.objective.needs_groups:
            return super()._prepare_inputs(generation_batch)
        with shuffled_by(shuffled_by_group):
            return super()._prepare_inputs(generation_batch)

    def _generate(self, prompts: list[Any]) -> Any:
        returned = super()._generate(prompts)
        self._last_sampled = Sampled.of(returned)
        return returned

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        by_trl = self.has_reference and not self.objective.exact and self.objective.placement != "reward"
        with reference_is_scored(self, by_trl):
            batch = super()._generate_and_score_completions(inputs)
        batch["group"] = self.prompt_numbers.of_generation(scored.row_count(batch))
        if current_mode(self) == "eval" or not self.args.rollout_lag:
            return batch
        if not scored.has_old_log_probs(batch):
            scored.keep_old_log_probs(batch, self.scorer.log_probs(self.model, batch))
        return self.lag_queue.exchange(batch)

    def _calculate_rewards(self, *args: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args)
        if self._has_kl_reward:  # a completion that no reward scored must not be scored by its KL
            scored_by_others, kl = ~rewards.isnan().all(1), self._score_sampled().to(rewards.dtype)
            rewards[:, self._kl_reward_index()] = torch.where(scored_by_others, kl, torch.nan)
        return rewards

    def _score_sampled(self) -> Tensor:
        """(B,) log π - log ref of each completion that TRL has just sampled, of all processes; recorded here too."""
        assert self._last_sampled is not None  # TRL samples before it scores
        rollout = self.scorer.sampled_rollout(self._last_sampled)
        rows = len(rollout.mask) // self.accelerator.num_processes
        group, _ = everywhere(self.accelerator, {"group": self.prompt_numbers.of_rows(rows)})
        self._check_start(rollout)
        # The β of these completions; recording them may change it for the next.
        self.reward_weights[self._kl_reward_index()] = -self.coefficient.value
        self.kl_metrics.record(current_mode(self), rollout, group["group"], None, last=not self._evaluating)
        return rollout.log_ratio.sum(-1)

    def _kl_reward_index(self) -> int:
        return next(i for i, reward in enumerate(self.reward_funcs) if isinstance(reward, KLReward))

    # Loss

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        if self.objective.placement == "reward" or not self.has_reference:
            return super()._compute_loss(model, inputs)
        with checked_at_the_end():
            return self._loss_with_kl(model, inputs)

    def _loss_with_kl(self, model: Any, batch: Batch) -> Tensor:
        group = self._gathered_groups(batch)  # before the device has work to wait for
        passed = self.scorer.forward(model, batch)
        rollout, own = self.scorer.rollout(passed, batch, group)
        self._check_start(rollout)
        result = self._evaluated_term(rollout)
        given, beta = batch, self.coefficient.value
        if self.objective.placement == "advantage" and result is not None:
            given = scored.with_lower_advantages(batch, beta * own_rows(result.coefficient, own, passed.logp))
        per_token = self._per_token(rollout, result, own, passed.logp)
        by_trl = None
        if per_token is not None and self.objective.reduction == "policy":
            by_trl = beta * per_token
            given = scored.with_any_reference(given, passed.logp)
        with self._prepared.prepared(passed, model, batch), add_to_loss(self, by_trl):
            loss = super()._compute_loss(model, given)
        if by_trl is None:
            loss = loss + beta * self._summed(rollout, per_token)
        self.kl_metrics.hold(rollout, group, result)
        if current_mode(self) == "eval":
            self.kl_metrics.record_held("eval", last=not self._evaluating)
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        found = self._prepared.take(model, input_ids, attention_mask, logits_to_keep, kwargs)
        if found is not None:
            return found
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _gathered_groups(self, batch: Batch) -> Tensor:
        """(B,) the prompt numbers of all processes' completions; on the CPU, where reading them waits for nothing."""
        return everywhere(self.accelerator, {"group": batch["group"]})[0]["group"].cpu()

    def _evaluated_term(self, rollout: Rollout) -> KLResult | None:
        """The term's result; None for a loss of the zoo. An evaluation needs no baseline: it uses only the value."""
        term = self.objective.term
        if term is not None and current_mode(self) == "eval":
            term = replace(term, baseline="none")
        return None if term is None else term(rollout)

    def _per_token(self, rollout: Rollout, result: KLResult | None, own: slice, logp: Tensor) -> Tensor | None:
        """(B, T) what the KL adds to this process' loss; None if it is not a loss per token."""
        cell = self.objective.cell
        if cell is not None:
            # An evaluation may have one completion per prompt, and only its reward and KL are of interest.
            left_out = cell.compares_completions and current_mode(self) == "eval"
            return None if left_out else per_token_cell(cell, rollout, own, logp)
        assert result is not None  # there is a term where there is no cell
        return per_token_loss(self.objective, rollout, result, own, logp)

    def _summed(self, rollout: Rollout, per_token: Tensor | None) -> Tensor | float:
        accumulation = self.current_gradient_accumulation_steps if current_mode(self) == "train" else 1
        cell = self.objective.cell
        if cell is not None and cell.per_token is None:
            return whole_cell(cell, rollout, accumulation, self.accelerator.num_processes)
        return summed_loss(per_token, accumulation)

    # Checkpoint

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._save_parts(checkpoint_folder(self, trial))

    def _save_parts(self, folder: Path) -> None:
        try:
            save_parts(self, folder)
        except RunError as error:  # completions with more than tensors and plain data: the weights are saved
            warnings.warn(f"a run that resumes from {folder.name} will {START_AGAIN}: {error}", stacklevel=2)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_parts(Path(checkpoint))

    def _load_parts(self, folder: Path) -> None:
        try:
            self._restored = load_parts(self, folder)
        except RunError as error:  # of another trainer, or of another number of processes: the weights are of use
            warnings.warn(f"this run will {START_AGAIN}: {error}", stacklevel=2)

    def restore_logged(self) -> None:
        """Set again what `Trainer` has reset between loading the checkpoint and the first step."""
        if self._restored is not None:
            self.checkpointed["loss"].load_state_dict(self._restored["loss"])
            self._restored = None

    # Log

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's step. The report of the KL is computed while the device still runs the backward pass."""
        self.restore_logged()
        try:
            loss = super().training_step(*args, **kwargs)
            self.kl_metrics.record_held(current_mode(self), last=self.accelerator.sync_gradients)
        finally:
            self.kl_metrics.drop_held()  # a step that failed must not keep its graph
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's loop. The KL is reported for the whole evaluation, and not as a mean over its batches."""
        self._evaluating = True
        self.prompt_numbers.begin_evaluation()
        self.kl_metrics.restart("eval")
        try:
            found = super().evaluation_loop(*args, **kwargs)
            self.kl_metrics.finish("eval")
        finally:
            self._evaluating = False
        return found

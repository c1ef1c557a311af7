"""`KLTrainer`: TRL's `GRPOTrainer` with a declared KL term; everything else is TRL's."""

import math
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer

from ..core.estimators import k3
from ..core.result import KLResult
from ..core.rollout import Rollout, checked_at_the_end
from ..core.term import KLTerm
from ..errors import KernelInputError, MeaningError, RunError
from ..integrations import lend, refuse_if, token_values
from ..models import resolve_embedded
from ..support import Json, Model
from . import compat
from .compat import OLD_LOGP, REF_LOGP, Batch, ContractError, Pass, Result, Rows, current_mode
from .config import KLConfig, TRLObjective, resolve_config, teachers_of
from .contract import avoid_cudnn_attention, check_contract
from .metrics import LENGTH, KLMetrics, warn_of_collapse
from .scorer import Scorer, gather_rows, shuffle_groups

# The KL as parts of a loss: per token, for TRL to reduce, or summed.


def local_rows(x: Tensor, rows: slice, like: Tensor) -> Tensor:
    """This process' rows, cut to the length that they had before all processes' were padded to one length."""
    return x[rows, : like.shape[1]]


def per_token_loss(
    objective: TRLObjective, rollout: Rollout, result: KLResult, own: slice, logp: Tensor
) -> Tensor | None:
    """(B, T) the KL in value and the declared term in gradient, for each token of this process; None without one.

    The advantages carry the whole term then. `own` are this process' rows of the rollout, which has those of all
    processes; `logp` are its log-probs, with their gradient.
    """
    per_token = local_rows(result.per_token, own, logp)
    if objective.placement == "advantage":
        if objective.term is None or objective.term.estimator != "exact":
            return None
        return per_token - local_rows(result.coefficient, own, logp) * (logp - logp.detach())
    assert objective.term is not None  # whose result this is
    return per_token + local_rows(token_values(objective.term, rollout), own, logp)


# The KL as a reward function of TRL's, and the reward of a run that has none.


def no_reward(completions: list[object], **_: object) -> list[float | None]:
    """0 for every completion: the KL is the whole objective, as in distillation."""
    return [0.0] * len(completions)


class KLReward:
    """The place of log π - log ref of each completion among TRL's rewards; TRL subtracts β times it.

    `KLTrainer` fills it in once TRL has called all rewards, so that TRL still sees which completions no reward scored.
    TRL logs its mean as `rewards/kl_to_reference/mean`.
    """

    __name__ = "kl_to_reference"

    def __call__(self, completions: list[object], **_: object) -> list[None]:
        return [None] * len(completions)


def as_list(given: Any) -> list[Any]:
    """Reward functions or their processing classes as a list, which is empty for None."""
    if given is None:
        return []
    return list(given) if isinstance(given, list) else [given]


def check_weights(weights: list[float] | None, rewards: list[object]) -> None:
    """Raise `MeaningError` unless there is a weight for each reward function that was given, or none at all."""
    remedy = "give one for each;" if rewards else "leave them out: there are no `reward_funcs`, and"
    refuse_if(
        weights is not None and len(weights) != len(rewards),
        f"{len(rewards)} `reward_weights`, one for each of `reward_funcs`",
        f"{len(weights or ())}",
        f"{remedy} an environment's own reward has the weight 1",
    )


# Completions that are trained on later than they were sampled, as asynchronous training does.


class LagQueue:
    """Generation batches that wait until they are `generations` generations old; 0 for no lag."""

    def __init__(self, args: KLConfig) -> None:
        steps = (args.steps_per_generation or 1) * args.num_iterations
        self.generations = math.ceil(args.rollout_lag * args.gradient_accumulation_steps / steps)
        self._waiting: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, batch: Batch) -> None:
        """Let a batch wait."""
        self._waiting.append(batch)

    def exchange(self, fresh: Batch) -> Batch:
        """Add a batch, and return the one to train on: the oldest, once it is old enough.

        Until then the first batch is trained on again, because no other is older.
        """
        self.add(fresh)
        return self._waiting[0] if len(self._waiting) <= self.generations else self._waiting.popleft()

    def state_dict(self) -> Json:
        return {"waiting": list(self._waiting)}

    def load_state_dict(self, state: Json) -> None:
        self._waiting = deque(state["waiting"])


# The reference: whether there is one, and a teacher in its place.


def has_reference(model: Model, args: KLConfig, given: Json) -> bool:
    """Whether there is a reference: a teacher, the model without its adapters, or the model as its name loads it.

    Without one, kl_coef must be 0; a teacher and adapters are one too many.
    """
    adapters = given.get("peft_config") is not None or compat.has_adapters(model)
    refuse_if(
        adapters and args.teacher is not None,
        "a teacher without adapters on the student",
        "both",
        "with adapters the reference is the model without them: merge them, or train all weights",
    )
    if isinstance(model, str) or args.teacher is not None or adapters or model.config.name_or_path:
        return True
    refuse_if(
        args.kl_coef > 0,
        "a model with a name or a folder, from which its reference can be loaded",
        "a model object without one",
        "save it by model.save_pretrained(FOLDER), its tokenizer too, and give the folder; or set kl_coef=0",
    )
    return False


def check_tokenizers(processor: Any, teacher: str, args: KLConfig) -> None:
    """Both must have the same tokens under the same numbers; their heads may be padded to different lengths."""
    from transformers import AutoTokenizer

    ours = getattr(processor, "tokenizer", processor).get_vocab()
    theirs = AutoTokenizer.from_pretrained(teacher, trust_remote_code=args.trust_remote_code).get_vocab()
    if ours == theirs:
        return
    differing = sorted(ours.items() ^ theirs.items(), key=lambda item: item[1])
    raise KernelInputError(
        "teacher and student with one tokenizer",
        f"vocabularies of {len(theirs)} and {len(ours)} tokens; token {differing[0][1]} is not the same",
        "distil between models that share a tokenizer",
    )


# Checks before a run is trusted: settings that only a built trainer can judge, and a KL that starts at 0.

START_KL = 1e-3
"""Nats per token by which two bf16 forward passes of one model may differ, at most."""


def check_prompts(args: KLConfig, prompts: int) -> None:
    """Raise `MeaningError` for fewer prompts than one generation needs: TRL drops them, and would make no update."""
    needed = (args.generation_batch_size or 0) // (args.num_generations or 1)
    if prompts < needed:
        raise MeaningError(
            f"at least {needed} prompts, for one generation of {args.generation_batch_size} completions, "
            f"{args.num_generations} of each prompt",
            f"{prompts}",
            "not one update would be made: give more prompts, or lower per_device_train_batch_size, "
            "gradient_accumulation_steps, steps_per_generation or the number of processes, or raise num_generations",
        )


def check_built(trainer: GRPOTrainer, args: KLConfig, objective: TRLObjective) -> None:
    """Raise `MeaningError` for settings that do not fit the number of processes or the model."""
    avoid_cudnn_attention(trainer.accelerator.device)
    rows = args.per_device_train_batch_size * trainer.accelerator.num_processes
    if objective.leaves_one_out and rows < 2:
        raise MeaningError(
            "micro-batches of at least 2 completions for leave-one-out",
            f"per_device_train_batch_size={rows} on one process",
            "a completion has no peers there: raise it and lower gradient_accumulation_steps, or kl_baseline='none'",
        )
    on_process, steps = args.per_device_train_batch_size, args.steps_per_generation or 1
    if objective.compares_completions and not whole_groups(on_process, rows, steps, trainer.num_generations or 1):
        raise MeaningError(
            f"micro-batches of whole groups of {trainer.num_generations} completions for kl_cell={args.kl_cell!r}",
            f"{on_process} completions on each process, {rows} on all, in {steps} micro-batches per generation",
            "make per_device_train_batch_size a multiple of num_generations, and lower gradient_accumulation_steps "
            "instead; with steps_per_generation=1 a multiple on all processes together is enough",
        )
    if objective.exact and trainer.aux_loss_enabled:
        raise MeaningError(
            "no router loss with kl_estimator='exact'",
            f"router_aux_loss_coef={trainer.router_aux_loss_coef}",
            "set router_aux_loss_coef=0, or choose a sampled estimator",
        )


def whole_groups(each: int, rows: int, steps: int, generations: int) -> bool:
    """Whether each micro-batch, of `each` rows on a process and `rows` on all, has whole groups of `generations` rows.

    A process has adjacent rows of a generation, and cuts them into its micro-batches by itself: with more than one of
    them, a group that lies in two processes is never whole.
    """
    return each % generations == 0 or (steps == 1 and rows % generations == 0)


def check_start(rollout: Rollout) -> None:
    """Warn if the KL is not about 0 on the first completions of a run, where policy and reference are one model."""
    value = float(k3.value(rollout.log_ratio)[rollout.mask].mean()) if bool(rollout.mask.any()) else 0.0
    if value > START_KL:  # the rollout's own check reports a NaN
        warnings.warn(
            f"the KL to the reference is {value:.3g} nats per token before the first update, not about 0; likely "
            "causes: dropout in the policy (disable_dropout=True), an adapter that does not start at 0 or that the "
            "reference keeps, models of different dtypes, or a reference of another checkpoint than the policy",
            stacklevel=2,
        )


class KLTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose KL term is a `KLTerm`, or any loss of `klgrad.zoo`.

    TRL's `beta` is 0, so that its loss has no KL, except while TRL builds and scores the reference, so that adapters,
    FSDP and DeepSpeed are handled by TRL's own code. The log-probs that TRL's loss asks for are captured, the KL is
    computed from them, and the weights of its tokens are those that TRL would give its own (`compat.token_weights`).

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
    model: Model

    # Build

    def __init__(
        self,
        model: Model,
        reward_funcs: Any = None,
        args: KLConfig | None = None,
        *,
        kl: KLTerm | None = None,
        **kwargs: Any,
    ) -> None:
        check_contract(type(self), KLTrainer)
        self.args = args = resolve_config(args, kl)
        self.objective = args.objective
        self.coefficient = self.objective.beta()
        self.kl_metrics = KLMetrics(self.objective, self.coefficient, partial(compat.log_metrics, self))
        self.lag_queue = LagQueue(args)
        self.checkpointed: compat.Parts = {
            "trl": compat.UnsavedState(self),
            "beta": self.coefficient,
            "lag": self.lag_queue,
        }
        self._capture, self._is_begun, self._is_collapsed = compat.PassCapture(), False, False
        self._last_sampled: compat.Sampled | None = None
        self._evaluating = False
        self._restored: Json | None = None
        model = resolve_embedded(model)
        self.has_reference = has_reference(model, args, kwargs)
        self._build(model, reward_funcs, args, kwargs)
        check_built(self, args, self.objective)
        self.scorer = Scorer(self, args, self.objective, self._load_teachers(args))

    def _build(self, model: Model, reward_funcs: object, args: KLConfig, kwargs: Json) -> None:
        """Let TRL set up, with a reference, and with the KL as one more reward if it is placed there."""
        functions, weights = as_list(reward_funcs), args.reward_weights
        check_weights(weights, functions)
        rewards = functions or [no_reward]
        weights = list(weights or [1.0] * len(rewards))
        if self._has_kl_reward:
            rewards, weights = [*rewards, KLReward()], [*weights, -args.kl_coef]
        if classes := as_list(kwargs.get("reward_processing_classes")):
            kwargs = {**kwargs, "reward_processing_classes": [*classes, *[None] * (len(rewards) - len(functions))]}
        with lend(args, reward_weights=weights, beta=float(self.has_reference and args.teacher is None)):
            super().__init__(model, reward_funcs=[*rewards], args=args, **kwargs)
        self.beta = 0.0
        if len(self.reward_funcs) > len(rewards) and no_reward in self.reward_funcs:  # an environment has a reward
            index = self.reward_funcs.index(no_reward)
            lists: Any = (self.reward_funcs, self.reward_func_names, self.reward_processing_classes)
            for each in lists:
                del each[index]
            self.reward_weights = torch.cat([self.reward_weights[:index], self.reward_weights[index + 1 :]])

    def _load_teachers(self, args: KLConfig) -> list[Model]:
        """Load the teachers; the first is the reference of TRL's code, the others are returned."""
        teachers = [resolve_embedded(path) for path in teachers_of(args.teacher).values()]
        for teacher in teachers:
            check_tokenizers(self.processing_class, teacher, args)
        references = [compat.load_reference(self, teacher, args) for teacher in teachers]
        if references:
            self.ref_model = references[0]
        return references[1:]

    @property
    def _has_kl_reward(self) -> bool:
        return self.objective.placement == "reward" and self.has_reference

    @property
    def _has_kl_loss(self) -> bool:
        return self.objective.placement != "reward" and self.has_reference

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        prompts: Any = self.train_dataset if dataset is None else dataset
        check_prompts(self.args, len(prompts))
        return super()._get_train_sampler(dataset)

    def _begin(self, rollout: Rollout) -> None:
        """Look at the first completions of training, and at no others."""
        if self._is_begun or current_mode(self) == "eval":
            return
        self._is_begun = True
        if self.state.global_step == 0 and self.args.teacher is None and self.args.teacher_prompt is None:
            check_start(rollout)

    # Score

    def _prepare_inputs(self, generation_batch: list[Json]) -> Batch:
        if not self.objective.needs_groups:
            return super()._prepare_inputs(generation_batch)
        with lend(grpo_trainer, shuffle_sequence_dict=shuffle_groups):  # which TRL calls by that name
            return super()._prepare_inputs(generation_batch)

    def _generate(self, prompts: list[object]) -> Any:
        returned: Any = super()._generate(prompts)
        self._last_sampled = compat.Sampled(*returned[: len(compat.Sampled._fields)])
        return returned

    def _generate_and_score_completions(self, inputs: list[Json]) -> Batch:
        batch = self._sampled_batch(inputs)
        if current_mode(self) == "eval" or not self.args.rollout_lag:
            return batch
        if not (self.args.rollout_lag_repeats or len(self.lag_queue)):
            for others in self._other_prompts(inputs, self.lag_queue.generations):
                self.lag_queue.add(self._sampled_batch(others))
        return self.lag_queue.exchange(batch)

    def _other_prompts(self, inputs: list[Json], generations: int) -> Iterator[list[Json]]:
        """This process's rows of as many more generations, of prompts that are drawn from the whole dataset."""
        data: Any = self.train_dataset
        group: Any = self.num_generations
        generator = torch.Generator().manual_seed(self.args.seed)
        prompts = len(inputs) * self.accelerator.num_processes // group
        first = self.accelerator.process_index * len(inputs)
        for _ in range(generations):
            drawn = torch.randint(len(data), (prompts,), generator=generator).repeat_interleave(group)
            rows = (data[i] for i in drawn[first : first + len(inputs)].tolist())
            yield [{name: row[name] for name in inputs[0]} for row in rows]

    def _sampled_batch(self, inputs: list[Json]) -> Batch:
        """What TRL samples and scores, with what the KL needs; of a lag, also the log-probs of its sampler."""
        scored = self.has_reference and not self.objective.exact and self.objective.placement != "reward"
        by_trl = self.args.teacher_prompt is None and self.args.teacher_column is None
        with lend(self, beta=float(scored and by_trl)):  # above 0, TRL scores by its reference
            batch = super()._generate_and_score_completions(inputs)
        self.scorer.add_teachers(batch, inputs)
        if scored and not by_trl:
            batch = {**batch, REF_LOGP: self.scorer.reference_log_probs(batch)}
        batch["group"] = self.scorer.groups(batch)
        if self.args.rollout_lag and current_mode(self) == "train" and OLD_LOGP not in batch:
            batch[OLD_LOGP] = self.scorer.log_probs(self.model, batch)
        return batch

    def _calculate_rewards(
        self, inputs: object, prompts: object, completions: object, completion_ids_list: Rows, *args: object
    ) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list, *args)
        if self._has_kl_reward:  # a completion that no reward scored must not be scored by its KL
            scored_by_others, kl = ~rewards.isnan().all(1), self._score_sampled(completion_ids_list).to(rewards.dtype)
            rewards[:, self._kl_reward_index()] = torch.where(scored_by_others, kl, torch.nan)
        return rewards

    def _score_sampled(self, completion_ids: list[list[int]]) -> Tensor:
        """(B,) log π - log ref of each completion that TRL has just sampled, of all processes; recorded here too."""
        assert self._last_sampled is not None  # TRL samples before it scores
        rollout = self.scorer.sampled_rollout(self._last_sampled)
        assert rollout.group is not None  # of the prompts that were sampled
        self._begin(rollout)
        # The β of these completions; recording them may change it for the next.
        self.reward_weights[self._kl_reward_index()] = -self.coefficient.value
        self.kl_metrics.record(current_mode(self), rollout, rollout.group, None, last=not self._evaluating)
        return rollout.log_ratio.sum(-1)

    def _kl_reward_index(self) -> int:
        return next(i for i, reward in enumerate(self.reward_funcs) if isinstance(reward, KLReward))

    # Loss

    def _compute_loss(self, model: Model, inputs: Batch) -> Tensor:
        if not self._has_kl_loss:
            return super()._compute_loss(model, inputs)
        with checked_at_the_end():
            return self._loss_with_kl(model, inputs)

    def _loss_with_kl(self, model: Model, batch: Batch) -> Tensor:
        """TRL's loss without a KL, and the KL of the log-probs that it asked for."""
        # On the CPU, where reading the groups waits for nothing, and before the device has work to wait for.
        group = gather_rows(self.accelerator, {"group": batch["group"]})[0]["group"].cpu()
        lent, captured = dict(batch), list[tuple[Tensor, Rollout, slice, KLResult | None]]()
        in_advantages = self.objective.placement == "advantage" and self.objective.term is not None
        if in_advantages:
            del lent["advantages"]  # so that TRL cannot read them before the KL is subtracted

        def answer(own: Pass) -> Result:
            passed = self.scorer.forward(model, batch, own)
            rollout, rows = self.scorer.rollout(passed, batch, group)
            self._begin(rollout)
            if (term := self.objective.term) is not None and current_mode(self) == "eval":
                term = replace(term, baseline="none")  # an evaluation uses only the value
            result = None if term is None else term(rollout)
            if in_advantages and result is not None:
                by = self.coefficient.value * local_rows(result.coefficient, rows, passed.logp)
                advantages = batch["advantages"]  # perhaps one number per completion
                lent["advantages"] = (advantages[:, None] if advantages.dim() == 1 else advantages) - by
            captured.append((passed.logp, rollout, rows, result))
            return passed.logp, passed.entropy, passed.aux_loss

        try:
            with self._capture.answer(model, answer):
                loss = super()._compute_loss(model, lent)
        except KeyError as error:
            if captured:
                raise
            raise ContractError("a loss of TRL's that reads `advantages` after its forward pass", f"{error}") from error
        [(logp, rollout, rows, result)] = captured
        per_token = self._per_token(rollout, result, rows, logp)
        loss = loss + self.coefficient.value * self._reduced(model, batch, rollout, per_token)
        self.kl_metrics.held = rollout, group, result
        if current_mode(self) == "eval":
            self.kl_metrics.record_held("eval", last=not self._evaluating)
        return loss

    def _get_per_token_logps_and_entropies(self, model: Model, *args: object, **kwargs: object) -> Result:
        forward = partial(super()._get_per_token_logps_and_entropies, model, *args, **kwargs)
        return self._capture(model, forward)

    def _per_token(self, rollout: Rollout, result: KLResult | None, own: slice, logp: Tensor) -> Tensor | None:
        """(B, T) what the KL adds to this process' loss; None if it is not a loss per token."""
        cell = self.objective.cell
        if cell is not None:
            # An evaluation may have one completion per prompt, and only its reward and KL are of interest.
            left_out = cell.compares_completions and current_mode(self) == "eval"
            return None if left_out or cell.per_token is None else local_rows(cell.per_token(rollout), own, logp)
        assert result is not None  # there is a term where there is no cell
        per_token, gamma = per_token_loss(self.objective, rollout, result, own, logp), self.objective.prefix_weight
        if per_token is None or not gamma:
            return per_token
        size = rollout.log_ratio.abs()
        total = size.sum(-1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)
        share = 1 - (size.cumsum(-1) - size) / total  # of a completion's Σ|l|, at the token or after it
        return per_token * local_rows(1 + gamma * share, own, logp)

    def _reduced(self, model: Model, batch: Batch, rollout: Rollout, per_token: Tensor | None) -> Tensor | float:
        """What the KL adds to this process' loss: reduced as TRL reduces its own, or summed over completions."""
        if per_token is not None and self.objective.reduction == "policy":
            return (compat.token_weights(self, self._capture, model, batch, per_token) * per_token).sum()
        accumulation = self.current_gradient_accumulation_steps if current_mode(self) == "train" else 1
        cell = self.objective.cell
        if cell is not None and cell.per_token is None:
            value = cell(rollout) / accumulation
            # Only this process' rows carry a gradient, and gradients and logged losses are averaged over processes: so
            # the gradient is multiplied by their number, and the value is not.
            return value + (self.accelerator.num_processes - 1) * (value - value.detach())
        return 0.0 if per_token is None else per_token.sum() / (len(per_token) * accumulation)

    # Checkpoint

    def _save_checkpoint(self, model: Model, trial: object) -> None:
        super()._save_checkpoint(model, trial)
        self._save_parts(compat.checkpoint_folder(self, trial))

    def _save_parts(self, folder: Path) -> None:
        compat.save_parts(self, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_parts(Path(checkpoint))

    def _load_parts(self, folder: Path) -> None:
        try:
            self._restored = compat.load_parts(self, folder)
        except (RunError, UnpicklingError) as error:
            # Of another trainer or number of processes, or with images among the completions: the weights are of use.
            start_again = "start again with kl_coef, without completions that wait (rollout_lag), all counts at 0"
            warnings.warn(f"this run will {start_again}: {error}", stacklevel=2)

    # Log

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's log, with one warning if completions become much shorter while the KL falls."""
        super().log(logs, *args, **kwargs)
        if LENGTH in logs and not self._is_collapsed:
            first = next(row for row in self.state.log_history if LENGTH in row)
            self._is_collapsed = warn_of_collapse(first, logs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's step. The report of the KL is computed while the device still runs the backward pass."""
        if self._restored is not None:
            for name, part in self.checkpointed.items():
                part.load_state_dict(self._restored[name])
            self._restored = None
        try:
            loss = super().training_step(*args, **kwargs)
            if self._has_kl_loss and self.kl_metrics.held is None:
                raise ContractError("a training step of TRL's that calls _compute_loss", "one that does not")
            self.kl_metrics.record_held(current_mode(self), last=self.accelerator.sync_gradients)
        finally:
            self.kl_metrics.held = None  # a step that failed must not keep its graph
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's loop. The KL is reported for the whole evaluation, and not as a mean over its batches."""
        self._evaluating = True
        self.kl_metrics.restart("eval")
        try:
            output = super().evaluation_loop(*args, **kwargs)
            self.kl_metrics.finish("eval")
        finally:
            self._evaluating = False
        return output

"""TRL: its own `GRPOTrainer`, `RLOOTrainer` and `DistillationTrainer`, from sampled completions to the loss.

A real trainer is built for each setting, with models that return given log-probs (`trl_model`). The reference returns
`ref_logp`. The policy returns `behavior_logp` when a batch is scored, since that policy sampled it, and `logp` in the
loss. Only `_generate_single_turn` is replaced: it returns the audited completions; one that fills all columns of the
batch counts as truncated. Log-probs, rewards, the KL in the reward, baselines, normalisation, clipping and reduction
are TRL's. Rewards are 0, or the advantage of the completion in an audit with random advantages. TRL's head computes
log-probs in float32: for the verdict its code runs in float64, and for the float32 probes it runs unchanged.

With `use_vllm` the sampler is another program: it reports `behavior_logp`, and the policy returns `logp` at scoring
too, as in training that uses each batch once. vLLM itself is not called.

Left out, because they act on the policy loss or on the advantages, and the KL is added afterwards (tested):
`epsilon`, `epsilon_high`, `delta`, `off_policy_mask_threshold`, `top_entropy_quantile`, `scale_rewards`, the constants
of sapo and vespo, the bounds of vLLM's ratio, and `importance_sampling_level` without bias correction. RLOO's
`reward_clip_range` is applied before the KL; its `epsilon` has an effect off-policy only, where its KL is stale anyway.
`temperature` divides the logits of both models, so the KL is that of the policies at that temperature (tested).
An entropy bonus has a gradient of its own; `sync_ref_model` moves the reference between updates.

`DistillationTrainer` is described in `trl_distillation`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import zoo
from ..audit import Subject
from ..audit.batch import Batch
from .trl_stage import (
    WORDS,
    at_leaves,
    completion,
    distillation_stage_of,
    give_exact_kl,
    in_float64,
    offline,
    one_thread,
    prompt,
    quietly,
    restore_accelerate,
    saved_model,
    tokenizer,
    with_given_log_probs,
)

if TYPE_CHECKING:
    from ..trl import KLConfig


# pyright: reportPrivateImportUsage=false
# (the package exports its names lazily, which type checkers do not see)


BETA = 1.0

DISTILLATION_BETAS = (1.0, 0.5, 0.0)
"""What `DistillationTrainer`'s β selects: reverse KL, which is its default; Jensen-Shannon divergence; forward KL."""

TOKEN_MEANS = ("dapo", "bnpo", "cispo", "vespo")
"""Loss types that average over the tokens of the batch: a mean over groups only if all groups have as many tokens."""


def subjects() -> list[Subject]:
    """GRPO: all combinations of what interacts with the KL. Then all other settings, one at a time."""
    ratios = (("token", True), ("token", False), ("sequence", True))
    in_full = [
        grpo(loss_type=kind, importance_sampling_level=level, use_bias_correction_kl=correction)
        for kind, (level, correction) in product(("dapo", "grpo", "dr_grpo", "luspo"), ratios)
    ]
    modes = ("sequence_truncate", "token_mask", "token_truncate")
    return [
        *in_full,
        *(grpo(loss_type=kind) for kind in ("bnpo", "cispo", "vespo", "sapo")),
        grpo(loss_type="dr_grpo", mask_truncated_completions=True),
        grpo(loss_type="dr_grpo", use_vllm=True),
        *(grpo(loss_type="dr_grpo", use_vllm=True, vllm_importance_sampling_mode=mode) for mode in modes),
        grpo(loss_type="dr_grpo", use_vllm=True, vllm_importance_sampling_correction=False),
        rloo(normalize_advantages=False),
        rloo(normalize_advantages=True),
        rloo(normalize_advantages=False, mask_truncated_completions=True),
        rloo(normalize_advantages=False, use_vllm=True),
        *(distillation(beta=beta) for beta in DISTILLATION_BETAS),
    ]


def grpo(**settings: Any) -> Subject:
    """A `GRPOTrainer` with these settings, and TRL's defaults otherwise."""
    return _subject("grpo", settings, stacks=True)


def rloo(**settings: Any) -> Subject:
    """An `RLOOTrainer` with these settings, and TRL's defaults otherwise."""
    # Normalised advantages share the mean and standard deviation of the batch.
    return _subject("rloo", settings, stacks=not settings["normalize_advantages"])


def distillation(**settings: Any) -> Subject:
    """A `DistillationTrainer` whose teacher is the reference, with these settings, and TRL's defaults otherwise."""
    return _subject("distillation", settings, stacks=True)


def declared(**settings: Any) -> Subject:
    """This package's `KLTrainer` on TRL, at β = 1, with these settings."""
    normalised = settings.get("scale_rewards") == "batch" or "multi_objective_aggregation" in settings
    in_reward = settings.get("kl_placement") == "reward"
    cell = settings.get("kl_cell")
    # A standard deviation of the batch divides the KL of all groups, and some losses of the zoo compare groups.
    couples = (normalised and in_reward) or (cell is not None and zoo.get(cell).couples_groups)
    return _subject("klgrad", {"kl_coef": 1.0, **settings}, stacks=not couples)


def _subject(kind: str, settings: dict[str, Any], stacks: bool) -> Subject:
    def loss(batch: Batch) -> Tensor:
        chosen = tuple(settings.items())
        if kind == "distillation":
            return distillation_stage_of(chosen).loss(batch)
        return stage_of(kind, batch.group_size, chosen).loss(batch)

    def mean_over_groups(batch: Batch) -> Tensor:
        parts = _by_token_count(batch)
        return torch.stack([loss(part) * len(part.mask) / len(batch.mask) for part in parts]).sum()

    couples = settings.get("loss_type", "dapo" if kind != "rloo" else None) in TOKEN_MEANS  # distillation too
    name = " ".join([f"trl {kind}", *(f"{key}={value}" for key, value in settings.items())])
    return Subject(
        name,
        "framework",
        mean_over_groups if couples else loss,
        framework="trl",
        stacks=stacks,
        exchangeable=True,
        on_large_batch=loss,
    )


def _by_token_count(batch: Batch) -> Iterator[Batch]:
    """Batches of the groups with equally many tokens, in which a mean over tokens does not couple the groups."""
    count = batch.mask.sum(-1).view(-1, batch.group_size).sum(-1).repeat_interleave(batch.group_size)
    for tokens in count.unique():
        yield Batch(**{field.name: getattr(batch, field.name)[count == tokens] for field in fields(batch)})


class Stage:
    """A trainer whose models, sampler and rewards return the values of the audited batch."""

    def __init__(self, kind: str, group_size: int, settings: dict[str, Any]) -> None:
        self.trainer = trainer = build(kind, group_size, lambda completions, **_: self.rewards, **settings)
        trainer._generate_single_turn = self._generate
        self.policy = with_given_log_probs(trainer.model)
        # Without a KL, TRL has no reference.
        self.reference = with_given_log_probs(trainer.ref_model) if trainer.ref_model is not None else None
        self.reports_logp = kind != "rloo"
        self.is_exact = kind == "klgrad" and trainer.objective.exact
        if kind == "klgrad":  # the audited policies are not at the reference, as a model is before its first update
            trainer._check_start = lambda rollout: None
        self.completions: list[list[int]] = []
        self.sampled_logp: list[list[float]] = []
        self.rewards: list[float] = []

    def loss(self, batch: Batch) -> Tensor:
        """Score the groups of completions and compute the loss, by the methods of the trainer."""
        from trl.kernels import chunked_logprob

        restore_accelerate()
        self._take(batch)
        with one_thread(), in_float64(chunked_logprob) if batch.logp.dtype == torch.float64 else nullcontext():
            self.policy.logp = batch.logp if self.trainer.use_vllm else batch.behavior_logp
            if self.reference is not None:
                self.reference.logp = batch.ref_logp
            rows = [{"prompt": prompt(row)} for row in range(len(batch.logp))]
            scored = self.trainer._generate_and_score_completions(rows)
            self.policy.logp = batch.logp
            loss = self.trainer._compute_loss(self.trainer.model, scored)
            return at_leaves(loss, batch.leaves)

    def _take(self, batch: Batch) -> None:
        rows, columns = batch.logp.shape
        if self.is_exact:
            give_exact_kl(self.trainer, batch)
        self.trainer.max_completion_length = columns
        self.trainer.args.per_device_train_batch_size = rows
        lengths = batch.mask.sum(-1).tolist()
        self.completions = [completion(n, ended=n < columns) for n in lengths]
        self.sampled_logp = [logp[:n] for logp, n in zip(batch.behavior_logp.tolist(), lengths, strict=True)]
        self.rewards = batch.advantages[:, 0].tolist()

    def _generate(self, *_: Any, **__: Any) -> Any:
        return (self.completions, self.sampled_logp) if self.reports_logp else self.completions


@cache
def stage_of(kind: str, group_size: int, settings: tuple[tuple[str, Any], ...]) -> Stage:
    """The trainer with these settings; built once."""
    return Stage(kind, group_size, dict(settings))


def build(
    kind: str, group_size: int, rewards: Any, words: tuple[str, ...] = WORDS, use_vllm: bool = False, **settings: Any
) -> Any:
    """A real trainer, with a tiny Llama over these words; the kind `klgrad` is this package's own."""
    from datasets import Dataset

    trainer_class, config_class = _classes(kind)
    if kind != "klgrad":
        settings = {"beta": BETA, **settings}
    with quietly(), offline(), one_thread():
        folder = saved_model(words)
        config = config_class(
            output_dir=folder,
            per_device_train_batch_size=group_size,
            num_generations=group_size,
            # 2, so that the trainer keeps the log-probs at sampling.
            num_iterations=1 if use_vllm else 2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            **settings,
        )
        trainer = trainer_class(
            model=folder,
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [words[-1]] * group_size}),
            processing_class=tokenizer(words),
        )
    trainer.use_vllm = use_vllm  # in the configuration it would start vLLM
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop
    return trainer


def _classes(kind: str) -> tuple[Any, Any]:
    import trl

    if kind == "klgrad":
        from ..trl import KLConfig, KLTrainer

        return KLTrainer, KLConfig
    return {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}[kind]


# TRL: the whole policy losses of its own `GRPOTrainer` and `RLOOTrainer`, without a KL, as is TRL's default.
#
# The trainers are built as in `trl`. A call has the whole batch, so that the statistics of TRL's batch are those of the
# limit of large batches.

TYPES = ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "vespo")
MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")


def policy_losses() -> list[Subject]:
    """Every type of loss, and every correction for a sampler that is another program (vLLM)."""
    sampled = {"loss_type": "dr_grpo", "scale_rewards": "none", "use_vllm": True}
    return [
        *(policy_loss("grpo", loss_type=kind) for kind in TYPES),
        policy_loss("grpo", loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
        policy_loss("grpo", loss_type="dr_grpo", scale_rewards="none"),
        *(policy_loss("grpo", **sampled, vllm_importance_sampling_mode=mode) for mode in MODES),
        policy_loss("grpo", **sampled, vllm_importance_sampling_correction=False),
        policy_loss("rloo", normalize_advantages=False),
    ]


def policy_loss(kind: str, **settings: Any) -> Subject:
    """The loss of a trainer with these settings, without a KL, and TRL's defaults otherwise."""

    def loss(batch: Batch) -> Tensor:
        return stage_of(kind, batch.group_size, (("beta", 0.0), *settings.items())).loss(batch)

    name = " ".join([f"trl {kind}", *(f"{key}={value}" for key, value in settings.items())])
    return Subject(name, "framework", loss, framework="trl")


# Which settings of a run an audit of its trainer needs.

KL_FIELDS_LEFT_OUT = ("kl_coef", "kl_target", "kl_target_unit", "kl_horizon", "kl_memory")
"""β, which is 1 in an audit, what adapts it, and a setting of memory."""

TRL_FIELDS = (
    "loss_type", "scale_rewards", "multi_objective_aggregation", "importance_sampling_level", "epsilon", "epsilon_high",
    "delta", "use_vllm", "sapo_", "vespo_", "vllm_importance_sampling_",
)  # fmt: skip
"""Settings of TRL, or beginnings of their names, that may act on the KL or on the reward or advantage that carries it.

What makes samples stale (`rollout_lag`, `num_iterations`, `steps_per_generation`) is left out: an audit has its own
samplers, of which the loss knows the log-probs as it does for old completions.
"""


def audited_settings(config: "KLConfig") -> dict[str, Any]:
    """The settings of a run that may act on its KL, where they differ from their defaults.

    Args:
        config: the settings of the run.

    Returns:
        Settings for `klgrad.frameworks.trl.declared`, which runs the trainer for an audit, with β = 1 and no rewards.

    Example:
        >>> from klgrad.frameworks.trl import audited_settings
        >>> from klgrad.trl import KLConfig
        >>> audited_settings(KLConfig("runs/mine", loss_type="dr_grpo", kl_coef=0.02, learning_rate=1e-5, bf16=False))
        {'loss_type': 'dr_grpo'}
    """
    from ..trl.config_checks import changed

    kl = lambda name: name.startswith("kl_") and name not in KL_FIELDS_LEFT_OUT
    return {name: value for name, value in changed(config).items() if kl(name) or name.startswith(TRL_FIELDS)}

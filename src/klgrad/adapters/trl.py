"""TRL: its own `GRPOTrainer` and `RLOOTrainer`, from sampled completions to the loss.

A real trainer is built for each setting, around models that say what they are told (`trl_model`): the reference
`ref_logp`, the policy `behavior_logp` when a batch is scored (it is what sampled) and `logp` in the loss. Only
`_generate_single_turn` is replaced: it gives the completions under audit, of which one that fills the batch's columns
is cut off. Log-probs, rewards, the KL in the reward, baselines, normalisation, clipping and reduction are TRL's.
Rewards are 0, or the completion's advantage where the audit asks for random ones. TRL's head computes log-probs in
float32: for the verdict its code runs in float64, and for the float32 probes as it is.

With `use_vllm` the sampler is another program: `behavior_logp` is what it reports, and the policy says `logp` at
scoring too, as where each batch is used once. vLLM itself is not called.

Left out, because they act on the policy's term or on the advantages, and the KL is added after (held by a test):
`epsilon`, `epsilon_high`, `delta`, `off_policy_mask_threshold`, `top_entropy_quantile`, `scale_rewards`, the constants
of sapo and vespo, the bounds of vLLM's ratio, and `importance_sampling_level` without bias correction. RLOO's
`reward_clip_range` comes before the KL; its `epsilon` bites off-policy only, where its KL is stale anyway.
`temperature` divides the logits of both models, so the KL is that of the policies that sample (held by a test).
An entropy bonus has a gradient of its own; `sync_ref_model` moves the reference between updates.
"""
# pyright: reportPrivateImportUsage=false
# (its package exports lazily, which no checker sees)

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .trl_model import WORDS, completion, in_float64, prompt, saved_model, teach, tokenizer

BETA = 1.0

TOKEN_MEANS = ("dapo", "bnpo", "cispo", "vespo")
"""Loss types that average over the batch's tokens: a mean over groups only if these have equally many."""


def subjects() -> list[Subject]:
    """GRPO: what interacts with the KL in full, then the rest one at a time. RLOO: one at a time."""
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
    ]


def grpo(**settings: Any) -> Subject:
    """A `GRPOTrainer` with these settings; what is not named is TRL's default."""
    return _subject("grpo", settings, stacks=True)


def rloo(**settings: Any) -> Subject:
    """An `RLOOTrainer` with these settings; what is not named is TRL's default."""
    # Normalised, the advantages of a batch share one mean and deviation.
    return _subject("rloo", settings, stacks=not settings["normalize_advantages"])


def declared(**settings: Any) -> Subject:
    """This package's `KLTrainer` on TRL, at β = 1, with these settings."""
    return _subject("klgrad", {"kl_coef": 1.0, **settings}, stacks=True)


def _subject(kind: str, settings: dict[str, Any], stacks: bool) -> Subject:
    def loss(batch: Batch) -> Tensor:
        stage = _stage(kind, batch.group_size, tuple(settings.items()))
        if settings.get("loss_type") not in TOKEN_MEANS:
            return stage.loss(batch)
        parts = _by_token_count(batch)
        return torch.stack([stage.loss(part) * len(part.mask) / len(batch.mask) for part in parts]).sum()

    name = " ".join([f"trl {kind}", *(f"{key}={value}" for key, value in settings.items())])
    return Subject(name, "framework", loss, framework="trl", stacks=stacks, exchangeable=True)


def _by_token_count(batch: Batch) -> Iterator[Batch]:
    """The groups that have equally many tokens, together: what ties a batch's groups then ties them no more."""
    count = batch.mask.sum(-1).view(-1, batch.group_size).sum(-1).repeat_interleave(batch.group_size)
    for tokens in count.unique():
        yield Batch(**{field.name: getattr(batch, field.name)[count == tokens] for field in fields(batch)})


class _Stage:
    """A trainer whose models, sampler and rewards say what the batch under audit has."""

    def __init__(self, kind: str, group_size: int, settings: dict[str, Any]) -> None:
        self.trainer = trainer = build(kind, group_size, lambda completions, **_: self.rewards, **settings)
        trainer._generate_single_turn = self._generate
        self.policy, self.reference = teach(trainer.model), teach(trainer.ref_model)
        self.reports_logp = kind != "rloo"
        self.completions: list[list[int]] = []
        self.sampled_logp: list[list[float]] = []
        self.rewards: list[float] = []

    def loss(self, batch: Batch) -> Tensor:
        """Score the batch's groups of completions, then take the loss, by the trainer's own methods."""
        from trl.kernels import chunked_logprob

        self._take(batch)
        with one_thread(), in_float64(chunked_logprob) if batch.logp.dtype == torch.float64 else nullcontext():
            self.policy.logp = batch.logp if self.trainer.use_vllm else batch.behavior_logp
            self.reference.logp = batch.ref_logp
            rows = [{"prompt": prompt(row)} for row in range(len(batch.logp))]
            scored = self.trainer._generate_and_score_completions(rows)
            self.policy.logp = batch.logp
            loss = self.trainer._compute_loss(self.trainer.model, scored)
            # Differentiated here, for the head's backward pass is to run in float64 too.
            (gradient,) = torch.autograd.grad(loss, batch.logp)
        return loss.detach() + (gradient * (batch.logp - batch.logp.detach())).sum()

    def _take(self, batch: Batch) -> None:
        rows, columns = batch.logp.shape
        self.trainer.max_completion_length = columns
        self.trainer.args.per_device_train_batch_size = rows
        lengths = batch.mask.sum(-1).tolist()
        self.completions = [completion(n, ended=n < columns) for n in lengths]
        self.sampled_logp = [logp[:n] for logp, n in zip(batch.behavior_logp.tolist(), lengths, strict=True)]
        self.rewards = batch.advantages[:, 0].tolist()

    def _generate(self, *_: Any, **__: Any) -> Any:
        return (self.completions, self.sampled_logp) if self.reports_logp else self.completions


@cache
def _stage(kind: str, group_size: int, settings: tuple[tuple[str, Any], ...]) -> _Stage:
    return _Stage(kind, group_size, dict(settings))


def build(
    kind: str, group_size: int, rewards: Any, words: tuple[str, ...] = WORDS, use_vllm: bool = False, **settings: Any
) -> Any:
    """A real trainer, with a tiny Llama over these words; the kind `klgrad` is this package's own."""
    from datasets import Dataset

    trainer_class, config_class = _classes(kind)
    if kind != "klgrad":
        settings = {"beta": BETA, **settings}
    with _quietly(), offline(), one_thread():
        folder = saved_model(words)
        config = config_class(
            output_dir=folder,
            per_device_train_batch_size=group_size,
            num_generations=group_size,
            # Twice, so that the log-probs at sampling are kept, and stale samples are seen to be stale.
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
    trainer.use_vllm = use_vllm  # set in the configuration, it would start vLLM
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # which the training loop would set
    return trainer


def _classes(kind: str) -> tuple[Any, Any]:
    import trl

    if kind == "klgrad":
        from ..trl import KLConfig, KLTrainer

        return KLTrainer, KLConfig
    return {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}[kind]


@contextmanager
def offline() -> Iterator[None]:
    """Ask the hub nothing: all that is loaded lies in a folder of its own.

    The constant is what the hub's client looks at; the variable of the environment it reads once, when it is imported,
    and other processes inherit.
    """
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def one_thread() -> Iterator[None]:
    """For prompts this short, a tokenizer's threads only wait; unless the user has chosen otherwise."""
    name = "TOKENIZERS_PARALLELISM"
    chosen = name in os.environ
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if not chosen:
            del os.environ[name]


@contextmanager
def _quietly() -> Iterator[None]:
    """No progress bars for a model of two kilobytes, and no advice on settings that are here to be audited."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    shown, disabled = is_progress_bar_enabled(), logging.root.manager.disable
    disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        if shown:
            enable_progress_bar()

"""The stage on which TRL's trainers are audited: a model of given log-probs, without files, network or output."""

import atexit
import importlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from ..audit.probes import Batch
from ..kernels import TokenStatistics, TopEntries

# The surroundings in which TRL's trainers are built and run for an audit: offline, on one thread, without logs.


def restore_accelerate() -> None:
    """Set up accelerate's state where a later configuration of transformers has reset it: all trainers share it."""
    from accelerate import Accelerator
    from accelerate.state import is_initialized

    if not is_initialized():
        Accelerator(cpu=True)


def offline() -> AbstractContextManager[object]:
    """Switch off access to the hub: everything is loaded from a local folder.

    This sets the constant that the hub's client checks. The client reads the environment variable only when it is
    imported, and setting that would affect child processes.
    """
    from huggingface_hub import constants

    return patch.object(constants, "HF_HUB_OFFLINE", True)


def one_thread() -> AbstractContextManager[object]:
    """Switch off the threads of the tokenizer, which do not help for short prompts, unless the user has set them."""
    name = "TOKENIZERS_PARALLELISM"
    return patch.dict(os.environ, {name: os.environ.get(name, "false")})


@contextmanager
def quietly() -> Iterator[None]:
    """Switch off progress bars, and warnings and logs about settings that are only audited."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    shown, disabled = is_progress_bar_enabled(), logging.root.manager.disable
    disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if shown:
            enable_progress_bar()


# The language model, tokenizer and precision that TRL's trainers get for an audit.
#
# TRL computes log-probs from a causal language model by its own code: it pads, passes token ids to the transformer,
# shifts, projects the hidden states by the head in tiles, divides by the temperature and picks the sampled token. All
# of that runs here, on a `LlamaForCausalLM` whose transformer is a `GivenLogProbs` and whose head is the identity, so
# that hidden states are logits. `GivenLogProbs` reads the token ids only: the prompt spells the index of a row in a
# table of log-probs, and each token of the completion gets the log-prob at its position in that row. `GivenLogits` does
# the same with a table of logits over the vocabulary of the audited problem.

WORDS = ("<pad>", "<end>", "q", "a", "else", *"0123456789")
PAD, END, QUESTION, WORD, ELSE, ZERO = range(6)

IMPOSSIBLE = -1e6
"""A logit of probability 0. It is not -inf, because the head multiplies it by 0."""


def prompt(row: int) -> str:
    """The prompt that spells a row index. Larger ones are longer, so that prompts need padding."""
    return " ".join([*str(row), WORDS[QUESTION]])


def completion(length: int, *, ended: bool) -> list[int]:
    """Token ids of a completion, truncated unless `ended`; which words they are does not matter."""
    return [WORD] * (length - 1) + [END if ended else WORD]


class GivenTable(torch.nn.Module):
    """Replaces a transformer: reads a row index off the prompt, and returns the hidden states of that row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Identity()  # transformers requires one of a language model

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        """(B, L) ids to (B, L, V) hidden states; those within the prompt are 0."""
        question = int((input_ids[0] == QUESTION).int().argmax())
        assert bool((input_ids[:, question] == QUESTION).all()), "prompts that are not padded on the left"
        digits = (input_ids[:, :question] - ZERO).clamp(min=0)
        row = digits @ torch.tensor([10**power for power in reversed(range(question))])
        logits = self.logits_of(row, input_ids[:, question + 1 :])
        return SimpleNamespace(last_hidden_state=torch.nn.functional.pad(logits, (0, 0, question, 1)))

    def logits_of(self, row: Tensor, following: Tensor) -> Tensor:
        """(B,) row indices and (B, T) ids of completions to (B, T, V) logits."""
        raise NotImplementedError


class GivenLogProbs(GivenTable):
    """The next token has the given log-prob, and one other token the remaining probability."""

    logp: Tensor
    """(B, T), one row for each prompt, with or without gradient."""

    def logits_of(self, row: Tensor, following: Tensor) -> Tensor:
        """Two entries of each token's logits are possible."""
        logp = self.logp[row, : following.shape[1]]
        against_else = logp - torch.log(-torch.expm1(logp))
        logits = logp.new_full((*logp.shape, len(WORDS)), IMPOSSIBLE)
        logits[..., ELSE] = 0.0
        return logits.scatter(-1, following[..., None], against_else[..., None])


class GivenLogits(GivenTable):
    """The first words have the given logits, and the others probability 0."""

    logits: Tensor
    """(B, T, V), one row for each prompt, with or without gradient; V is at most the number of words."""

    def logits_of(self, row: Tensor, following: Tensor) -> Tensor:
        """Which token was sampled does not matter."""
        given = self.logits[row, : following.shape[1]]
        return torch.nn.functional.pad(given, (0, len(WORDS) - given.shape[-1]), value=IMPOSSIBLE)


Given = TypeVar("Given", bound=GivenTable)


def with_table(model: Any, table: Given) -> Given:
    """Replace the transformer of a causal language model by a table, and its head by the identity."""
    model.model = table
    model.lm_head = torch.nn.Linear(len(WORDS), len(WORDS), bias=False).requires_grad_(False)
    torch.nn.init.eye_(model.lm_head.weight)
    return table


class _WideTorch:
    """Replaces `torch` in a module: float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64(*modules: ModuleType) -> Iterator[None]:
    """Run the code of these modules in float64 where it casts to float32, as TRL's head always does."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    for module in modules:
        module.torch = _WideTorch()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.torch = torch  # type: ignore[attr-defined]
        del torch.Tensor.float  # restores the method of the base class
        torch.set_default_dtype(default)


@contextmanager
def with_narrow_tiles() -> Iterator[None]:
    """Let TRL project onto as many columns as there are words.

    It allocates 32,768 for each token. Of these one page is used in each row, and the system would clear it every time.
    """
    from trl.kernels import chunked_divergence
    from trl.trainer import utils

    columns = len(WORDS)
    with (
        patch.object(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", columns),
        patch.object(chunked_divergence, "VOCAB_CHUNK_SIZE", columns),
    ):
        yield


def at_leaves(loss: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """A loss with the same value and gradients, differentiated here: within `in_float64`, so is TRL's backward pass."""
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    parts = [(g * (x - x.detach())).sum() for g, x in zip(gradients, leaves, strict=True) if g is not None]
    return loss.detach() + torch.stack(parts).sum()


def accumulated(trainer: Any, scored: dict[str, Any], micro_batches: int) -> Tensor:
    """The loss of one update, whose scored completions are cut into micro-batches as in the training loop."""
    from trl.trainer.utils import split_tensor_dict

    with (
        patch.object(trainer, "current_gradient_accumulation_steps", micro_batches, create=True),
        patch.object(trainer.args, "steps_per_generation", micro_batches, create=True),
    ):
        losses = [trainer.compute_loss(trainer.model, some) for some in split_tensor_dict(scored, micro_batches)]
    # Where TRL's loss is not divided by the number of micro-batches, the loop of transformers does.
    return torch.stack(losses).sum() / (1 if trainer.loss_is_scaled_for_ga else micro_batches)


@cache
def saved_model(words: tuple[str, ...] = WORDS) -> str:
    """The folder of a tiny Llama, since TRL loads the reference from disk; it is removed when the program ends."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tempfile.mkdtemp(prefix="klgrad-trl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tiny = LlamaConfig(
        vocab_size=len(words),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
    )
    with quietly():
        LlamaForCausalLM(tiny).save_pretrained(folder)
    return folder


@cache
def tokenizer(words: tuple[str, ...] = WORDS) -> Any:
    """One id for each word, in order."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    by_word = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[-1]))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token=words[PAD], eos_token=words[END])


# TRL's `DistillationTrainer`: the divergence between student and teacher over the vocabulary, on given completions.
#
# A real trainer is built for each setting. Its student returns the logits of the audited policy and its teacher those
# of the reference (`trl_model.GivenLogits`). Only `_generate_single_turn` is replaced: it returns the audited
# completions, since the trainer samples from its student. Padding, the hidden states of the completions, the tiles of
# both heads, the divergence that `beta` selects, its gradient, the mask and the mean over the tokens of the batch are
# TRL's. Its kernel computes in float32: for the verdict it runs in float64, and for the float32 probes it runs
# unchanged.
#
# The trainer has no other sampler and no importance ratio. Off-policy, the completions are those of the audit's
# sampler, as after an update between generation and loss. `temperature` divides the logits of both models, so the
# divergence is that of the policies at that temperature (tested).

# pyright: reportPrivateImportUsage=false
# (the package exports its names lazily, which type checkers do not see)


class DistillationStage:
    """A trainer whose student, teacher and sampler return the values of the audited batch."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.trainer = trainer = _trainer("distillation", WORDS, 1, settings, teacher_model=saved_model())
        trainer._generate_single_turn = lambda *_, **__: self.completions
        self.student = with_table(trainer.model, GivenLogits())
        self.teacher = with_table(trainer.teacher_model, GivenLogits())
        self.completions: list[list[int]] = []

    def loss(self, batch: Batch, micro_batches: int = 1) -> Tensor:
        """Take the completions and compute the loss, by the methods of the trainer."""
        from trl.kernels import chunked_divergence, chunked_logprob

        restore_accelerate()
        self.student.logits, self.teacher.logits = batch.logits, batch.ref_logits
        columns = batch.mask.shape[1]
        self.completions = [completion(n, ended=n < columns) for n in batch.mask.sum(-1).tolist()]
        wide = batch.logits.dtype == torch.float64
        precision = in_float64(chunked_divergence, chunked_logprob) if wide else nullcontext()
        with one_thread(), with_narrow_tiles(), precision:
            rows = [{"prompt": prompt(row)} for row in range(len(batch.logits))]
            taken = self.trainer._generate_and_score_completions(rows)
            return at_leaves(accumulated(self.trainer, taken, micro_batches), batch.leaves)


# The KLs over the vocabulary that `KLTrainer` gets for an audit of `kl_estimator="exact"`.
#
# The models of an audit have the given log-probs of the sampled tokens, and one other token with the rest of the
# probability. The KL over that vocabulary is not the KL of the audited problem. So the KLs of each token are given, as
# the log-probs are: those of the batch, or for `kl_top_k` those that the trainer's own code computes from the logits of
# the batch. Placement, baseline, ratios, reduction and accumulation are the trainer's and TRL's.

ENTRIES = 1
"""Likeliest entries of the reference that are summed over in the audit of `kl_top_k`, whatever its value: the
vocabularies of the problems have 2 to 4 entries, and the rest must not be empty."""


def _forward(trainer: Any, batch: Batch, model: Any, scored: dict[str, Any], own: Callable[[], Any]) -> Any:
    """In the place of `Scorer.forward`: with the KLs of a batch, whose rows are the completions."""
    from ..trl.compat import ForwardPass

    logp, entropy, _ = own()
    width = logp.shape[1]  # TRL cuts the columns in which no completion has a token
    ref_logp, reverse, forward = (
        x[:, :width] for x in (batch.ref_logp, batch.token_reverse_kl, batch.token_forward_kl)
    )
    divergence = batch.divergence(trainer.objective.term.generator)[:, :width]
    given = TokenStatistics(logp, entropy, ref_logp, reverse, forward, entries_logp=None, divergence=divergence)
    if trainer.objective.top_k is not None:
        given = _over_top_entries(trainer, batch, given, scored)
    return ForwardPass(logp, entropy, None, given)


def _over_top_entries(trainer: Any, batch: Batch, given: TokenStatistics, scored: dict[str, Any]) -> TokenStatistics:
    from ..trl.compat import sampled_tokens
    from ..trl.scorer import with_top_k_kl

    width = given.logp.shape[1]
    logits, ref_logits, tokens = (x[:, :width] for x in (batch.logits, batch.ref_logits, batch.tokens))
    of = ref_logits if trainer.objective.top_k_of == "teacher" else logits.detach()
    ref_logp, ids = torch.log_softmax(ref_logits, -1), of.topk(ENTRIES, -1).indices
    token_logp = ref_logp.gather(-1, tokens[..., None]).squeeze(-1)
    best = TopEntries(ids, ref_logp.gather(-1, ids), token_logp, (ids == tokens[..., None]).any(-1))
    entries = torch.log_softmax(logits, -1).gather(-1, ids)
    behavior = trainer.scorer._behavior(given.logp.detach(), scored)
    given = given._replace(reverse_kl=None, forward_kl=None, entries_logp=entries)
    return with_top_k_kl(given, best, trainer.objective, sampled_tokens(scored), behavior)


# The trainers, and what runs them on a batch of the audit.

BETA = 1.0


class Stage:
    """A trainer whose models, sampler and rewards return the values of the audited batch."""

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        self.trainer = trainer = build(kind, 2, lambda completions, **_: self.rewards, **settings)
        trainer._generate_single_turn = self._generate
        self.policy = with_table(trainer.model, GivenLogProbs())
        # Without a KL, TRL has no reference.
        self.reference = with_table(trainer.ref_model, GivenLogProbs()) if trainer.ref_model is not None else None
        self.reports_logp = kind != "rloo"
        self.is_exact = kind == "klgrad" and trainer.objective.exact
        if kind == "klgrad":  # the audited policies are not at the reference, as a model is before its first update
            trainer._is_begun = True
            # Each row has a prompt of its own, which names it.
            trainer.scorer.groups = lambda rows: torch.arange(len(rows["prompt_ids"])) // trainer.num_generations
        self.completions: list[list[int]] = []
        self.sampled_logp: list[list[float]] = []
        self.rewards: list[float] = []

    def loss(self, batch: Batch, micro_batches: int = 1) -> Tensor:
        """Score the groups of completions and compute the loss, by the methods of the trainer."""
        from trl.kernels import chunked_logprob

        restore_accelerate()
        self._take(batch)
        wide = batch.logp.dtype == torch.float64
        with one_thread(), with_narrow_tiles(), in_float64(chunked_logprob) if wide else nullcontext():
            self.policy.logp = batch.logp if self.trainer.use_vllm else batch.behavior_logp
            if self.reference is not None:
                self.reference.logp = batch.ref_logp
            rows = [{"prompt": prompt(row)} for row in range(len(batch.logp))]
            scored = self.trainer._generate_and_score_completions(rows)
            self.policy.logp = batch.logp
            return at_leaves(accumulated(self.trainer, scored, micro_batches), batch.leaves)

    def _take(self, batch: Batch) -> None:
        rows, columns = batch.logp.shape
        if self.is_exact:
            self.trainer.scorer.forward = partial(_forward, self.trainer, batch)
        self.trainer.max_completion_length = columns
        self.trainer.args.per_device_train_batch_size = rows
        self.trainer.num_generations = batch.group_size
        lengths = batch.mask.sum(-1).tolist()
        self.completions = [completion(n, ended=n < columns) for n in lengths]
        self.sampled_logp = [logp[:n] for logp, n in zip(batch.behavior_logp.tolist(), lengths, strict=True)]
        self.rewards = batch.advantages[:, 0].tolist()

    def _generate(self, *_: object, **__: object) -> object:
        return (self.completions, self.sampled_logp) if self.reports_logp else self.completions


@cache
def stage_of(kind: str, settings: tuple[tuple[str, object], ...]) -> Stage | DistillationStage:
    """The trainer with these settings, for groups of any size; built once."""
    return DistillationStage(dict(settings)) if kind == "distillation" else Stage(kind, dict(settings))


def build(
    kind: str, group_size: int, rewards: Any, words: tuple[str, ...] = WORDS, use_vllm: bool = False, **settings: Any
) -> Any:
    """A real trainer, with a tiny Llama over these words; the kind `klgrad` is this package's own."""
    if kind != "klgrad":
        settings = {"beta": BETA, **settings}
    sizes = {"per_device_train_batch_size": group_size, "num_generations": group_size}
    # 2, so that the trainer keeps the log-probs at sampling.
    settings = {**sizes, "num_iterations": 1 if use_vllm else 2, **settings}
    trainer = _trainer(kind, words, group_size, settings, reward_funcs=rewards)
    trainer.use_vllm = use_vllm  # in the configuration it would start vLLM
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop
    return trainer


def _trainer(kind: str, words: tuple[str, ...], rows: int, settings: dict[str, Any], **arguments: Any) -> Any:
    from datasets import Dataset

    module = importlib.import_module("klgrad.trl" if kind == "klgrad" else "trl")
    name = {"klgrad": "KL", "grpo": "GRPO", "rloo": "RLOO", "distillation": "Distillation"}[kind]
    trainer_class, config_class = getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
    with quietly(), offline(), one_thread():
        folder = saved_model(words)
        trainer = trainer_class(
            model=folder,
            args=config_class(output_dir=folder, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, **settings),
            train_dataset=Dataset.from_dict({"prompt": [words[-1]] * rows}),
            processing_class=tokenizer(words),
            **arguments,
        )
    trainer.model.train()
    return trainer

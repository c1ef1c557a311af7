"""The language model, tokenizer and precision that TRL's trainers get for an audit.

TRL computes log-probs from a causal language model by its own code: it pads, passes token ids to the transformer,
shifts, projects the hidden states by the head in tiles, divides by the temperature and picks the sampled token. All of
that runs here, on a `LlamaForCausalLM` whose transformer is a `GivenLogProbs` and whose head is the identity, so that
hidden states are logits. `GivenLogProbs` reads the token ids only: the prompt spells the index of a row in a table of
log-probs, and each token of the completion gets the log-prob at its position in that row. `GivenLogits` does the same
with a table of logits over the vocabulary of the audited problem.
"""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

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


def with_given_log_probs(model: Any) -> GivenLogProbs:
    """Replace the transformer of a causal language model by a `GivenLogProbs`, and its head by the identity."""
    return with_table(model, GivenLogProbs())


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


def at_leaves(loss: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """A loss with the same value and gradients, differentiated here: within `in_float64`, so is TRL's backward pass."""
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    parts = [(g * (x - x.detach())).sum() for g, x in zip(gradients, leaves, strict=True) if g is not None]
    return loss.detach() + torch.stack(parts).sum()


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

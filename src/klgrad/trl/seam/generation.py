"""Completions: sampled, tokenized, padded and shuffled by TRL.

Touches `GRPOTrainer._generate` (the order of what it returns), `_generate_single_turn`, `_tokenize_prompts` and
`_tokenizer`, `trl.trainer.utils.pad`, and the global `shuffle_sequence_dict` of `trl.trainer.grpo_trainer`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import pad

from .batch import Batch
from .version import ContractError

Rows = list[list[int]]


class Sampled(NamedTuple):
    """What `_generate` returns; `contract.py` checks the order of the fields."""

    prompt_ids: Rows
    completion_ids: Rows
    tool_mask: Rows | None
    completions: list[Any]
    logprobs: Any
    extra_fields: Any
    images: Any
    tool_images: Any

    @classmethod
    def of(cls, returned: tuple[Any, ...]) -> "Sampled":
        """By position."""
        if len(returned) != len(cls._fields):
            raise ContractError(f"{len(cls._fields)} values from GRPOTrainer._generate", f"{len(returned)}")
        return cls(*returned)


def tokenize_prompts(trainer: GRPOTrainer, prompts: list[Any]) -> Rows:
    """Token ids of prompts, as TRL makes them: chats by the chat template."""
    return trainer._tokenize_prompts(prompts)[0]


def generate(trainer: GRPOTrainer, prompt_ids: Rows) -> Rows:
    """One completion for each prompt, sampled by TRL's own generation, with vLLM or without."""
    return trainer._generate_single_turn(prompt_ids, None, {}, 1)[0]


def decode(trainer: GRPOTrainer, completion_ids: Rows) -> list[str]:
    """The completions as text, without special tokens."""
    return trainer._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)


def padded(trainer: GRPOTrainer, prompt_ids: Rows, completion_ids: Rows) -> Batch:
    """Token ids and masks as TRL's batches have them: prompts padded on the left, completions on the right."""
    device, made = trainer.accelerator.device, {}
    padding: Any = trainer._tokenizer.pad_token_id
    for name, rows, side in (("prompt", prompt_ids, "left"), ("completion", completion_ids, "right")):
        ids = [torch.tensor(row) for row in rows]
        ones = [torch.ones_like(row) for row in ids]
        made[f"{name}_ids"] = pad(ids, padding_value=padding, padding_side=side).to(device)
        made[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side).to(device)
    return made


def padded_mask(trainer: GRPOTrainer, mask: Rows) -> Tensor:
    """(B, T) one row of 0 and 1 per completion, 0 where it is padded."""
    rows = [torch.tensor(row) for row in mask]
    return pad(rows, padding_value=0, padding_side="right").to(trainer.accelerator.device)


@contextmanager
def shuffled_by(shuffle: Callable[[Batch], Batch]) -> Iterator[None]:
    """While TRL splits a generation batch into micro-batches, let `shuffle` order its rows instead of TRL."""
    module: Any = grpo_trainer
    before, module.shuffle_sequence_dict = module.shuffle_sequence_dict, shuffle
    try:
        yield
    finally:
        module.shuffle_sequence_dict = before

"""Read a prompt once for all of its completions, in training too.

TRL gives each completion a row of its own, with its prompt in front. With 8 completions of 24 tokens to a prompt of 46
tokens, two thirds of the tokens are copies. Here the completions of a prompt stand in one row behind it, each sees the
prompt and itself alone, and has the positions that it would have in a row of its own. Hidden states and gradients are
the same up to rounding (`tests/training/test_shared_prompts.py`).
"""

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from klgrad.trl.compat import prompt_keys

IGNORED = -100
"""The label of a token that is not scored, in transformers."""


def install(trainer: Any) -> None:
    """Let the trainer's models read prompts once."""
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            share_prompts(model, trainer.num_generations)


def share_prompts(model: Any, completions: int) -> None:
    """Let a model read a prompt once, in calls whose batches have a multiple of `completions` rows for each prompt.

    The calls are those of TRL, with labels, and those of klgrad, with a question: both say where completions start. All
    other calls, such as generation, are unchanged.
    """
    base = model.base_model
    outer, inner, keep = model.forward, base.forward, 0

    @wraps(outer)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal keep
        keep = _scored_tokens(kwargs)
        try:
            return outer(*args, **kwargs)
        finally:
            keep = 0

    @wraps(inner)
    def base_forward(
        input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        shared = Shared.of(input_ids, attention_mask, keep, completions) if keep else None
        if shared is None:
            return inner(input_ids, attention_mask, *args, **kwargs)
        given = {"input_ids": shared.ids, "attention_mask": shared.mask, "position_ids": shared.positions}
        found = inner(**{**kwargs, **given})
        found.last_hidden_state = shared.separate(found.last_hidden_state)
        return found

    model.forward, base.forward = forward, base_forward


def _scored_tokens(given: dict[str, Any]) -> int:
    """How many of the last tokens a call asks about; 0 if it does not say."""
    if given.get("question") is not None:
        return given["question"].keep
    if given.get("labels") is None:
        return 0
    # The first token of a completion is scored in every row. If none is, every count is 0, and so is the result.
    scored = (given["labels"] != IGNORED).any(0)
    return int(scored.cumsum(0).bool().sum())


@dataclass(frozen=True, eq=False)
class Shared:
    """A batch with one row for each group of completions to one prompt.

    Attributes:
        ids: (G, P + n K) the prompt, then its n completions.
        mask: (G, 1, P + n K, P + n K) which token sees which.
        positions: (1, P + n K) the position of each token in a row of its own.
        back: (B,) the place of each row of the batch among the sorted rows.
        prompt: P, the length of the prompts with their padding.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    back: Tensor
    prompt: int

    @classmethod
    def of(cls, ids: Tensor | None, attention: Tensor | None, keep: int, completions: int) -> "Shared | None":
        """Join the rows of a batch; None if they are not `completions` to a prompt."""
        if ids is None or attention is None or attention.dim() != 2 or len(ids) % completions:
            return None
        prompt = ids.shape[1] - keep
        order = _by_prompt(ids[:, :prompt], attention[:, :prompt])
        grouped, seen = (x[order].view(-1, completions, x.shape[1]) for x in (ids, attention))
        if not bool(_same_prompts(grouped, prompt) & _same_prompts(seen, prompt)):
            return None
        joined, live = (torch.cat([x[:, 0, :prompt], x[:, :, prompt:].flatten(1)], 1) for x in (grouped, seen))
        place = torch.arange(ids.shape[1], device=ids.device)
        positions = torch.cat([place[:prompt], place[prompt:].repeat(completions)])
        of_completion = torch.arange(completions, device=ids.device).repeat_interleave(keep) + 1
        owner = torch.cat([of_completion.new_zeros(prompt), of_completion])  # 0 for the prompt
        visible = (owner[None] == 0) | (owner[None] == owner[:, None])
        visible = visible & (positions[None] <= positions[:, None])
        # Padding sees itself, because the attention of a token that sees none is not a number.
        itself = torch.eye(len(positions), dtype=torch.bool, device=ids.device)
        mask = (visible & live[:, None, None, :].bool()) | itself
        return cls(joined, mask, positions[None], order.argsort(), prompt)

    def separate(self, hidden: Tensor) -> Tensor:
        """(B, P + K, H) hidden states with a row for each completion, as the batch had them."""
        groups, completions = len(hidden), len(self.back) // len(hidden)
        own = hidden[:, self.prompt :].reshape(groups * completions, -1, hidden.shape[-1])
        common = hidden[:, None, : self.prompt].expand(-1, completions, -1, -1).flatten(0, 1)
        return torch.cat([common, own], 1)[self.back]


def _by_prompt(ids: Tensor, attention: Tensor) -> Tensor:
    """(B,) an order of the rows in which equal prompts stand together."""
    keys = prompt_keys({"prompt_ids": ids, "prompt_mask": attention})
    return keys.argsort(stable=True)


def _same_prompts(grouped: Tensor, prompt: int) -> Tensor:
    return (grouped[:, :, :prompt] == grouped[:, :1, :prompt]).all()

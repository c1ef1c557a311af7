"""A scored batch of completions, under the keys that TRL's loss reads.

Touches the keys `prompt_ids`, `prompt_mask`, `completion_ids`, `completion_mask`, `tool_mask`, `advantages`,
`ref_per_token_logps`, `old_per_token_logps` and `sampling_per_token_logps`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]

NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""The keys of prompts and completions, in the batches of all of TRL's trainers that sample."""

FACTOR = 6364136223846793005
"""An odd number, whose powers modulo 2^64 differ for all lengths that occur."""


@dataclass(frozen=True, eq=False)
class Completions:
    """Prompts and completions as one sequence; the last `keep` tokens are completion, live where `mask` is 1."""

    ids: Tensor
    attention: Tensor
    keep: int
    mask: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "Completions":
        """Join the prompts and completions of a batch, as TRL's loss does."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        return cls(ids, attention, batch["completion_ids"].shape[1], batch["completion_mask"])

    @property
    def targets(self) -> Tensor:
        """(B, keep) the tokens of the completions."""
        return self.ids[:, -self.keep :]


def has_completions(batch: Any) -> bool:
    """Whether a batch of some trainer has prompts and completions under these keys."""
    return isinstance(batch, dict) and all(name in batch for name in NEEDED)


def prompt_keys(batch: Batch) -> Tensor:
    """(B,) a number for each prompt, the same for the same tokens, on every process and in every batch.

    A polynomial in the tokens, modulo 2^64. Prompts are padded on the left, so powers are counted from the right.
    """
    ids, mask = batch["prompt_ids"], batch["prompt_mask"]
    factor = torch.full((ids.shape[1],), FACTOR, dtype=torch.int64, device=ids.device)
    return ((ids + 1) * mask * factor.cumprod(0).flip(0)).sum(1)


def row_count(batch: Batch) -> int:
    """How many completions the batch has on this process."""
    return len(batch["completion_ids"])


def sampled_tokens(batch: Batch) -> Tensor:
    """(B, T) 1 where the policy sampled a token; 0 for padding and for text that a tool returned."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def reference_log_probs(batch: Batch) -> Tensor:
    """(B, T) log-probs by the reference, which TRL computed when it scored the batch."""
    return batch["ref_per_token_logps"]


def sampler_log_probs(batch: Batch, logp: Tensor) -> Tensor | None:
    """(B, T) log-probs by the model that sampled the tokens, or None where TRL kept none.

    vLLM's own come first, then those of the policy at the time of sampling. vLLM reports NaN for a token that it could
    not score; `logp`, the policy's, takes its place.
    """
    found = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
    return None if found is None else torch.where(found.isnan(), logp, found)


def has_sampler_log_probs(batch: Batch) -> bool:
    """Whether TRL kept vLLM's own log-probs."""
    return "sampling_per_token_logps" in batch


def has_reference_log_probs(batch: Batch) -> bool:
    """Whether TRL scored the batch by the reference."""
    return "ref_per_token_logps" in batch


def with_reference_log_probs(batch: Batch, ref_logp: Tensor) -> Batch:
    """The batch with these log-probs by the reference."""
    return {**batch, "ref_per_token_logps": ref_logp}


def has_old_log_probs(batch: Batch) -> bool:
    """Whether TRL kept the policy's log-probs at the time of sampling."""
    return "old_per_token_logps" in batch


def old_log_probs(batch: Batch) -> Tensor | None:
    """(B, T) the policy's log-probs at the time of sampling, or None where TRL kept none."""
    return batch.get("old_per_token_logps")


def keep_old_log_probs(batch: Batch, logp: Tensor) -> None:
    """Store the policy's log-probs at the time of sampling, so that TRL's loss computes its ratio from them."""
    batch["old_per_token_logps"] = logp


def with_lower_advantages(batch: Batch, by: Tensor) -> Batch:
    """The batch with (B, T) `by` subtracted from its advantages, which may be one number per completion."""
    advantages = batch["advantages"]
    return {**batch, "advantages": (advantages[:, None] if advantages.dim() == 1 else advantages) - by}


def with_any_reference(batch: Batch, logp: Tensor) -> Batch:
    """The batch with log-probs of some reference: TRL's loss computes a KL from them, which `loss.py` replaces."""
    return {**batch, "ref_per_token_logps": logp.detach()}


def has_images(batch: Batch) -> bool:
    """Whether the prompts have images."""
    return batch.get("pixel_values") is not None

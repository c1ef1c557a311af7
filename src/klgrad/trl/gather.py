"""All processes' completions of one step, so that baselines and reports are the whole batch's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer


def everywhere(accelerator: Any, local: dict[str, Tensor | None]) -> tuple[dict[str, Any], slice]:
    """The tensors of all processes, padded to one length; this one's rows keep their gradient."""
    rows = len(next(x for x in local.values() if x is not None))
    if accelerator.num_processes == 1:
        return dict(local), slice(0, rows)
    own = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
    return {name: None if x is None else _gathered(accelerator, x, own) for name, x in local.items()}, own


def with_peers(group: Tensor) -> Tensor:
    """Groups in which nobody is alone: completions whose group lies in other micro-batches share one.

    A baseline over completions of other prompts is as unbiased as one over the same prompt's, for it does not look at
    the completion either; it only helps less.
    """
    values, index, counts = group.unique(return_inverse=True, return_counts=True)
    alone = counts[index] == 1
    if not bool(alone.any()) or len(values) == 1:
        return group
    home = values.new_tensor(int(values.max()) + 1) if int(alone.sum()) > 1 else values[counts.argmax()]
    return torch.where(alone, home, group)


@contextmanager
def groups_together() -> Iterator[None]:
    """While TRL shuffles a generation batch and splits it into micro-batches, let it shuffle prompts, not completions.

    So the peers of a baseline lie in one micro-batch, as far as it has room for them.
    """
    module: Any = grpo_trainer
    shuffle = module.shuffle_sequence_dict
    module.shuffle_sequence_dict = shuffled_by_group
    try:
        yield
    finally:
        module.shuffle_sequence_dict = shuffle


def shuffled_by_group(batch: dict[str, Any]) -> dict[str, Any]:
    """Groups in a random order, each one's rows side by side."""
    _, index = batch["group"].unique(return_inverse=True)
    place = torch.randperm(int(index.max()) + 1)[index.cpu()]
    order = place.argsort(stable=True)

    def permuted(x: Any) -> Any:
        if x is None or (isinstance(x, Tensor) and x.ndim == 0):
            return x
        return x[order.to(x.device)] if isinstance(x, Tensor) else [x[i] for i in order.tolist()]

    return {name: permuted(x) for name, x in batch.items()}


def _gathered(accelerator: Any, x: Tensor, own: slice) -> Tensor:
    if x.ndim == 1:
        return accelerator.gather(x)
    padded = accelerator.pad_across_processes(x.detach().contiguous(), dim=1)
    total = accelerator.gather(padded).clone()
    if not x.requires_grad:
        return total
    mine = torch.nn.functional.pad(x, (0, total.shape[1] - x.shape[1]))
    return torch.cat([total[: own.start], mine, total[own.stop :]])

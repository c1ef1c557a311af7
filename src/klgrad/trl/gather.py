"""All processes' completions of one update, so that baselines and reports are the whole batch's."""

from typing import Any

import torch
from torch import Tensor


def everywhere(accelerator: Any, local: dict[str, Tensor | None]) -> tuple[dict[str, Any], slice]:
    """The tensors of all processes, padded to one length; this one's rows keep their gradient."""
    rows = len(next(x for x in local.values() if x is not None))
    if accelerator.num_processes == 1:
        return dict(local), slice(0, rows)
    own = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
    return {name: None if x is None else _gathered(accelerator, x, own) for name, x in local.items()}, own


def with_peers(group: Tensor) -> Tensor:
    """Groups in which nobody is alone: completions whose group lies in other micro-batches share one.

    TRL shuffles a generation batch before it splits it. A baseline over completions of other prompts is as unbiased as
    one over the same prompt's, for it does not look at the completion either; it only helps less.
    """
    values, index, counts = group.unique(return_inverse=True, return_counts=True)
    alone = counts[index] == 1
    if not bool(alone.any()) or len(values) == 1:
        return group
    home = values.new_tensor(int(values.max()) + 1) if int(alone.sum()) > 1 else values[counts.argmax()]
    return torch.where(alone, home, group)


def _gathered(accelerator: Any, x: Tensor, own: slice) -> Tensor:
    if x.ndim == 1:
        return accelerator.gather(x)
    padded = accelerator.pad_across_processes(x.detach().contiguous(), dim=1)
    total = accelerator.gather(padded).clone()
    if not x.requires_grad:
        return total
    mine = torch.nn.functional.pad(x, (0, total.shape[1] - x.shape[1]))
    return torch.cat([total[: own.start], mine, total[own.stop :]])

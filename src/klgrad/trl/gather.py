"""All processes' completions of one step, so that baselines and reports are those of the whole batch."""

from typing import Any

import torch
from torch import Tensor


def everywhere(accelerator: Any, local: dict[str, Tensor | None]) -> tuple[dict[str, Any], slice]:
    """Gather tensors from all processes, padded to one length.

    Returns:
        The tensors of all processes, of which this process' rows keep their gradient; and which rows these are.
    """
    rows = len(next(x for x in local.values() if x is not None))
    if accelerator.num_processes == 1:
        return dict(local), slice(0, rows)
    own = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
    return {name: None if x is None else _gathered(accelerator, x, own) for name, x in local.items()}, own


def _gathered(accelerator: Any, x: Tensor, own: slice) -> Tensor:
    if x.ndim == 1:
        return accelerator.gather(x)
    padded = accelerator.pad_across_processes(x.detach().contiguous(), dim=1)
    total = accelerator.gather(padded).clone()
    if not x.requires_grad:
        return total
    mine = torch.nn.functional.pad(x, (0, total.shape[1] - x.shape[1]))
    return torch.cat([total[: own.start], mine, total[own.stop :]])

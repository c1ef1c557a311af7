"""Find the loss in what a function returned."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import LossOutputError
from ..batch import Batch


def scalar(name: str, out: object, batch: Batch) -> Tensor:
    """The loss as a scalar.

    Args:
        name: of the loss, for messages.
        out: a tensor, a tuple or list that begins with one, a dictionary with the key `loss`, or an object with the
            attribute `loss`. The tensor is a scalar, (B,), (B, T), or (B, T, V).
        batch: what the loss was called with.

    Returns:
        The scalar: a mean over completions, and a sum over live tokens and over the vocabulary.
    """
    out = _loss_in(out)
    rows, columns = batch.logp.shape
    if not isinstance(out, Tensor):
        raise LossOutputError(
            f"{name} to return a scalar or a {(rows, columns)} tensor",
            _described(out),
            "return the loss as a tensor, or (loss, metrics), {'loss': loss} or an object with `.loss`",
        )
    if out.numel() == 1:
        return out.reshape(())
    if out.shape == batch.logits.shape:
        out = out.sum(-1)
    if out.shape == batch.logp.shape:
        return torch.where(batch.mask, out, 0).sum() / rows
    if out.shape in ((rows,), (rows, 1)):
        return out.sum() / rows
    raise LossOutputError(
        f"{name} to return a scalar, or a tensor of shape ({rows},) or {(rows, columns)}: (B,) or (B, T)",
        f"a tensor of shape {tuple(out.shape)}",
        "average the values with `.mean()`, or return one value per completion or per token",
    )


def _loss_in(out: object) -> object:
    if isinstance(out, Tensor):
        return out
    if isinstance(out, Mapping):
        return _loss_in(out["loss"]) if "loss" in out else out
    if isinstance(getattr(out, "loss", None), Tensor):
        return out.loss  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(out, (tuple, list)) and out:
        return _loss_in(out[0])
    return out


def _described(out: object) -> str:
    if isinstance(out, Mapping):
        return f"a dictionary with the keys {', '.join(map(str, out)) or '(none)'}"
    if isinstance(out, (int, float)):
        return f"the number {out}, which has no gradient (without `.item()` it is a tensor)"
    return type(out).__name__

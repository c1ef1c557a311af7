"""Checks of the inputs and results of the kernels."""

import torch
from torch import Tensor

from ..errors import KernelInputError
from .head import Head


def shapes(
    hidden: Tensor, targets: Tensor, ref_hidden: Tensor | None, mask: Tensor | None, entries: Tensor | None
) -> None:
    """Check that all leading shapes are those of `targets`."""
    if not hidden.is_floating_point():
        raise KernelInputError(
            "`hidden` with a floating-point dtype", str(hidden.dtype), "pass hidden states, not token ids"
        )
    if targets.is_floating_point():
        raise KernelInputError("integer `targets`", str(targets.dtype), "pass token ids")
    for name, x in (("hidden", hidden), ("ref_hidden", ref_hidden), ("entries", entries)):
        if x is not None and (x.ndim != targets.ndim + 1 or x.shape[:-1] != targets.shape):
            raise KernelInputError(
                f"`{name}` of shape {(*targets.shape, 'H' if name != 'entries' else 'k')}, which begins as `targets`",
                f"shape {tuple(x.shape)}",
                "pass one row per predicted token: hidden states of positions 0..T-2 for tokens 1..T-1",
            )
    if mask is not None and mask.shape != targets.shape:
        raise KernelInputError(
            f"`mask` of shape {tuple(targets.shape)}", f"shape {tuple(mask.shape)}", "pass one value per target"
        )


def heads(head: Head, hidden: Tensor, ref_head: Head | None, ref_hidden: Tensor | None) -> None:
    """Check that each head fits its hidden states, and that both heads have the same vocabulary."""
    if (ref_head is None) != (ref_hidden is None):
        given, missing = ("ref_head", "ref_hidden") if ref_hidden is None else ("ref_hidden", "ref_head")
        raise KernelInputError(f"`{missing}` together with `{given}`", "none", "pass both for the KL, or neither")
    for name, h, x in (("hidden", head, hidden), ("ref_hidden", ref_head, ref_hidden)):
        if h is not None and x is not None and h.weight.shape[1] != x.shape[-1]:
            raise KernelInputError(
                f"`{name}` of width {h.weight.shape[1]}, as its head's weight (V, H)",
                f"width {x.shape[-1]}",
                "pass the last hidden states and `lm_head.weight` of one model",
            )
    if ref_head is not None:
        one_vocabulary(head.vocabulary, ref_head.vocabulary)


def one_vocabulary(own: int, other: int) -> None:
    """Check that the two models have the same number of entries."""
    if own != other:
        raise KernelInputError(
            "policy and reference over the same vocabulary",
            f"{own} and {other} entries",
            f"one may be padded: if the tokenizer is the same, cut both to its length (at most {min(own, other)}): "
            "Head(weight[:n], bias[:n]), or logits[..., :n]",
        )


def outcome(
    wanted: Tensor,
    vocabulary: int,
    found: tuple[Tensor, ...],
    policy: tuple[Tensor | None, ...],
    reference: tuple[Tensor | None, ...],
) -> None:
    """Check targets and results with one device synchronisation; find the error only if there is one."""
    outside = (wanted < 0) | (wanted >= vocabulary)
    if bool(outside.any() | ~torch.stack(found[:5]).detach().isfinite().all()):
        targets(wanted, vocabulary)
        _results(policy, reference)


def targets(wanted: Tensor, vocabulary: int) -> None:
    """Check that every wanted entry is in the vocabulary."""
    outside = wanted[(wanted < 0) | (wanted >= vocabulary)]
    if len(outside):
        raise KernelInputError(
            f"targets from 0 to {vocabulary - 1} where the mask is 1",
            f"{int(outside[0])}",
            "mask padding (such as -100), and use the tokenizer of this model",
        )


def _results(policy: tuple[Tensor | None, ...], reference: tuple[Tensor | None, ...]) -> None:
    """Raise an error that names the input which caused a NaN or infinity in a result."""
    names = ("hidden", "head.weight", "head.bias", "ref_hidden", "ref_head.weight", "ref_head.bias")
    for name, x in zip(names, (*policy, *reference), strict=True):
        if x is not None and not bool(x.isfinite().all()):
            where = (~x.isfinite()).nonzero()[0].tolist()
            raise KernelInputError(
                f"finite `{name}`",
                f"{float(x[tuple(where)]):g} at {where}",
                "find its origin (an overflow in half precision, an uninitialised or diverged weight)",
            )
    raise KernelInputError(
        "finite statistics", "an overflow in the logits", "check the scale of the hidden states and heads"
    )


def log_probs(
    logp: Tensor, ref_logp: Tensor, kl: Tensor, logits: Tensor, ref_logits: Tensor | None, places: Tensor | None
) -> None:
    """Check that sampled tokens have finite log-probs; other logits may be -inf, but not all of a model at a token.

    `places` are the rows of the tokens in the logits; None if they are all rows.
    """
    sound = logp.detach().isfinite() & ~ref_logp.isnan() & ~kl.detach().isnan()
    if bool(sound.all()):
        return
    row = int((~sound).nonzero()[0])
    place = row if places is None else int(places[row])
    for name, x in (("logits", logits), ("ref_logits", ref_logits)):
        if x is not None and not bool((x[place] < torch.inf).all()):
            raise KernelInputError(f"`{name}` without NaN and +inf", f"one at live token {row}", "find its origin")
        if x is not None and not bool((x[place] > -torch.inf).any()):
            raise KernelInputError(
                f"`{name}` with a finite entry at every live token",
                f"-inf at live token {row} for every entry",
                "mask tokens that have no prediction, or find the code that banned the whole vocabulary",
            )
    raise KernelInputError(
        "a finite log-prob of every sampled token",
        f"{float(logp[row].detach()):g} at live token {row}",
        "use the distribution that sampled the token; do not ban entries that it allowed",
    )


def has_reference(ref_logp: Tensor | None) -> None:
    """Check that the statistics have a reference, which a rollout needs."""
    if ref_logp is None:
        raise KernelInputError(
            "statistics with a reference", "no reference", "pass ref_hidden and ref_head to token_statistics"
        )


def first_order() -> None:
    """Refuse second derivatives, which would silently be wrong."""
    if torch.is_grad_enabled():
        raise KernelInputError(
            "first derivatives only",
            "create_graph=True",
            "compute second derivatives with klgrad.kernels.reference, which is plain torch",
        )

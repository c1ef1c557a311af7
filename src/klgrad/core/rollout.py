"""`Rollout`, a batch of sampled completions, checked once when it is made so that no later code has to."""

import operator
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from typing import cast

import torch
from torch import Tensor

from ..errors import RolloutError

ROUNDING_STEPS = 64
"""How many units of rounding a log-prob may be above 0 before it is an error: log-probs are computed as
logit minus log-sum-exp, and logits of size up to 64 are rounded at 64 x eps of their dtype."""

DIVERGENCES = ("token_reverse_kl", "token_forward_kl", "token_divergence")
"""The fields per token that are not log-probs."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The allowed dtypes of log-probs and KLs. Narrower ones (float8) do not support comparisons."""

_deferred: ContextVar[list[Callable[[], None]] | None] = ContextVar("_deferred", default=None)
"""The checks of values that wait for the end of `checked_at_the_end`; None outside of it."""


@contextmanager
def checked_at_the_end() -> Generator[None, None, None]:
    """Check the values of rollouts that are made inside only when the block ends.

    A check of values synchronises with the device, so a trainer defers it to a point where it synchronises anyway.
    Types, shapes and dtypes are still checked at once.
    """
    checks: list[Callable[[], None]] = []
    token = _deferred.set(checks)
    try:
        yield
    finally:
        _deferred.reset(token)
    for check in checks:
        check()


@dataclass(frozen=True, eq=False)
class Rollout:
    r"""Log-probs of the sampled tokens of B completions by role, all of shape (B, T).

    Positions where `mask` is 0 are overwritten with 0 by `torch.where`, so that padding there (even -inf or NaN)
    reaches neither a value nor a gradient. Half precision is converted to float32. Everything but `logp` and
    the divergences of each token is detached.

    Args:
        logp: log π(y_t | y_<t) of the policy being trained; carries the gradient.
        ref_logp: log ref(y_t | y_<t) of the reference policy.
        mask: 1 (or True) for tokens of the completion, the end token included; else 0.
        behavior_logp: log μ(y_t | y_<t) of the policy that sampled the tokens; None means π itself.
        group: (B,) labels; completions of one prompt share one. An integer tensor, or a list, tuple or NumPy array of
            integers or of strings (verl's `uid`), which becomes an integer tensor; strings are numbered in the order
            of their first appearance. Keep it on the CPU to avoid a device synchronisation.
        token_reverse_kl: KL(π(·|y_<t) ‖ ref(·|y_<t)) over the full vocabulary, differentiable towards π.
        token_forward_kl: KL(ref(·|y_<t) ‖ π(·|y_<t)), likewise.
        token_divergence: any other divergence of each token, likewise; `Divergence.over` computes it.

    Raises:
        RolloutError: if a tensor has the wrong type, shape, dtype or values.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout
        >>> logp = torch.tensor([[-1.0, -2.0], [-0.5, float("-inf")]], requires_grad=True)
        >>> ref_logp = torch.tensor([[-1.5, -2.0], [-0.5, float("nan")]])
        >>> rollout = Rollout(logp, ref_logp, mask=torch.tensor([[1, 1], [1, 0]]), group=["a", "a"])
        >>> rollout.log_ratio
        tensor([[0.5000, 0.0000],
                [0.0000, 0.0000]])
        >>> rollout.lengths
        tensor([2., 1.])
    """

    logp: Tensor
    ref_logp: Tensor
    mask: Tensor
    behavior_logp: Tensor | None = None
    group: Tensor | None = None
    token_reverse_kl: Tensor | None = None
    token_forward_kl: Tensor | None = None
    token_divergence: Tensor | None = None

    def __post_init__(self) -> None:
        optional = {name: getattr(self, name) for name in ("behavior_logp", *DIVERGENCES)}
        per_token = {"logp": self.logp, "ref_logp": self.ref_logp}
        per_token |= {name: x for name, x in optional.items() if x is not None}
        check_tensors({**per_token, "mask": self.mask})
        _check_shapes(self.logp, self.mask, per_token)
        if self.group is not None:
            object.__setattr__(self, "group", _as_index(self.group, len(self.logp)))
        mask = _as_bool(self.mask)
        _check_values({name: x.detach() for name, x in per_token.items()}, mask)
        dtype = reduce(torch.promote_types, (x.dtype for x in per_token.values()), torch.float32)
        zero = torch.zeros((), dtype=dtype, device=self.logp.device)
        for name, x in per_token.items():
            x = x if name in ("logp", *DIVERGENCES) else x.detach()
            object.__setattr__(self, name, torch.where(mask, x.to(dtype), zero))
        object.__setattr__(self, "mask", mask)

    @property
    def log_ratio(self) -> Tensor:
        """l_t = log π - log ref of the sampled token, detached; 0 where masked."""
        return self.logp.detach() - self.ref_logp

    @property
    def lengths(self) -> Tensor:
        """(B,) the number of live tokens, in the dtype of the log-probs."""
        return self.mask.sum(-1).to(self.logp.dtype)

    @property
    def sampler_logp(self) -> Tensor:
        """Log-probs of the policy that sampled the tokens: `behavior_logp`, or those of π where it is None."""
        return self.logp.detach() if self.behavior_logp is None else self.behavior_logp


def check_tensors(tensors: dict[str, object]) -> None:
    """Raise `RolloutError` for a value that is not a tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            remedy = "wrap it with torch.as_tensor" if x is not None else "pass it: only optional fields may be None"
            raise RolloutError(f"`{name}` as a torch tensor", type(x).__name__, remedy)


def _check_shapes(logp: Tensor, mask: Tensor, per_token: dict[str, Tensor]) -> None:
    if logp.ndim != 2 or 0 in logp.shape:
        raise RolloutError(
            "`logp` of shape (B, T) with B, T >= 1", f"shape {tuple(logp.shape)}", "pass one row per completion"
        )
    for name, x in {**per_token, "mask": mask}.items():
        if x.shape != logp.shape:
            raise RolloutError(
                f"`{name}` of shape {tuple(logp.shape)}, that of `logp`",
                f"shape {tuple(x.shape)}",
                f"align `{name}` with the sampled tokens: one entry per token, no prompt, no shift",
            )
    for name, x in per_token.items():
        if x.dtype not in DTYPES:
            remedy = "compute log-probs in float32; token ids are none"
            raise RolloutError(f"`{name}` of a floating dtype of 16 bits or more", str(x.dtype), remedy)


def _as_index(group: object, rows: int) -> Tensor:
    """(B,) int64 from any allowed form of labels."""
    try:
        labels = group if isinstance(group, Tensor) else _numbered(cast("Iterable[object]", group))
        is_index = labels.shape == (rows,) and not (labels.is_floating_point() or labels.is_complex())
    except (TypeError, ValueError, RuntimeError, OverflowError):  # not labels, or not of 64 bits
        labels, is_index = torch.empty(0), False
    if not is_index:
        raise RolloutError(
            f"`group` of shape ({rows},): a tensor, a list or a NumPy array of integers, or of strings",
            f"shape {tuple(group.shape)}, {group.dtype}" if isinstance(group, Tensor) else repr(group)[:60],
            "pass one prompt index per completion; numpy.unique(labels, return_inverse=True)[1] numbers any labels",
        )
    return labels.detach().to(torch.long)


def _numbered(group: Iterable[object]) -> Tensor:
    labels = list(group)
    if all(isinstance(label, str) for label in labels):
        number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        return torch.tensor([number[label] for label in labels])
    return torch.tensor([operator.index(cast("int", label)) for label in labels], dtype=torch.long)


def _as_bool(mask: Tensor) -> Tensor:
    live = mask != 0
    if mask.dtype != torch.bool and bool((live & (mask != 1)).any()):
        b, t = _first(live & (mask != 1))
        raise RolloutError(
            "a `mask` of 0 and 1",
            f"{mask[b, t].item():g} at [{b}, {t}]",
            "pass the completion mask, and multiply the loss instead of the mask by weights",
        )
    return live


def _check_values(tensors: dict[str, Tensor], mask: Tensor) -> None:
    """One device synchronisation for valid tensors; the details are looked up only for an invalid one."""
    bad = {name: mask & is_invalid(x, is_kl=name in DIVERGENCES) for name, x in tensors.items()}
    any_bad, deferred = torch.stack([flags.any() for flags in bad.values()]).any(), _deferred.get()

    def check() -> None:
        if bool(any_bad):
            name = next(name for name, flags in bad.items() if bool(flags.any()))
            b, t = _first(bad[name])
            value, place = tensors[name][b, t].item(), f"[{b}, {t}]"
            raise RolloutError(*what_is_wrong(value, name, place, is_kl=name in DIVERGENCES))

    if deferred is None:
        check()
    else:
        deferred.append(check)


def _first(flags: Tensor) -> tuple[int, int]:
    b, t = torch.nonzero(flags)[0]
    return int(b), int(t)


def is_invalid(x: Tensor, *, is_kl: bool = False) -> Tensor:
    """Whether each value is no log-prob of a sampled token, or no KL: on the wrong side of 0, or not finite."""
    beyond = (-x if is_kl else x) > ROUNDING_STEPS * torch.finfo(x.dtype).eps
    return beyond | ~torch.isfinite(x)


def what_is_wrong(value: float, name: str, place: str, *, is_kl: bool = False) -> tuple[str, str, str]:
    """The texts of an error for an invalid value of a live token: expected, received, remedy."""
    if value != value:
        remedy = "find the NaN upstream (a 0 * inf in a mask, an overflow in half precision)"
    elif value == float("-inf"):
        remedy = (
            f"`{name}` gives the sampled token probability 0: mask the position, or score with the "
            "unfiltered distribution (no top-k or top-p, no suppressed tokens)"
        )
    elif is_kl:
        remedy = (
            "compute the full-vocabulary KL in float32, of normalised distributions; truncated sums can be negative"
        )
    else:
        remedy = "pass log-softmax outputs; a positive value is a logit, a probability or a sum over tokens"
    expected = f"`{name}` finite and {'>= 0' if is_kl else '<= 0'} at every live token"
    return expected, f"{value:g} at {place}", remedy


# Cumulative sums along completions, deterministic if torch is set to be.


def running_sum(x: Tensor) -> Tensor:
    """The cumulative sum x_1 + ... + x_t along the last dimension."""
    if not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(-1)
    span = 1  # CUDA has no deterministic cumsum; doubling spans takes log2(T) steps
    while span < x.shape[-1]:
        x = torch.cat([x[..., :span], x[..., span:] + x[..., :-span]], -1)
        span *= 2
    return x

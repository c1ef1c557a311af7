"""A batch of sampled completions, checked once at the border so that nothing downstream has to."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..errors import RolloutError

ROUNDING_STEPS = 64
"""How many units in the last place a log-prob may stand above 0 before it is an error: log-probs are
made as logit minus log-sum-exp, and logits of size up to 64 round at 64 x eps of their dtype."""

KLS = ("token_reverse_kl", "token_forward_kl")
"""The fields that are no log-probs."""

OPTIONAL = ("behavior_logp", *KLS)
"""The fields per token that may be None."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Of log-probs and KLs. Narrower ones (float8) cannot even be compared with 0."""

_later: ContextVar[list[Callable[[], None]] | None] = ContextVar("_later", default=None)
"""Where checks are put off to."""


@contextmanager
def checked_at_the_end() -> Iterator[None]:
    """Rollouts that are made inside have their values checked when it ends.

    To look at values is to wait for the device: a trainer puts it where it waits anyway.
    """
    checks: list[Callable[[], None]] = []
    token = _later.set(checks)
    try:
        yield
    finally:
        _later.reset(token)
    for check in checks:
        check()


@dataclass(frozen=True, eq=False)
class Rollout:
    r"""Log-probs of sampled tokens by role, all (B, T), over the live tokens of B completions.

    Positions where `mask` is 0 are overwritten with 0 by `torch.where`, so that whatever stands there
    (-inf, NaN, padding) reaches neither a value nor a gradient. Half precision is lifted to float32.
    Everything but `logp`, `token_reverse_kl` and `token_forward_kl` is detached.

    Args:
        logp: log π(y_t | y_<t) of the policy being trained; carries the gradient.
        ref_logp: log ref(y_t | y_<t) of the anchor.
        mask: 1 (or True) where a token of the completion stands, the end token included; else 0.
        behavior_logp: log μ(y_t | y_<t) of what really sampled the tokens; None means π itself.
        group: (B,) labels; completions of one prompt share one. An integer tensor, or a list, tuple or NumPy array of
            integers or of strings (verl's `uid`), which becomes an integer tensor; strings are numbered in the order
            of their first appearance. Keep it on the CPU to avoid a device synchronisation.
        token_reverse_kl: KL(π(·|y_<t) ‖ ref(·|y_<t)) over the full vocabulary, differentiable towards π.
        token_forward_kl: KL(ref(·|y_<t) ‖ π(·|y_<t)) likewise.
    """

    logp: Tensor
    ref_logp: Tensor
    mask: Tensor
    behavior_logp: Tensor | None = None
    group: Tensor | None = None
    token_reverse_kl: Tensor | None = None
    token_forward_kl: Tensor | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("mask", "group")}
        per_token: dict[str, Any] = {name: x for name, x in given.items() if x is not None or name not in OPTIONAL}
        check_tensors({**per_token, "mask": self.mask})
        _check_shapes(self.logp, self.mask, per_token)
        if self.group is not None:
            object.__setattr__(self, "group", _as_index(self.group, len(self.logp)))
        mask = _as_bool(self.mask)
        _check_values({name: x.detach() for name, x in per_token.items()}, mask)
        dtype = torch.float32
        for x in per_token.values():
            dtype = torch.promote_types(dtype, x.dtype)
        zero = torch.zeros((), dtype=dtype, device=self.logp.device)
        for name, x in per_token.items():
            x = x if name in ("logp", *KLS) else x.detach()
            object.__setattr__(self, name, torch.where(mask, x.to(dtype), zero))
        object.__setattr__(self, "mask", mask)

    @property
    def log_ratio(self) -> Tensor:
        """l_t = log π - log ref of the sampled token, detached; 0 where masked."""
        return self.logp.detach() - self.ref_logp

    @property
    def lengths(self) -> Tensor:
        """(B,) number of live tokens, in the dtype of the log-probs."""
        return self.mask.sum(-1).to(self.logp.dtype)

    @property
    def sampler_logp(self) -> Tensor:
        """Log-probs of what sampled the tokens: `behavior_logp`, or π itself where none was given."""
        return self.logp.detach() if self.behavior_logp is None else self.behavior_logp


def check_tensors(given: dict[str, object]) -> None:
    """Raise for what is no dense tensor, or on another device than the first."""
    device = None
    for name, x in given.items():
        if not isinstance(x, Tensor):
            remedy = "wrap it with torch.as_tensor" if x is not None else "pass it: only optional fields may be None"
            raise RolloutError(f"`{name}` as a torch tensor", type(x).__name__, remedy)
        if x.layout != torch.strided:
            raise RolloutError(f"`{name}` as a dense tensor", f"layout {x.layout}", f"pass {name}.to_dense()")
        device = device or x.device
        if x.device != device:
            raise RolloutError(
                f"`{name}` on {device}, the device of `logp`", f"device {x.device}", f"pass {name}.to({str(device)!r})"
            )


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
        if not x.is_floating_point():
            raise RolloutError(f"`{name}` of a floating dtype", str(x.dtype), "pass log-probs, not token ids")
        if x.dtype not in DTYPES:
            raise RolloutError(f"`{name}` in 16 bits or more", str(x.dtype), "compute log-probs in float32")


def _as_index(group: object, rows: int) -> Tensor:
    """(B,) int64 from whatever labels the prompts."""
    found = group if isinstance(group, Tensor) else _numbered(group)
    integers = not (found.is_floating_point() or found.is_complex() or found.is_quantized)
    if found.shape != (rows,) or not integers or found.layout != torch.strided or found.is_meta:
        raise RolloutError(
            f"`group` of shape ({rows},) and an integer dtype",
            f"shape {tuple(found.shape)}, {found.dtype}, {found.layout}, on {found.device}",
            "pass one prompt index per completion, as a dense tensor, a list or a NumPy array",
        )
    return found.detach().to(torch.long)


def _numbered(group: object) -> Tensor:
    """A tensor of the labels of a list, tuple, range or NumPy array."""
    is_array = hasattr(group, "tolist") and not isinstance(group, type)
    labels = group.tolist() if is_array else group  # type: ignore[attr-defined]
    if isinstance(labels, list | tuple | range):
        if all(isinstance(label, str) for label in labels):
            number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
            labels = [number[label] for label in labels]
        try:
            return torch.tensor([operator.index(label) for label in labels], dtype=torch.long)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # not an integer, or none of 64 bits
            pass
    raise RolloutError(
        "`group` as a tensor, list or NumPy array of integers of 64 bits, or of strings",
        f"{type(group).__name__}: {repr(group)[:60]}",
        "pass one prompt index per completion; numpy.unique(labels, return_inverse=True)[1] numbers any labels",
    )


def _as_bool(mask: Tensor) -> Tensor:
    live = mask != 0
    if mask.dtype != torch.bool and bool((live & (mask != 1)).any()):
        b, t = torch.nonzero(live & (mask != 1))[0].tolist()
        raise RolloutError(
            "a `mask` of 0 and 1",
            f"{mask[b, t].item():g} at [{b}, {t}]",
            "pass the completion mask; weights belong to the loss, not to the mask",
        )
    return live


def _check_values(given: dict[str, Tensor], mask: Tensor) -> None:
    """One device synchronisation for sound tensors; the details are looked up only for a bad one."""
    bad = {name: mask & _out_of_place(name, x) for name, x in given.items()}
    found, later = torch.stack([flags.any() for flags in bad.values()]).any(), _later.get()
    if later is None:
        _tell(found, bad, given)
    else:
        later.append(lambda: _tell(found, bad, given))


def _tell(found: Tensor, bad: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    if not bool(found):
        return
    name = next(name for name, flags in bad.items() if bool(flags.any()))
    b, t = torch.nonzero(bad[name])[0].tolist()
    value = given[name][b, t].item()
    expected = f"`{name}` finite and {'>= 0' if name in KLS else '<= 0'} at every live token"
    raise RolloutError(expected, f"{value:g} at [{b}, {t}]", _remedy(name, value))


def _out_of_place(name: str, x: Tensor) -> Tensor:
    beyond = (-x if name in KLS else x) > ROUNDING_STEPS * torch.finfo(x.dtype).eps
    return beyond | ~torch.isfinite(x)


def _remedy(name: str, value: float) -> str:
    if value != value:
        return "find the NaN upstream (a 0 * inf in a mask, an overflow in half precision)"
    if value == float("-inf"):
        return (
            f"`{name}` gives the sampled token probability 0: mask the position, or score with the "
            "unfiltered distribution (no top-k or top-p, no suppressed tokens)"
        )
    if name in KLS:
        return "compute the full-vocabulary KL in float32, of normalised distributions; truncated sums can be negative"
    return "pass log-softmax outputs; a positive value is a logit, a probability or a sum over tokens"

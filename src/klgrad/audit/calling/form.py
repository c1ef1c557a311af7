"""Find, by trial, the form in which a loss wants its tensors."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from itertools import product

import torch

from ...enumeration import autoregressive
from ..batch import Batch, from_problem
from .results import scalar
from .signature import Filled
from .tensors import IGNORED, PROMPT, Form


@cache
def _trial_batch() -> Batch:
    """Four completions of up to three tokens over a vocabulary of two: no size can be taken for another one."""
    problem = autoregressive(2, 3, ends=True, seed=0, away_from_ref=0.5)
    return from_problem(problem, torch.tensor([[3, 0, 1, 2]]), torch.tensor([0.7, -1.1, 0.4, 0.3], dtype=torch.float64))


def chosen_form(function: Callable[..., object], filled: Filled, name: str) -> Form:
    """The first form that the loss accepts; the usual one if it accepts none, so that its error is about that one.

    An advantage per completion is tried before one per token: where a loss expects (B, T), it fails with (B,), since
    no size equals another; where it expects (B,), `advantages[:, None]` would silently accept (B, T) too.
    """
    for form in _forms(filled):
        used = _used_positions(function, filled, form, name)
        if used is None:
            continue
        if form.layout == "aligned" and used[:-1].any() and not used[-1]:  # it leaves the last logits out: it shifts
            moved = replace(form, layout="shifted")
            used = _used_positions(function, filled, moved, name)
            return moved if used is not None and bool(used.all()) else form
        return form
    return Form()


def _forms(filled: Filled) -> Iterator[Form]:
    advantages = ("completion", "token") if filled.uses("advantages") else ("token",)
    masks = ("bool", "int", "float") if filled.uses("mask") else ("bool",)
    labels = (IGNORED, PROMPT) if filled.uses("labels") else (IGNORED,)
    layouts = ("aligned", "shifted", "longer") if filled.uses("logits") else ("aligned",)
    for layout, label, mask, advantage in product(layouts, labels, masks, advantages):
        yield Form(advantage, mask, label, layout)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep back what the loss prints: the audit calls it again."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def _used_positions(function: Callable[..., object], filled: Filled, form: Form, name: str) -> torch.Tensor | None:
    """(T,) whether logits of a whole completion have a gradient at each position; None if the loss fails."""
    batch = _trial_batch().fresh()
    try:
        with _silence(), torch.enable_grad():
            loss = scalar(name, filled.call(function, batch.copy(), form), batch)
            if not loss.requires_grad:
                return torch.zeros(batch.logp.shape[1], dtype=torch.bool)
            (found,) = torch.autograd.grad(loss, [batch.logits], allow_unused=True)
    except Exception:  # whatever it raises: the audit calls it again, and reports the error
        return None
    if found is None:
        return torch.zeros(batch.logp.shape[1], dtype=torch.bool)
    return (found[0] != 0).any(-1)

"""Every public function that takes a mask, with holes (as tool outputs leave) and an empty completion.

Each is compared in float64 with itself on compacted rows: the live tokens of each completion moved to its beginning.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tolerances import EXACT

import klgrad
from klgrad import (
    ImportanceWeighting,
    KLResult,
    KLTerm,
    Rollout,
    Truncate,
    consistency_loss,
    credit,
    importance,
    kernels,
    kl_report,
    mismatch_report,
    policy_losses,
    reports,
    squared_sequence,
    zoo,
)
from klgrad.core.families import CHOICES
from klgrad.errors import MeaningError
from klgrad.kernels import Head
from klgrad.policy_losses import POLICY_LOSSES
from klgrad.zoo import CELLS

HOLES = torch.tensor(
    [[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 1]]
).bool()
ORDER = (~HOLES).long().argsort(dim=-1, stable=True)
GROUP = torch.tensor([0, 0, 1, 1, 1, 0])
REWARD = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 1.5], dtype=torch.float64)
VOCABULARY, WIDTH = 7, 3

Tensors = dict[str, Any]
Subject = Callable[[Tensors], Any]


def batch() -> Tensors:
    g = torch.Generator().manual_seed(0)
    logs = {name: -torch.rand(6, 5, generator=g).double() for name in ("logp", "ref_logp", "behavior_logp", "old_logp")}
    kls = {name: torch.rand(6, 5, generator=g).double() for name in ("token_reverse_kl", "token_forward_kl")}
    hidden = {name: torch.randn(6, 5, WIDTH, generator=g).double() for name in ("hidden", "ref_hidden")}
    targets = torch.randint(VOCABULARY, (6, 5), generator=g)
    return {**logs, **kls, **hidden, "targets": targets, "mask": HOLES}


def compacted(x: torch.Tensor) -> torch.Tensor:
    order = ORDER.view(*ORDER.shape, *[1] * (x.dim() - 2)).expand_as(x)
    return x.gather(1, order)


def rollout(given: Tensors, *, fresh: bool = False) -> Rollout:
    exact = {name: given["logp"] * 0 + given[name] + 0.1 * given["logp"] + 0.2 for name in given if "_kl" in name}
    behavior = None if fresh else given["behavior_logp"]
    return Rollout(given["logp"], given["ref_logp"], given["mask"], behavior, GROUP, **exact)


HEADS = [Head(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(s)).double()) for s in (1, 2)]


def statistics(given: Tensors) -> Any:
    hidden = given["hidden"] + 0.1 * given["logp"][..., None]
    models = (hidden, HEADS[0], given["targets"], given["ref_hidden"], HEADS[1])
    return kernels.token_statistics(*models, mask=given["mask"])


def of_logits(given: Tensors) -> Any:
    logits = (given["hidden"] + 0.1 * given["logp"][..., None]) @ HEADS[0].weight.T
    return kernels.from_logits(logits, given["targets"], given["ref_hidden"] @ HEADS[1].weight.T, mask=given["mask"])


def policy_loss(entry: Any, given: Tensors) -> Any:
    logits = given["hidden"] @ HEADS[0].weight.T
    known = {**given, "advantages": REWARD[:, None] - 1, "rewards": REWARD, "group": GROUP, "logits": logits}
    known |= {"tokens": given["targets"], "behavior_logits": given["ref_hidden"] @ HEADS[1].weight.T}
    return entry.loss(**{name: known[name] for name in inspect.signature(entry.loss).parameters})


def every_term() -> dict[str, KLTerm]:
    """All that may be declared, without a baseline: that of a token is a mean over the same column of the others."""
    found = {}
    weightings = [None, *(ImportanceWeighting(ratio, Truncate(2.0)) for ratio in ("token", "prefix", "sequence"))]
    options = {name: CHOICES[name] for name in ("divergence", "level", "estimator", "reduction")}
    options |= {"weighting": weightings, "discount": (0.0, 0.5, 1.0)}
    for values in product(*options.values()):
        with suppress(MeaningError):
            term = KLTerm(**dict(zip(options, values, strict=True)))
            found[term.name] = term
    return found


def of_term(term: KLTerm, given: Tensors) -> Any:
    return of_result(term(rollout(given, fresh=term.weighting is None)))


def of_rollout(found: Rollout) -> Any:
    return found.logp, found.log_ratio, found.lengths, found.sampler_logp


def of_result(found: KLResult) -> Any:
    return found.loss, found.coefficient, found.per_token, found.pathwise, *found.value, *found.diagnostics.values()


SUBJECTS: dict[str, Subject] = {
    "klgrad.core.rollout.Rollout": lambda x: of_rollout(rollout(x)),
    "klgrad.core.regularizers.consistency_loss": lambda x: consistency_loss(rollout(x), REWARD, 0.5),
    "klgrad.core.regularizers.squared_sequence": lambda x: of_result(squared_sequence(rollout(x))),
    "klgrad.reports.kl_report": lambda x: kl_report(rollout(x)).metrics(),
    "klgrad.reports.mismatch_report": lambda x: mismatch_report(x["logp"], x["behavior_logp"], x["mask"]).metrics(),
    "klgrad.core.credit.to_go": lambda x: credit.to_go(x["logp"], x["mask"], 0.5),
    "klgrad.core.credit.future": lambda x: credit.future(x["logp"], x["mask"], 0.5),
    "klgrad.core.credit.whole": lambda x: credit.whole(x["logp"], x["mask"]),
    "klgrad.kernels.fused_statistics.token_statistics": statistics,
    "klgrad.kernels.fused_statistics.from_logits": of_logits,
    "klgrad.kernels.topk.top_entries": lambda x: kernels.top_entries(
        x["hidden"], HEADS[0], x["targets"], 3, mask=x["mask"]
    ),
    "klgrad.kernels.fused_statistics.TokenStatistics.rollout": lambda x: of_rollout(statistics(x).rollout(x["mask"])),
    **{
        f"klgrad.core.importance.{f.__name__}": lambda x, f=f: f(rollout(x))
        for f in (importance.token_ratio, importance.prefix_ratio, importance.sequence_ratio)
    },
    **{
        f"klgrad.policy_losses.{f.__name__}": lambda x, f=f: f(x["logp"], x["mask"])
        for f in (policy_losses.sum_per_completion, policy_losses.mean_per_completion, policy_losses.mean_over_tokens)
    },
    **{
        f"klgrad.policy_losses.{f.__name__}": lambda x, f=f: f(x["logp"], x["old_logp"], x["mask"])
        for f in (policy_losses.sequence_ratio, policy_losses.geometric_ratio)
    },
    **{f"policy loss {name}": partial(policy_loss, entry) for name, entry in POLICY_LOSSES.items()},
    **{f"term {name}": partial(of_term, term) for name, term in every_term().items()},
    **{f"cell {name}": lambda x, cell=cell: cell(rollout(x)) for name, cell in CELLS.items()},
}


def flat(found: Any) -> list[Any]:
    """The tensors and numbers of a result."""
    if isinstance(found, dict):
        return flat(list(found.values()))
    if isinstance(found, tuple | list):
        return [x for each in found for x in flat(each)]
    return [] if found is None else [torch.as_tensor(found)]


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_mask_with_holes_is_as_compacted_rows(name):
    given = batch()
    results = []
    for make in (lambda x: x, compacted):
        made = {key: make(x) for key, x in given.items()}
        made["logp"] = made["logp"].clone().requires_grad_()
        values = flat(SUBJECTS[name](made))
        if moving := [x.sum() for x in values if x.requires_grad]:
            values += flat(torch.autograd.grad(moving, made["logp"], allow_unused=True))
        results.append(values)
    assert results[0], "nothing to compare"
    live = compacted(HOLES)
    for x, y in zip(*results, strict=True):
        if x.shape[:2] == HOLES.shape:
            x, y = compacted(x.detach())[live], y.detach()[live]
        assert bool(x.isfinite().all())
        EXACT.check(x, y)


def test_a_baseline_is_the_mean_over_the_same_column_of_the_others():
    """By definition; a masked token counts as 0 there, and has no coefficient."""
    plain, centred = (KLTerm(baseline=each)(rollout(batch(), fresh=True)) for each in ("none", "leave_one_out"))
    for row, peers in ((i, [j for j in range(6) if j != i and GROUP[j] == GROUP[i]]) for i in range(6)):
        expected = plain.coefficient[row] - plain.coefficient[peers].mean(0)
        EXACT.check(centred.coefficient[row], torch.where(HOLES[row], expected, 0))


# None is left out

MODULES = (klgrad, credit, importance, kernels, reports, policy_losses, zoo)


def taking_a_mask() -> set[str]:
    """The full names of the functions, classes and methods that the modules offer and that have a parameter `mask`."""
    found = set()
    for x in {x for module in MODULES for name, x in vars(module).items() if name[0] != "_" and callable(x)}:
        methods = [f for name, f in vars(x).items() if name[0] != "_"] if inspect.isclass(x) else []
        for f in (each for each in (x, *methods) if inspect.isfunction(each) or inspect.isclass(each)):
            if inspect.isclass(f) and issubclass(f, BaseException):
                continue
            if f.__module__.startswith("klgrad") and "mask" in inspect.signature(f).parameters:
                found.add(f"{f.__module__}.{f.__qualname__}")
    return found


def test_no_public_function_with_a_mask_is_left_out():
    found = taking_a_mask()
    assert {"klgrad.core.rollout.Rollout", "klgrad.kernels.fused_statistics.TokenStatistics.rollout"} <= found
    assert found <= SUBJECTS.keys()

"""Audit losses that are composed at random, and check every statement on the problems of `worlds`.

A statement is *false* if one problem contradicts it. A *miss* is a verdict that the audit does not give although all
problems agree on it; it is no error.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import compositions
import numpy as np
import torch
from worlds import SAME, TO_REFERENCE, Measured, all_cases, measure


@dataclass(frozen=True)
class Finding:
    """What is wrong with one audit.

    Attributes:
        kind: `false` for a statement that does not hold, `miss` for one that is missing.
        statement: a field of the audit and its value.
        why: the problem that contradicts it, or what all problems agree on.
    """

    kind: str
    statement: str
    why: str


def contradiction(verdict: str, found: list[Measured], *, scale_varies: bool = False) -> str | None:
    """The first case on which a verdict does not hold, in words; None if there is none.

    Args:
        verdict: as in `AuditResult.verdict`.
        found: the gradients.
        scale_varies: whether the multiple of the target may differ between all cases.
    """
    broken = next((m for m in found if not m.is_finite), None)
    if broken is not None:
        return f"not finite ({broken.case.family})"
    if verdict == "nothing":
        some = next((m for m in found if not m.is_zero), None)
        return None if some is None else f"not zero ({some.case.family})"
    families: dict[str, list[Measured]] = {}
    for m in found:
        families.setdefault(m.case.family, []).append(m)
    sign, target = (-1, verdict.removeprefix("climbs ")) if verdict.startswith("climbs ") else (1, verdict)
    for family, some in families.items():
        scales = []
        for m in some:
            scale, off = m.along(target)
            if m.is_zero or off > SAME:
                return f"{1.0 if m.is_zero else off:.2g} off ({family})"
            scales.append(sign * scale)
        if min(scales) <= 0:
            return f"the sign is reversed ({family})"
        if not scale_varies and max(scales) - min(scales) > SAME * max(scales):
            return f"multiples of {min(scales):.7g} to {max(scales):.7g} ({family})"
    return None


def check(recipe: compositions.Recipe, result: Any) -> list[Finding]:
    """Compare what the audit of a recipe says with the gradients here.

    Args:
        recipe: the loss.
        result: an `AuditResult`, or anything with its attributes.
    """
    fresh = _check_samples(recipe, result, fresh=True)
    stale = _check_samples(recipe, result, fresh=False)
    return [*fresh, *stale, *_check_numbers(recipe, result)]


@lru_cache(maxsize=2)
def gradients(recipe: compositions.Recipe, *, fresh: bool) -> list[Measured]:
    """On every case that says something about this recipe."""
    found = []
    for case in all_cases(fresh=fresh):
        if case.large and (recipe.rows == "ramp" or recipe.baseline == "row-before"):
            continue  # there is no exact large batch: neighbours are a sample of pairs
        if case.group == 1 and recipe.has_groups:
            continue
        ordered = recipe.has_order and recipe.rows not in ("even", "odd")
        found.append(measure(recipe, case.twice() if case.large and ordered else case))
    return found


def _check_samples(recipe: compositions.Recipe, r: Any, *, fresh: bool) -> list[Finding]:
    """The verdicts on fresh or on stale samples."""
    suffix = "" if fresh else "_off_policy"
    verdict, holds = (getattr(r, f"{name}{suffix}") for name in ("verdict", "holds"))
    varies = r.anatomy.baseline.spread != "none"
    everywhere = gradients(recipe, fresh=fresh)
    whole = [m for m in everywhere if not m.case.has_hole]
    if r.stumbles_over_gaps:  # the audit says that the verdict does not hold there
        everywhere = whole
    large = [m for m in whole if m.case.large]
    findings = []
    if verdict not in ("unknown", "sum-of-targets"):
        said = f"{verdict} ({holds}{', scale varies' if varies else ''})"
        why = contradiction(verdict, large if holds == "large-batches" else everywhere, scale_varies=varies)
        if why is not None:
            findings.append(Finding("false", f"verdict{suffix}={said}", why))
        elif holds == "large-batches" and large and contradiction(verdict, everywhere, scale_varies=varies) is None:
            findings.append(Finding("miss", f"verdict{suffix}={said}", "holds in batches of every size"))
    names = ("nothing", *(TO_REFERENCE if fresh else everywhere[0].case.world.targets))
    if verdict == "unknown":
        for name in (x for n in names for x in ((n,) if n == "nothing" else (n, f"climbs {n}"))):
            for size, some in (("every size", whole), ("large batches", large)):
                if some and contradiction(name, some) is None:
                    return [*findings, Finding("miss", f"verdict{suffix}=unknown", f"{name} in {size}")]
    if fresh:
        findings += _check_fields(recipe, r, everywhere)
    return findings


NOTHING = 1e-12
"""Size of a gradient that is 0: the order of a sum changes its rounding."""


def _check_fields(recipe: compositions.Recipe, r: Any, found: list[Measured]) -> Iterator[Finding]:
    """Statements about all batches on fresh samples."""
    no_holes = [m for m in found if not m.case.large and not m.case.has_hole]
    proved = r.anatomy.proved_fresh
    if proved and r.finite and not all(m.is_finite for m in no_holes if m.case.members.shape[1] == m.case.group):
        yield Finding("false", "proved", "not finite on a small batch")
    if proved and not r.anatomy.leaks and any(m.on_padding for m in no_holes if m.is_finite):
        yield Finding("false", "leaks=False", "a masked position has a gradient")
    if proved:
        for m in (m for m in found if m.case.large and m.case.members.shape[1] < 5000):
            moved = measure(recipe, replace(m.case, members=m.case.members[:, ::-1]))
            if np.linalg.norm(moved.mean - m.mean) > max(SAME * m.typical, NOTHING):
                yield Finding("false", "proved", f"another order has another gradient ({m.case.family})")
                break
    if not r.depends_on_reference:
        for m in no_holes:
            moved = replace(m.case.world, reference=m.case.world.reference[:, ::-1])
            there = measure(recipe, replace(m.case, world=moved))
            if abs(there.typical - m.typical) > SAME * m.typical:
                yield Finding("false", "depends_on_reference=False", f"another ref has another one ({m.case.family})")
                return


LOG_RATIOS = (1.0, 1.8, 2.4, 3.3, 4.2, 5.5, 6.5, 8.0, 9.5, 11.0, 13.0, 15.5, 18.0, 22.0, 27.0, 29.5)
EXTREMES = (40.0, 85.0, 95.0, 300.0, 2000.0, 8000.0)
ROWS = ((-0.4, -1.3), (-0.9, -0.7), (-1.6, -0.2))
REFERENCE_ROWS = ((-0.8, -1.1), (-0.7, -1.0), (-1.2, -0.6))
"""Log-probs of a batch in which the log-ratio of one token is varied."""


def coefficient(recipe: compositions.Recipe, log_ratio: float, kind: torch.dtype) -> tuple[float, bool]:
    """The derivative by one token's log-prob on fresh samples, and whether loss and gradient are finite."""
    logp, ref = (torch.tensor(x, dtype=torch.float64) for x in (ROWS, REFERENCE_ROWS))
    ref[0, 0] = logp[0, 0]
    logp[0, 0] += min(log_ratio, 0.0)
    ref[0, 0] -= max(log_ratio, 0.0)
    logp, ref = (x.to(kind)[None] for x in (logp, ref))
    old = logp.clone()
    logp.requires_grad_()
    value = compositions.evaluate(recipe, compositions.Batches(logp, ref, old, torch.ones_like(logp), len(ROWS)))
    if not value.requires_grad:
        return 0.0, bool(value.isfinite().all())
    (by,) = torch.autograd.grad(value.sum(), logp)
    return float(by[0, 0, 0]), bool(value.isfinite().all() and by.isfinite().all())


def _check_numbers(recipe: compositions.Recipe, r: Any) -> Iterator[Finding]:
    """Dead zones, and finite numbers in float32."""
    if not r.anatomy.proved_fresh or recipe.needs_logits or recipe.weight != "none" or recipe.rows != "all":
        return  # a filter has zeros that are no zone of the log-ratio
    if r.finite:
        for x in (*LOG_RATIOS, *EXTREMES):
            for sign in (-1, 1):
                if not coefficient(recipe, sign * x, torch.float32)[1]:
                    yield Finding("false", "finite=True", f"not finite in float32 at log π/ref = {sign * x:g}")
                    return
    for sign, name in ((-1, "dead_below"), (1, "dead_above")):
        dead = getattr(r, name)
        low, high = (
            [coefficient(recipe, sign * x, kind)[0] for x in LOG_RATIOS] for kind in (torch.float32, torch.float64)
        )
        if dead is None:
            if high[0] != 0 and not any(high[LOG_RATIOS.index(22.0) :]):
                yield Finding("false", f"{name}=None", f"no gradient at log π/ref = {sign * 22} and beyond")
            continue
        if recipe.reward is not None and recipe.horizon != "own":  # the credit of other tokens stays
            low, high = ([x - some[-1] for x in some] for some in (low, high))
        beyond = [(x, a, b) for x, a, b in zip(LOG_RATIOS, low, high, strict=True) if x > abs(dead)]
        alive = next((x for x, a, b in beyond if a != 0 and abs(a - b) <= 0.01 * abs(b)), None)
        if alive is not None:
            yield Finding("false", f"{name}={dead:g}", f"a gradient at log π/ref = {sign * alive:g}")


def hunt_one(seed: int, number: int) -> tuple[int, compositions.Recipe, str, list[Finding]]:
    """Audit one composed loss: its number, recipe and verdicts, and what is wrong with them."""
    from klgrad.audit import audit

    recipe = compositions.draw(seed, number)
    try:
        result = audit(compositions.composed(recipe), name=f"loss {number}")
    except Exception as error:
        return number, recipe, "", [Finding("false", "no error", f"{type(error).__name__}: {error}")]
    with np.errstate(all="ignore"):
        found = check(recipe, result)
    return number, recipe, f"{result.verdict} / {result.verdict_off_policy}", found


def hunt(count: int, seed: int, jobs: int = 1, only: int | None = None) -> list[str]:
    """Audit composed losses, print what is missing and what is false, and return the false statements."""
    numbers = range(count) if only is None else [only]
    false, misses, verdicts = [], [], {}
    for number, recipe, verdict, found in _results(numbers, seed, jobs):
        if only is not None:
            print(recipe, verdict, *found, sep="\n")
        for name in verdict.split(" / "):
            verdicts[name] = verdicts.get(name, 0) + 1
        for x in found:
            line = f"{number} | {recipe} | {x.statement} | {x.why}"
            (false if x.kind == "false" else misses).append(line)
            if x.kind == "false":
                print(line, flush=True)
        if number % 50 == 49:
            print(f"{number + 1} of {count} losses, {len(false)} false statements, {len(misses)} misses", flush=True)
    print("verdicts:", ", ".join(f"{n} {name}" for name, n in sorted(verdicts.items(), key=lambda x: -x[1])))
    if misses:
        print("missed: loss | recipe | statement | all problems agree on", *misses, sep="\n")
    return ["composed loss " + line for line in false]


def _results(numbers: Any, seed: int, jobs: int) -> Iterator[tuple[int, compositions.Recipe, str, list[Finding]]]:
    one: Callable[[int], Any] = _Hunt(seed)
    if jobs == 1:
        yield from map(one, numbers)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(one, numbers)


@dataclass(frozen=True)
class _Hunt:
    """`hunt_one` of one seed, for other processes."""

    seed: int

    def __call__(self, number: int) -> tuple[int, compositions.Recipe, str, list[Finding]]:
        torch.set_num_threads(1)
        return hunt_one(self.seed, number)

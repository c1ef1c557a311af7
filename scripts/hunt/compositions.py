"""KL losses that are composed at random from the parts that public recipes have."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

FULL = ("exact", "exact-forward", "exact-js", "exact-entries", "exact-bounded", "top-k", "top-k-normalised", "tempered")
"""Curves of the whole vocabulary."""

SAMPLED = ("k1", "k2", "k3", "abs", "k-lambda", "chi-square", "js", "huber")
"""Curves of the sampled token's log-ratio."""


@dataclass(frozen=True)
class Recipe:
    """The parts of a loss; the defaults are k2 of each token, summed over the completion and averaged over rows.

    Attributes:
        loss: the curve that is differentiated; None for a loss that is all in the reward.
        reward: the curve that is detached and multiplies the scores; None for a loss without.
        number: the λ of `k-lambda`, the bound of `huber`, `exact-entries` and `exact-bounded`, the k of `top-k`, or
            the temperature.
        clamp: the largest value of either curve.
        horizon: which tokens' rewards a score is multiplied by. `last` puts the whole completion's reward on the token
            `mask.sum(-1) - 1`, and adds up backwards.
        discount: of the reward of later tokens, for `to-go`.
        baseline: what is subtracted from the reward of a row.
        spread: the standard deviation that the reward is divided by.
        epsilon: added to that deviation.
        divide: what the sum over a completion is divided by; `halves` is the mean of the token means of two halves.
        ratio: the importance ratio; `before` is the product over the tokens before this one.
        bound, at: what happens to ratios above `at`; `gate` leaves these tokens out, and the ratio weighs no other.
        through: whether the ratio is differentiated.
        inside: whether the ratio multiplies each token's reward, instead of the score that it ends up on.
        weight, level: a factor of each token, without gradient: its `probability`; `unsure` leaves out tokens with
            π >= level, `sure` those below; `below` those with log π/ref above level; `entropy` and `unpeaked`
            (1 - max π) look at the prefix.
        reduce: over rows.
        mask: whether it is used.
        rows: which rows count. `even` and `odd` are zero in batches of another number of rows, `ramp` weighs row i
            with i + 1.
        outer: of the whole loss; `square` makes its strength grow with its value.
        factor: of everything.
    """

    loss: str | None = "k2"
    reward: str | None = None
    number: float = 1.0
    clamp: float | None = None
    horizon: Literal["own", "to-go", "later", "whole", "last"] = "own"
    discount: float = 1.0
    baseline: Literal["none", "leave-one-out", "group", "batch", "other-half", "row-before"] = "none"
    spread: Literal["none", "group", "batch"] = "none"
    epsilon: float = 0.0
    divide: Literal["none", "completion", "tokens", "fixed", "halves"] = "none"
    ratio: Literal["none", "token", "prefix", "before", "sequence"] = "none"
    bound: Literal["none", "truncate", "mask", "clip", "gate"] = "none"
    at: float = 1.0
    through: bool = False
    inside: bool = False
    weight: Literal["none", "unsure", "sure", "below", "entropy", "unpeaked", "first", "probability"] = "none"
    level: float = 0.0
    reduce: Literal["mean", "sum"] = "mean"
    mask: Literal["kept", "forgotten"] = "kept"
    rows: Literal["all", "even", "odd", "first-half", "ramp"] = "all"
    outer: Literal["none", "square"] = "none"
    factor: float = 1.0

    def __str__(self) -> str:
        shown = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{name}={x:.4g}" if isinstance(x, float) else f"{name}={x}" for name, x in shown) or "k2"

    @property
    def needs_logits(self) -> bool:
        """Whether the loss looks at the whole vocabulary."""
        return self.loss in FULL or self.reward in FULL or self.weight in ("entropy", "unpeaked")

    @property
    def has_order(self) -> bool:
        """Whether the order of the rows of a batch matters."""
        return self.baseline in ("other-half", "row-before") or self.divide == "halves" or self.rows != "all"

    @property
    def has_groups(self) -> bool:
        """Whether the rows of a group influence each other."""
        return self.baseline in ("leave-one-out", "group") or self.spread == "group"


@dataclass(frozen=True)
class Batches:
    """M batches of R rows: (M, R, T) tensors and (M, R, T, V) logits; `group` rows in a row have one prompt."""

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    mask: Tensor
    group: int
    logits: Tensor | None = None
    ref_logits: Tensor | None = None


def composed(recipe: Recipe) -> Callable[..., Tensor]:
    """The loss of a recipe as a user would write it, of the tensors of one batch."""

    def loss(logp, ref_logp, old_logp, mask, group):
        size = int((group == group[0]).sum())
        return evaluate(recipe, Batches(logp[None], ref_logp[None], old_logp[None], mask[None], size))[0]

    def loss_of_logits(logp, ref_logp, old_logp, mask, group, logits, ref_logits):
        size, whole = int((group == group[0]).sum()), (logits[None], ref_logits[None])
        return evaluate(recipe, Batches(logp[None], ref_logp[None], old_logp[None], mask[None], size, *whole))[0]

    return loss_of_logits if recipe.needs_logits else loss


def evaluate(recipe: Recipe, x: Batches) -> Tensor:
    """(M,) the loss of each batch."""
    live = torch.ones_like(x.logp) if recipe.mask == "forgotten" else x.mask.to(x.logp.dtype)
    ratio = _ratio(recipe, x, live)
    kept = ratio if recipe.through else ratio.detach()
    each = torch.zeros_like(x.logp)
    if recipe.loss is not None:
        each = each + kept * _curve(recipe, recipe.loss, x, in_loss=True)
    if recipe.reward is not None:
        value = _curve(recipe, recipe.reward, x, in_loss=False).detach() * live
        returns = _returns(recipe, value * ratio.detach() if recipe.inside else value, live)
        returns = returns - _baseline(recipe, returns, x.group)
        returns = returns / _spread(recipe, returns, live, x.group)
        if recipe.inside:
            each = each + returns * x.logp
        else:
            each = each + returns * (ratio if recipe.through else ratio.detach() * x.logp)
    rows = _rows(recipe, x.logp)
    each = each * _weight(recipe, x).detach() * live * rows[:, None]
    total = _divided(recipe, each, live)
    return recipe.factor * (total.square() if recipe.outer == "square" else total)


def _curve(recipe: Recipe, name: str, x: Batches, *, in_loss: bool) -> Tensor:
    """(M, R, T) the estimate of a curve; in the loss its derivative by log π is the coefficient."""
    if name in FULL:
        found = _full(recipe, name, x)
    else:
        log_ratio = x.logp - x.ref_logp
        found = {
            "k1": lambda: log_ratio,
            "k2": lambda: log_ratio.square() / 2,
            "k3": lambda: torch.expm1(-log_ratio) + log_ratio,
            "abs": lambda: log_ratio.abs(),
            "k-lambda": lambda: log_ratio + recipe.number * torch.expm1(-log_ratio),
            "chi-square": lambda: torch.expm1(log_ratio) - log_ratio,
            "js": lambda: _jensen_shannon(log_ratio, x.logp, in_loss=in_loss),
            "huber": lambda: torch.nn.functional.huber_loss(x.logp, x.ref_logp, reduction="none", delta=recipe.number),
        }[name]()
    return found if recipe.clamp is None else found.clamp(max=recipe.clamp)


def _jensen_shannon(log_ratio: Tensor, logp: Tensor, *, in_loss: bool) -> Tensor:
    pull = log_ratio - torch.nn.functional.softplus(log_ratio) + math.log(2)
    if in_loss:
        return pull.detach() * logp
    return pull + (math.log(2) - torch.nn.functional.softplus(log_ratio)) * torch.exp(-log_ratio)


def _full(recipe: Recipe, name: str, x: Batches) -> Tensor:
    assert x.logits is not None
    assert x.ref_logits is not None
    heat = recipe.number if name == "tempered" else 1.0
    logp, ref = ((z / heat).log_softmax(-1) for z in (x.logits, x.ref_logits))
    if name == "exact-forward":
        return (ref.exp() * (ref - logp)).sum(-1)
    if name == "exact-js":
        middle = torch.logaddexp(logp, ref) - math.log(2)
        return (logp.exp() * (logp - middle) + ref.exp() * (ref - middle)).sum(-1)
    terms = logp.exp() * (logp - ref)
    if name == "exact-entries":
        return terms.clamp(max=recipe.number).sum(-1)
    if name == "exact-bounded":
        return terms.sum(-1).clamp(max=recipe.number)
    if name.startswith("top-k"):
        top = logp.topk(min(int(recipe.number), logp.shape[-1]), -1).indices
        logp, ref = logp.gather(-1, top), ref.gather(-1, top)
        if name == "top-k-normalised":
            logp, ref = logp.log_softmax(-1), ref.log_softmax(-1)
        return (logp.exp() * (logp - ref)).sum(-1)
    return terms.sum(-1)


def _ratio(recipe: Recipe, x: Batches, live: Tensor) -> Tensor:
    log = (x.logp - x.old_logp) * live
    found = {
        "none": lambda: torch.zeros_like(log),
        "token": lambda: log,
        "prefix": lambda: log.cumsum(-1),
        "before": lambda: log.cumsum(-1) - log,
        "sequence": lambda: log.sum(-1, keepdim=True).expand_as(log),
    }[recipe.ratio]().exp()
    if recipe.bound == "truncate":
        return found.clamp(max=recipe.at)
    if recipe.bound == "clip":
        return found.clamp(1 / recipe.at, recipe.at)
    if recipe.bound == "gate":
        return (found <= recipe.at).to(found.dtype)
    if recipe.bound == "mask":
        return torch.where(found <= recipe.at, found, torch.zeros_like(found))
    return found


def _returns(recipe: Recipe, value: Tensor, live: Tensor) -> Tensor:
    if recipe.horizon == "own":
        return value
    if recipe.horizon == "whole":
        return value.sum(-1, keepdim=True).expand_as(value)
    if recipe.horizon == "last":
        last = (live.sum(-1, keepdim=True) - 1).clamp(min=0).long()
        value = torch.zeros_like(value).scatter(-1, last, value.sum(-1, keepdim=True))
        return value.flip(-1).cumsum(-1).flip(-1)
    found = [torch.zeros_like(value[..., 0])]
    for column in reversed(value.unbind(-1)):
        found.append(column + recipe.discount * found[-1])
    whole = torch.stack(found[:0:-1], -1)
    return whole - value if recipe.horizon == "later" else whole


def _baseline(recipe: Recipe, returns: Tensor, size: int) -> Tensor:
    m, r, t = returns.shape
    groups = returns.reshape(m, r // size, size, t)
    if recipe.baseline == "leave-one-out":
        return ((groups.sum(2, keepdim=True) - groups) / (size - 1)).reshape(m, r, t)
    if recipe.baseline == "group":
        return groups.mean(2, keepdim=True).expand_as(groups).reshape(m, r, t)
    if recipe.baseline == "batch":
        return returns.mean(1, keepdim=True)
    if recipe.baseline == "row-before":
        return returns.roll(1, 1)
    if recipe.baseline == "other-half":
        half = r // 2
        one, other = (part.mean(1, keepdim=True) for part in (returns[:, :half], returns[:, half:]))
        return torch.cat([other.expand(-1, half, -1), one.expand(-1, r - half, -1)], 1)
    return torch.zeros_like(returns)


def _spread(recipe: Recipe, returns: Tensor, live: Tensor, size: int) -> Tensor | float:
    if recipe.spread == "none":
        return 1.0
    m, r = returns.shape[:2]
    if recipe.spread == "batch":
        mean = (returns * live).sum((1, 2), keepdim=True) / live.sum((1, 2), keepdim=True)
        square = ((returns - mean).square() * live).sum((1, 2), keepdim=True) / live.sum((1, 2), keepdim=True)
        return square.sqrt() + recipe.epsilon
    first = returns[..., :1].reshape(m, r // size, size, 1)
    return first.std(2, keepdim=True).expand_as(first).reshape(m, r, 1) + recipe.epsilon


def _weight(recipe: Recipe, x: Batches) -> Tensor:
    if recipe.weight == "none":
        return torch.ones_like(x.logp)
    if recipe.weight == "probability":
        return x.logp.exp()
    if recipe.weight == "first":
        return (torch.arange(x.logp.shape[-1]) == 0).to(x.logp.dtype).expand_as(x.logp)
    if recipe.weight in ("unsure", "sure"):
        return ((x.logp.exp() >= recipe.level) == (recipe.weight == "sure")).to(x.logp.dtype)
    if recipe.weight == "below":
        return (x.logp - x.ref_logp <= recipe.level).to(x.logp.dtype)
    assert x.logits is not None
    logp = x.logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1) if recipe.weight == "entropy" else 1 - logp.exp().amax(-1)


def _rows(recipe: Recipe, logp: Tensor) -> Tensor:
    """(R,) the factor of each row."""
    r, number = logp.shape[1], torch.arange(logp.shape[1]).to(logp.dtype)
    if recipe.rows == "first-half":
        return (number < (r + 1) // 2).to(logp.dtype)
    if recipe.rows == "ramp":
        return number + 1
    return torch.full_like(number, float({"all": True, "even": r % 2 == 0, "odd": r % 2 == 1}[recipe.rows]))


def _divided(recipe: Recipe, each: Tensor, live: Tensor) -> Tensor:
    """(M,) from the terms of tokens to the loss."""
    r, tokens = each.shape[1], live.sum((1, 2))
    if recipe.divide == "tokens":
        return each.sum((1, 2)) / tokens
    if recipe.divide == "halves":
        half = (r + 1) // 2
        parts = zip(each.split(half, 1), live.split(half, 1), strict=True)
        return torch.stack([some.sum((1, 2)) / n.sum((1, 2)) for some, n in parts]).mean(0)
    rows = each.sum(-1)
    if recipe.divide == "completion":
        rows = rows / live.sum(-1)
    if recipe.divide == "fixed":
        rows = rows / each.shape[-1]
    return rows.mean(1) if recipe.reduce == "mean" else rows.sum(1)


BASES = (
    *(Recipe(loss=name) for name in ("k1", "k2", "k2", "k3", "k3", "exact", "exact", "exact-forward")),
    *(Recipe(loss=None, reward="k1", horizon=h) for h in ("own", "to-go", "to-go", "whole", "last")),
    *(Recipe(loss=None, reward="k1", horizon="whole", baseline=b) for b in ("leave-one-out", "batch", "other-half")),
    Recipe(loss="k2", reward="k3", horizon="later"),
    Recipe(loss="k3", reward="k3"),
    Recipe(loss="k3", ratio="token", through=True),
    Recipe(loss="k2", ratio="token"),
    Recipe(loss="k2", ratio="prefix"),
    Recipe(loss="exact", ratio="before"),
    Recipe(loss="exact", reward="exact", horizon="later"),
    Recipe(loss=None, reward="k1", horizon="to-go", ratio="prefix", inside=True),
    Recipe(loss=None, reward="k1", horizon="whole", ratio="sequence"),
    Recipe(loss=None, reward="k3", horizon="whole"),
    Recipe(loss="k2", divide="tokens"),
)
"""Losses that mostly have a verdict. What is composed differs from one of them in at most three parts."""


def draw(seed: int, number: int) -> Recipe:
    """The recipe of one case."""
    rng = random.Random(f"{seed}/{number}")
    recipe = rng.choice(BASES)
    for part in rng.sample(sorted(PARTS), rng.choice((0, 1, 1, 1, 2, 2, 3))):
        recipe = replace(recipe, **PARTS[part](rng, recipe))
    return recipe


def _another_curve(rng: random.Random, recipe: Recipe) -> dict[str, object]:
    place = "loss" if recipe.reward is None or (recipe.loss is not None and rng.random() < 0.5) else "reward"
    name = rng.choice((*SAMPLED, *FULL))
    number = {
        "k-lambda": lambda: rng.uniform(0.2, 3),
        "huber": lambda: rng.uniform(0.3, 5),
        "exact-entries": lambda: rng.uniform(0.2, 3),
        "exact-bounded": lambda: rng.uniform(0.2, 5),
        "tempered": lambda: rng.uniform(0.5, 2),
        "top-k": lambda: 2.0,
        "top-k-normalised": lambda: 2.0,
    }.get(name, lambda: 1.0)()
    return {place: name, "number": number}


def _another_weight(rng: random.Random, _: Recipe) -> dict[str, object]:
    weight = rng.choice(("unsure", "unsure", "sure", "below", "entropy", "unpeaked", "first", "probability"))
    return {"weight": weight, "level": rng.uniform(-3, 5) if weight == "below" else rng.uniform(0.3, 0.95)}


def _another_ratio(rng: random.Random, _: Recipe) -> dict[str, object]:
    return {
        "ratio": rng.choice(("token", "prefix", "before", "sequence")),
        "bound": rng.choice(("none", "truncate", "truncate", "mask", "clip", "gate")),
        "at": rng.choice((1.2, 2.0, 5.0, 10.0, rng.uniform(23, 60), rng.uniform(60, 300), rng.uniform(300, 1000))),
        "through": rng.random() < 0.3,
    }


def _another_spread(rng: random.Random, recipe: Recipe) -> dict[str, object]:
    if recipe.reward is None:
        return {"outer": "square"}
    return {
        "spread": rng.choice(("group", "batch")),
        "epsilon": rng.choice((0.0, 1e-8, 1e-4)),
        "baseline": rng.choice((recipe.baseline, "group", "batch")),
    }


def _in_reward(choice: dict[str, tuple[object, ...]]) -> Callable[[random.Random, Recipe], dict[str, object]]:
    """Parts that matter in the reward only; a loss without one is moved there."""
    moved = lambda recipe: {} if recipe.reward is not None else {"loss": None, "reward": recipe.loss}
    return lambda rng, recipe: moved(recipe) | {name: rng.choice(some) for name, some in choice.items()}


def _one_of(choice: dict[str, tuple[object, ...]]) -> Callable[[random.Random, Recipe], dict[str, object]]:
    return lambda rng, _: {name: rng.choice(some) for name, some in choice.items()}


PARTS: dict[str, Callable[[random.Random, Recipe], dict[str, object]]] = {
    "curve": _another_curve,
    "other curve": _another_curve,
    "clamp": lambda rng, _: {"clamp": rng.choice((rng.uniform(0.3, 3), rng.uniform(3, 11)))},
    "horizon": _in_reward({"horizon": ("own", "to-go", "later", "whole", "last"), "discount": (1.0, 1.0, 0.9, 0.5)}),
    "baseline": _in_reward({"baseline": ("leave-one-out", "group", "batch", "other-half", "row-before")}),
    "spread": _another_spread,
    "divide": _one_of({"divide": ("completion", "tokens", "fixed", "halves")}),
    "ratio": _another_ratio,
    "bounded ratio": _another_ratio,
    "inside": lambda rng, recipe: _another_ratio(rng, recipe) | {"inside": True, "through": False},
    "weight": _another_weight,
    "reduce": _one_of({"reduce": ("sum",)}),
    "mask": _one_of({"mask": ("forgotten",)}),
    "rows": _one_of({"rows": ("even", "odd", "first-half", "ramp")}),
    "factor": lambda rng, _: {"factor": rng.choice((-1.0, 0.04, 2.0))},
}
"""By name, a change of one part."""

"""Take a whole policy loss apart: its ratio and the weight of each score, its advantages, its unit, its drift, its KL.

The derivative of a loss by the log-prob of a token, with reversed sign, is what the loss puts on that token's score.
Here the ratios π/μ and the advantages are chosen freely, and it is read: as a curve of the ratio where the advantage is
positive and where it is negative, and as a function of the advantages of the group. The parts are a formula, which is
compared with the loss at random inputs and with its gradient summed over every outcome of small problems.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..policy_losses import PolicyLoss, PolicyParts, Ratio, Weight
from ..targets import Verdict
from .anatomy import MIXED, PLACE, ROUNDED, read_anatomy
from .parts import UNITS, Anatomy, Baseline, Unit
from .probes import (
    EXACT,
    HIGHEST_TWIN,
    ROWS,
    SINGLE,
    TOKENS,
    WIDTH,
    Batch,
    ProbeInputs,
    bisect,
    from_problem,
    is_single,
    round_short,
)
from .procedure import advantage_of, enumerate_gradients, fresh_name, proof_cases, stale_name
from .subject import Parts, Subject, all_finite, as_subject, evaluate, sum_over_rows

# Inputs and answers.

REACH = 9.0
"""The largest |log r| of a curve: clamps beyond it, which only prevent an overflow, are not told."""

STEPS = [1e-5 * 2 ** (k / 2) for k in range(40)] + [REACH]
GRID = torch.tensor([*(-x for x in reversed(STEPS)), 0.0, *STEPS], dtype=torch.float64)
"""Log-ratios of a curve. They are close at 0, where the bounds of a geometric mean may be 0.0003 apart."""


class Answer(NamedTuple):
    """What a loss answers.

    Attributes:
        weight: (B, T) what it puts on the score of each token, without what it puts there without advantages.
        entries: (B, T) by how much the coefficients of the vocabulary's entries differ.
    """

    weight: Tensor
    entries: Tensor


class PolicyReader:
    """Asks one loss: what it puts on the scores at chosen ratios and advantages."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        random = ProbeInputs.at_random(MIXED, WIDTH, stale=0.02, highest=HIGHEST_TWIN)
        rewards = draw_rewards(ROWS)
        answers = [evaluate(self.subject, _batch_of(random, rewards))[1] for _ in range(2)]
        self.deterministic = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*answers, strict=True))
        self.finite = all_finite(answers[0])
        self.highest = HIGHEST_TWIN if subject.is_given_logits or bool(answers[0].logits.any()) else -1e-6
        none = evaluate(self.subject, _batch_of(random, torch.zeros(ROWS)))[1]
        # A deviation of 0 gives 0/0: the loss then has no value without advantages, and no KL can be told.
        self.finite_at_zero = all_finite(none)
        self.has_rest = self.finite_at_zero and any(bool(x.any()) for x in none)
        nudged = lambda step: evaluate(
            self.subject, _batch_of(replace(random, log_weight=random.log_weight + step), rewards)
        )[1]
        self.same = SINGLE if self.finite and is_single(answers[0], nudged) else 10 * EXACT

    def read(self, inputs: ProbeInputs, rewards: Tensor, of: str = "both") -> Answer:
        """What the loss answers to rewards, (B,); `of` is the sampler that is moved: `old`, `behavior` or both."""
        batch = _batch_of(inputs, rewards, of)
        parts = self.derivatives(batch)
        own = parts.logits[..., 0] - parts.logits[..., 1]
        others = (parts.logits / batch.logits.detach().exp())[..., 1:]
        return Answer(-parts.logp - own, others.amax(-1) - others.amin(-1))

    def derivatives(self, batch: Batch) -> Parts:
        """The derivatives of the loss, less those without advantages."""
        parts = evaluate(self.subject, batch)[1]
        if not self.has_rest:
            return parts
        none = torch.zeros_like(batch.advantages)
        rest = evaluate(self.subject, replace(batch, advantages=none, rewards=none[:, 0]).fresh())[1]
        return Parts(*(a - b for a, b in zip(parts, rest, strict=True)))

    def curve(self, log_ratios: Tensor, spread: float | None) -> Tensor:
        """(2, N, T) the weights as a ratio takes these values, for A > 0 and A < 0, relative to the larger at ratio 1.

        Args:
            log_ratios: (N,).
            spread: what each token of a completion gets of it; None for one token that gets all.
        """
        x = torch.cat([torch.zeros(2 - len(log_ratios) % 2), log_ratios]).double()  # the first is the ratio 1
        at = x.view(-1, 1, 2).expand(-1, 2, 2).reshape(-1, 1)  # in each group two of A > 0, and the same of A < 0
        base = ProbeInputs.at_reference([TOKENS] * len(at), WIDTH)
        here = torch.arange(WIDTH) == PLACE[1] if spread is None else base.mask.double() * spread
        weight = self.read(replace(base, log_weight=at * here), balanced(len(at))).weight[:, :TOKENS]
        weight = weight.view(-1, 2, 2, TOKENS).transpose(0, 1).reshape(2, -1, TOKENS)
        weight = weight * torch.tensor([1.0, -1.0]).double()[:, None, None]
        one = weight[:, 0, PLACE[1]]
        return (weight / one[one.abs().argmax()])[:, -len(log_ratios) :]


def _batch_of(inputs: ProbeInputs, rewards: Tensor, of: str = "both") -> Batch:
    rewards = rewards.double()
    batch = inputs.batch()
    batch = replace(batch, rewards=rewards, advantages=rewards[:, None].expand_as(batch.mask).clone())
    if of == "old":
        return replace(batch, behavior_logp=batch.logp.detach(), behavior_logits=batch.logits.detach()).fresh()
    return replace(batch, old_logp=batch.logp.detach()).fresh() if of == "behavior" else batch


def balanced(rows: int) -> Tensor:
    """(B,) rewards of 1 and -1, whose mean is 0 in every group of four: all baselines leave them as they are."""
    return torch.tensor([1.0, 1.0, -1.0, -1.0]).double().repeat(rows // 4)


def draw_rewards(rows: int, seed: int = 0) -> Tensor:
    """(B,) random rewards, which float32 has too."""
    return torch.randn(rows, generator=torch.Generator().manual_seed(seed)).float().double() + 0.25


# The formula.


@dataclass(frozen=True)
class Drift:
    """The update on stale samples where every completion has the same advantage: a right policy gradient has none.

    Attributes:
        size: its length relative to that without any ratio, averaged over the problems of the proof.
        towards_sampler: its mean cosine with the descent of KL(μ‖π): 1 is to the sampler, -1 away from it; 0 for none.
    """

    size: float
    towards_sampler: float


@dataclass(frozen=True, eq=False)
class PolicyAnatomy:
    """What a policy loss is made of. `predict` is the formula that the parts are.

    Attributes:
        parts: ratio, weights, advantages and unit.
        unit: what it divides by.
        scale: by which factor it multiplies the update.
        epsilon: what is added to the deviation.
        population: whether the deviation is that of all n, and not with n - 1.
        compares: with which log-probs the ratio compares π: `old`, `behavior`, both, or none.
        ask: reads the weight for A > 0 and A < 0 at any log-ratios.
        leaks: whether masked positions have a gradient.
        deterministic, finite: whether the same inputs give the same finite numbers.
        finite_if_equal: whether they are finite where all rewards are equal.
        has_rest: whether there is a gradient without advantages.
        drift: under the advantages 1 and -1; empty if it was not measured.
        unexplained: by probe, the share of the weights that the formula does not have.
        allowed: the share that rounding may leave.
    """

    parts: PolicyParts
    unit: Unit = UNITS[0]
    scale: float = 0.0
    epsilon: float = 0.0
    population: bool = False
    compares: tuple[str, ...] = ()
    ask: Callable[[Tensor], Tensor] = field(default=torch.zeros_like, repr=False)
    leaks: bool = False
    deterministic: bool = True
    finite: bool = True
    finite_if_equal: bool = True
    has_rest: bool = False
    drift: tuple[Drift, ...] = ()
    unexplained: dict[str, float] = field(default_factory=dict)
    allowed: float = ROUNDED

    @property
    def proved(self) -> bool:
        """Whether the formula is the loss at all probes and on all problems."""
        return bool(self.unexplained) and max(self.unexplained.values()) <= self.allowed and not self.leaks

    @property
    def removes_drift(self) -> bool:
        """Whether the parts say that one advantage for all has no effect on stale samples."""
        used = [w for w in (self.parts.positive, self.parts.negative) if w.factor]
        is_weight = self.parts.ratio in ("token", "prefix", "sequence")
        is_exact = is_weight and all(w.inside == "r" and not w.is_bounded for w in used)
        return self.proved and (self.is_centred or self.parts.centred_score or is_exact)

    @property
    def is_centred(self) -> bool:
        """Whether a baseline makes equal advantages 0."""
        return self.parts.baseline not in ("none", "other")

    @property
    def is_nothing(self) -> bool:
        """Whether no advantage has an effect."""
        return self.scale == 0

    def curve(self, points: int = 121, reach: float = 3.0) -> tuple[Tensor, Tensor]:
        """Log-ratios, and the weight there for A > 0 and for A < 0, (2, N)."""
        x = torch.linspace(-reach, reach, points, dtype=torch.float64)
        weights = (self.parts.positive, self.parts.negative)
        return x, torch.stack([w(x) if w.inside != "other" else self.ask(x)[i] for i, w in enumerate(weights)])

    def deviation(self, rewards: Tensor, inputs: ProbeInputs) -> Tensor:
        """(B,) what the advantages are divided by, without the small number that is added."""
        same = inputs.group[:, None] == inputs.group[None, :]
        same = (torch.ones_like(same) if self.parts.divided == "batch" else same).double()
        n = same.sum(-1)
        squares = (same * (rewards[None, :] - (same @ rewards / n)[:, None]).square()).sum(-1)
        return (squares / (n if self.population else (n - 1).clamp(min=1))).sqrt()

    def advantages(self, rewards: Tensor, inputs: ProbeInputs) -> Tensor:
        """(B,) what the loss makes of the rewards."""
        credit = rewards[:, None].expand_as(inputs.mask)
        centred = Baseline(self.parts.baseline).centre(credit, inputs)[:, 0]
        centred = torch.where(centred.abs() <= FLAT * rewards.abs().max(), 0.0, centred)
        if self.parts.divided == "none":
            return centred
        return torch.where(centred == 0, 0.0, centred / (self.deviation(rewards, inputs) + self.epsilon))

    def weights(self, inputs: ProbeInputs, rewards: Tensor, *, stale: bool = True) -> Tensor:
        """(B, T) what the loss puts on the score of each token; without `stale` as if every ratio were 1."""
        advantage = self.advantages(rewards, inputs)[:, None]
        logs = self.log_ratio(inputs) if stale else torch.zeros_like(inputs.log_weight)
        up, down = (
            w(logs) if w.inside != "other" else self._asked(i, logs) if stale else torch.full_like(logs, w.factor)
            for i, w in enumerate((self.parts.positive, self.parts.negative))
        )
        weight = self.scale * advantage * torch.where(advantage > 0, up, down) * self.unit.shares(inputs)
        return torch.where(inputs.mask, weight, 0.0)

    def _asked(self, sign: int, logs: Tensor) -> Tensor:
        unique, at = logs.unique(return_inverse=True)
        return self.ask(unique)[sign][at]

    def log_ratio(self, inputs: ProbeInputs) -> Tensor:
        """(B, T) log of the ratio of each token."""
        logs = torch.where(inputs.mask, inputs.log_weight, 0.0)
        if self.parts.ratio in ("sequence", "mean"):
            total = logs.sum(-1, keepdim=True)
            return (total / inputs.mask.sum(-1, keepdim=True) if self.parts.ratio == "mean" else total).expand_as(logs)
        return {"token": logs, "prefix": logs.cumsum(-1)}.get(self.parts.ratio, torch.zeros_like(logs))

    def predict(self, batch: Batch, *, stale: bool = True) -> Parts:
        """What the parts predict for any batch: the derivatives by each of its leaves."""
        weight = self.weights(ProbeInputs.of_batch(batch), batch.rewards, stale=stale)
        logits = torch.zeros_like(batch.logits)
        if self.parts.centred_score and stale:
            logits = weight[..., None] * (batch.behavior_logits.softmax(-1) - batch.logits.detach().softmax(-1))
        return Parts(-weight, logits)


# Reading.

NONE = 1e-6
"""A gradient below this share of the usual one is zero up to rounding, also for rewards in float32."""

FLAT = 1e-12
"""Share of the largest advantage below which one is 0 up to rounding."""

BASELINES = ("none", "group-mean", "leave-one-out", "batch-mean", "batch-leave-one-out")
DIVISIONS = (("none", False), ("group", False), ("group", True), ("batch", False), ("batch", True))

Case = tuple[ProbeInputs, Tensor]
"""Inputs, and the rewards of their completions."""


def read_policy(subject: Subject) -> PolicyAnatomy:
    """Read every part, compare their formula with the loss, and measure the drift."""
    reader = PolicyReader(subject)
    empty = PolicyAnatomy(PolicyParts(), deterministic=reader.deterministic, finite=reader.finite)
    if not (reader.deterministic and reader.finite):
        return empty
    empty = replace(
        empty, finite_if_equal=reader.finite_at_zero, has_rest=reader.has_rest, allowed=max(reader.same, ROUNDED)
    )
    random = ProbeInputs.at_random(MIXED, WIDTH, highest=reader.highest)
    weight = reader.read(random, draw_rewards(ROWS)).weight
    empty = replace(empty, leaks=bool(weight[~random.mask].any()))
    if not bool(weight.any()):
        return _enumerate(reader, empty)
    options = choose_advantages(reader, choose_weights(reader, empty))
    compared = [replace(option, unexplained=_compare(reader, option)) for option in options]
    best = min(compared, key=lambda option: max(option.unexplained.values()))
    return _enumerate(reader, replace(_name_rest(reader, best), compares=_compared(reader)))


# The weight as a curve of the ratio.


def choose_weights(reader: PolicyReader, empty: PolicyAnatomy) -> list[PolicyAnatomy]:
    """The ratio that the weight is a function of, and the curve; two choices for a ratio of the completion."""
    response, together = reader.curve(GRID, None), reader.curve(GRID, 1.0)
    size, token = float(response.abs().max()), PLACE[1]
    moves = lambda x: (x - x[:, len(STEPS), None]).abs().amax((0, 1)) > reader.same * size
    moved = moves(response)
    own, earlier, later = bool(moved[token]), bool(moved[:token].any()), bool(moved[token + 1 :].any())
    others = response[..., torch.arange(TOKENS) != token]
    choices: list[tuple[Ratio, float | None]] = [("none", None)]
    if earlier:
        beside = float((response[..., token, None] - others).abs().max())
        if beside > reader.same * size:
            several = replace(empty.parts, ratio="other", depends_on="several ratios")
            return [replace(empty, parts=several)]
        choices = [("sequence", 1 / TOKENS), ("mean", 1.0)]
    elif own or later:
        choices = [("token" if not later else "prefix", None)]
    elif bool(moves(together).any()):  # one token alone may not move a mean beyond its bounds
        choices = [("mean", 1.0), ("none", None)]
    return [_fit_weights(reader, empty, ratio, spread) for ratio, spread in choices]


def _fit_weights(reader: PolicyReader, empty: PolicyAnatomy, ratio: Ratio, spread: float | None) -> PolicyAnatomy:
    ask = lambda x: reader.curve(x, spread)[..., PLACE[1]]
    values = ask(GRID)
    positive, negative = (_fit(values[i], lambda x, i=i: ask(x)[i], reader.same) for i in range(2))
    if "other" not in (positive.inside, negative.inside):  # the common factor is the scale
        factor = positive.factor or negative.factor
        positive, negative = (
            replace(w, factor=round_short(w.factor / factor, reader.same)) for w in (positive, negative)
        )
    return replace(empty, parts=replace(empty.parts, ratio=ratio, positive=positive, negative=negative), ask=ask)


def _fit(values: Tensor, ask: Callable[[Tensor], Tensor], same: float) -> Weight:
    """Name a curve that is proportional to r or constant, and constant beyond some ratios."""
    if not bool((values.abs() > same).any()):
        return Weight("1", factor=0.0)
    is_flat = lambda x: not len(x) or float(x.max() - x.min()) <= same * (1 + float(x.abs().max()))
    runs: dict[str, tuple[float, int, int]] = {}
    for inside, level in LEVELS.items():
        low, high = _longest_run(values / level(GRID), same)
        if high > low and is_flat(values[:low]) and is_flat(values[high + 1 :]):
            runs[inside] = (float(GRID[high] - GRID[low]), low, high)
    if not runs:
        return Weight("other", factor=float(values[len(STEPS)]))
    inside = cast(Literal["r", "1"], max(runs, key=lambda name: runs[name][0]))
    _, low, high = runs[inside]
    factor = float((values / LEVELS[inside](GRID))[(low + high) // 2])
    relative = lambda x: ask(x) / factor / LEVELS[inside](x)
    edges = []
    for last, beyond in ((low, low - 1), (high, high + 1)):
        if not 0 <= beyond < len(GRID):
            edges.append((None, 0.0))
            continue
        level = float(values[beyond]) / factor
        at = bisect(lambda x: (relative(x) - 1).abs() <= same, float(GRID[last]), float(GRID[beyond]))
        edge, level = round_short(math.exp(at), same), 0.0 if abs(level) <= same else round_short(level, same)
        # Where the curve is continuous the edge is its value, whose digits rounding does not hide.
        edges.append((level if inside == "r" and level and abs(edge / level - 1) <= 2 * same else edge, level))
    (below_at, below), (above_at, above) = edges
    return Weight(inside, below_at, below, above_at, above, round_short(factor, same))


LEVELS: dict[str, Callable[[Tensor], Tensor]] = {"1": torch.ones_like, "r": torch.exp}
"""What a weight is between its bounds, at log r."""


def _longest_run(values: Tensor, same: float) -> tuple[int, int]:
    """The first and the last index of the longest stretch of log-ratios with one value, which is not 0."""
    best, start = (0, 0), 0
    for i in range(1, len(values) + 1):
        level = float(values[start])
        if i < len(values) and abs(level) > same and abs(float(values[i]) / level - 1) <= same:
            continue
        if abs(level) > same and GRID[i - 1] - GRID[start] > GRID[best[1]] - GRID[best[0]]:
            best = (start, i - 1)
        start = i
    return best


# What becomes of the advantages, and the unit.


def choose_advantages(reader: PolicyReader, options: list[PolicyAnatomy]) -> list[PolicyAnatomy]:
    """The baseline, the division and the unit whose formula has all weights on fresh samples; else the nearest."""
    cases: list[Case] = []
    for lengths, group, seed in ((MIXED, 4, 1), (MIXED[:4], 2, 2), (MIXED[1:4], 3, 3), ([9, 4, 6] * 4, 4, 4)):
        cases.append((ProbeInputs.at_reference(lengths, WIDTH + seed - 1, group), draw_rewards(len(lengths), seed)))
    inputs, rewards = cases[0]
    cases = [(inputs, balanced(ROWS)), *cases, (inputs, 3 * rewards)]
    answers = [reader.read(*case).weight for case in cases]
    fits = lambda option, i: _difference(option.weights(*cases[i], stale=False), answers[i], cases[i][0].mask)
    alone = lambda unit: _with_scale(replace(options[0], unit=unit, scale=1.0), cases, answers)
    units = [u for u in UNITS if fits(alone(u), 0) <= options[0].allowed]  # there every baseline is 0
    best, least = options[0], math.inf
    for (divided, population_), baseline, u in product(DIVISIONS, BASELINES, units):
        parts = replace(options[0].parts, baseline=baseline, divided=divided, unit=u.name)
        option = replace(options[0], parts=parts, unit=u, population=population_, scale=1.0)
        option = _with_scale(option, cases, answers)
        gap = 0.0
        for i in range(len(cases)):
            gap = max(gap, fits(option, i))
            if gap >= least:
                break
        if gap < least:
            best, least = option, gap
        if gap <= option.allowed:
            break
    if least > best.allowed:
        best = replace(best, parts=replace(best.parts, baseline="other", unit="other"))
    of_advantages = {"baseline": best.parts.baseline, "divided": best.parts.divided, "unit": best.parts.unit}
    return [replace(best, parts=replace(o.parts, **of_advantages), ask=o.ask) for o in options]


def _with_scale(option: PolicyAnatomy, cases: list[Case], answers: list[Tensor]) -> PolicyAnatomy:
    """The factor of the formula, and what is added to the deviation, from the cases themselves."""
    if option.parts.divided == "none":
        (case, answer) = cases[0], answers[0]
        factor = _factor(option.weights(*case, stale=False), answer)
        return replace(option, scale=round_short(factor, option.allowed / 100))
    plain = replace(option, parts=replace(option.parts, divided="none"))
    deviations, factors = [], []
    for at in (1, -1):  # with other deviations each
        (inputs, rewards), answer = cases[at], answers[at]
        formula, deviation = plain.weights(inputs, rewards, stale=False), option.deviation(rewards, inputs)
        for g in inputs.group.unique() if option.parts.divided == "group" else [None]:
            rows = slice(None) if g is None else inputs.group == g
            deviations.append(float(deviation[rows][0]))
            factors.append(_factor(formula[rows], answer[rows]))
    table = torch.tensor([[s, 1.0] for s in deviations], dtype=torch.float64)
    inverse = 1 / torch.tensor(factors, dtype=torch.float64)[:, None]
    slope, offset = torch.linalg.lstsq(table, inverse).solution[:, 0].tolist()
    if not slope or not math.isfinite(slope):
        return replace(option, scale=0.0)
    epsilon = offset / slope
    return replace(option, scale=round_short(1 / slope, 1e-7), epsilon=0.0 if abs(epsilon) < 1e-9 else epsilon)


def _factor(formula: Tensor, answer: Tensor) -> float:
    return float((formula * answer).sum() / formula.square().sum().clamp(min=1e-300))


def _difference(formula: Tensor, answer: Tensor, mask: Tensor) -> float:
    """The largest difference at live tokens, as a share of the largest weight."""
    answer, formula = torch.where(mask, answer, 0.0), torch.where(mask, formula, 0.0)
    if not bool(torch.isfinite(answer).all()):
        return math.inf
    size = float(answer.abs().max())
    return float((answer - formula).abs().max()) / (size or 1.0)


# Comparison of the formula with the loss, and what else the weight depends on.

ENTRIES = "the entries of the vocabulary"


def _compare(reader: PolicyReader, parts: PolicyAnatomy) -> dict[str, float]:
    """By probe, the share of the weights that the formula does not have."""
    at_random = lambda lengths, group=4, **more: ProbeInputs.at_random(
        lengths, WIDTH, group, highest=reader.highest, **more
    )
    random = at_random(MIXED, stale=1.0, seed=6)
    unlikely, even = ProbeInputs.at_reference(MIXED, WIDTH), ProbeInputs.at_reference([4, 3] * 4, WIDTH)
    even = replace(even, log_weight=torch.linspace(-2.4, 2.4, ROWS).double()[:, None].expand_as(even.mask))
    probes: dict[str, Case] = {
        "fresh samples": (unlikely, draw_rewards(ROWS, 11)),
        "fresh samples at other probabilities": (at_random(MIXED, seed=3), draw_rewards(ROWS, 12)),
        "stale samples": (replace(unlikely, log_weight=random.log_weight), draw_rewards(ROWS, 13)),
        "stale samples at other probabilities": (random, draw_rewards(ROWS, 13)),
        "nearly fresh samples": (at_random(MIXED, stale=0.1, seed=7), draw_rewards(ROWS, 14)),
        "ratios that all tokens share": (even, draw_rewards(ROWS, 17)),
        "one group of 2": (at_random([9, 4], 2, stale=1.0, seed=9), draw_rewards(2, 15)),
        "one group of 3": (at_random([9, 4, 7], 3, stale=1.0, seed=10), draw_rewards(3, 16)),
    }
    gaps = {}
    for name, case in probes.items():
        answer, formula = reader.read(*case).weight, parts.weights(*case)
        gaps[name] = _difference(formula, answer, case[0].mask)
    entries = reader.read(random, draw_rewards(ROWS, 13))
    gaps[ENTRIES] = float(entries.entries.abs().max()) / (float(entries.weight.abs().max()) or 1.0)
    return gaps


def _name_rest(reader: PolicyReader, best: PolicyAnatomy) -> PolicyAnatomy:
    """The parts with what else the weight depends on, if they are not all."""
    if best.parts.depends_on or max(best.unexplained.values()) <= best.allowed:
        return best
    random = ProbeInputs.at_random(MIXED, WIDTH, stale=1.0, highest=reader.highest, seed=6)
    rewards = draw_rewards(ROWS, 13)
    if best.unexplained[ENTRIES] > best.allowed:
        option = replace(best, parts=replace(best.parts, centred_score=True))
        batch = _batch_of(random, rewards)
        answer, formula = (_on_entries(x, batch) for x in (reader.derivatives(batch), option.predict(batch)))
        others = max(gap for name, gap in best.unexplained.items() if name != ENTRIES)
        if others <= best.allowed and _difference(formula, answer, random.mask[..., None]) <= best.allowed:
            return replace(option, unexplained=best.unexplained | {ENTRIES: 0.0})
        return replace(best, parts=replace(best.parts, depends_on="vocabulary"))
    unlikely = ProbeInputs.at_reference(MIXED, WIDTH)
    less = reader.read(replace(unlikely, log_weight=random.log_weight), rewards).weight
    if _difference(less, reader.read(random, rewards).weight, random.mask) > best.allowed:
        return replace(best, parts=replace(best.parts, depends_on="probability"))
    return best


def _on_entries(parts: Parts, batch: Batch) -> Tensor:
    """(B, T, V) the derivatives by the logits, those by the log-prob of the token, which has the id 0, included."""
    token = torch.nn.functional.one_hot(torch.tensor(0), batch.logits.shape[-1])
    return parts.logits + parts.logp[..., None] * (token - batch.logits.detach().softmax(-1))


def _compared(reader: PolicyReader) -> tuple[str, ...]:
    """With which of the two log-probs of the sampler the ratio compares π."""
    inputs = ProbeInputs.at_random(MIXED, WIDTH, stale=1.5, highest=reader.highest, seed=6)
    fresh = replace(inputs, log_weight=0 * inputs.log_weight)
    rewards = draw_rewards(ROWS, 13)
    start = reader.read(fresh, rewards)
    names = []
    for of in ("old", "behavior"):
        moved = reader.read(inputs, rewards, of)
        if any(_difference(a, b, inputs.mask) > reader.same for a, b in zip(start, moved, strict=True)):
            names.append(of)
    return tuple(names)


def _enumerate(reader: PolicyReader, parts: PolicyAnatomy) -> PolicyAnatomy:
    """Sum the loss over every outcome of small problems: beside the formula, and under one advantage for all."""
    unexplained, drifts = dict(parts.unexplained), []
    for on_policy, samples in ((True, "fresh"), (False, "stale")):
        gap, cases = 0.0, proof_cases(on_policy)
        for case in cases:
            usual = 1.0
            kinds = {None: advantage_of(case.problem, "random").float().double()}
            kinds |= {} if on_policy else {a: torch.full_like(kinds[None], a) for a in (1.0, -1.0)}
            for constant, advantage in kinds.items():
                if constant and not reader.finite_at_zero:
                    continue
                batch = from_problem(case.problem, case.members, advantage)
                each = (reader.derivatives(batch), parts.predict(batch), parts.predict(batch, stale=False))
                answer, formula, plain = (sum_over_rows(case.problem, case.members, x) for x in each)
                if constant is None:
                    usual = max(answer.typical, formula.typical) or 1.0
                    share = float(((answer.mean - formula.mean) / usual).norm())
                    gap = max(gap, share if math.isfinite(share) else 1.0)
                    continue
                towards = case.targets["forward-kl-sampler-sequence"]
                length, whole = float(answer.mean.norm()), float(plain.mean.norm())
                moves, has_plain = length > NONE * max(usual, whole), whole > NONE * usual
                cosine = float(answer.mean @ towards / towards.norm()) / length if moves else 0.0
                drifts.append((constant, (length / whole if has_plain else math.inf) if moves else 0.0, cosine))
        unexplained[f"every outcome of {len(cases)} problems, {samples} samples"] = gap
    mean = lambda xs: sum(xs) / len(xs)
    drift = tuple(
        Drift(mean([d[1] for d in drifts if d[0] == a]), mean([d[2] for d in drifts if d[0] == a]))
        for a in (1.0, -1.0)
        if drifts
    )
    return replace(parts, unexplained=unexplained, drift=drift)


# `audit_whole`, and its result.


@dataclass(frozen=True)
class PolicyResult:
    """The audit of a whole policy loss.

    Attributes:
        name: of the loss.
        summary: one line about it.
        source: where it was published; empty for other losses.
        call: how the loss was called, in one line.
        policy: its parts: ratio, weights, advantages, unit and drift, and the proof that they are the loss.
        kl: the parts of what it does without advantages; None if that is nothing.
        kl_verdict, kl_verdict_off_policy: the name of what that descends, as in `audit`.

    Example:
        >>> from klgrad.audit.policy import audit_whole
        >>> result = audit_whole(lambda logp, mask, advantages: (-advantages * logp * mask).sum(-1).mean())
        >>> result.policy.parts.ratio, result.policy.proved
        ('none', True)
        >>> [(round(d.size, 6), round(d.towards_sampler, 6)) for d in result.policy.drift]
        [(1.0, 1.0), (1.0, -1.0)]
    """

    name: str
    summary: str
    source: str
    call: str
    policy: PolicyAnatomy
    kl: Anatomy | None
    kl_verdict: Verdict
    kl_verdict_off_policy: Verdict

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        a = self.policy
        log_ratio, (positive, negative) = a.curve()
        names = ("scale", "epsilon", "compares", "leaks", "deterministic", "finite", "finite_if_equal", "proved")
        measured = {
            "mean_over_rows": a.unit.rows,
            "curve": {"ratio": log_ratio.exp().tolist(), "positive": positive.tolist(), "negative": negative.tolist()},
            "drift": dict(zip(("positive", "negative"), map(asdict, a.drift), strict=False)),
            "unexplained": max(a.unexplained.values(), default=0.0),
            "unexplained_by_probe": a.unexplained,
        }
        return {
            "name": self.name,
            "source": self.source,
            "policy": asdict(a.parts) | {name: getattr(a, name) for name in names} | measured,
            "kl": {
                "verdict": self.kl_verdict,
                "verdict_off_policy": self.kl_verdict_off_policy,
                "anatomy": self.kl and self.kl.to_dict(),
            },
        }


def audit_whole(loss: object, *, name: str | None = None) -> PolicyResult:
    """Take a whole policy loss apart.

    Its derivatives are read at chosen ratios π/μ and advantages, in float64. The parts that are read are a formula,
    which is compared with the loss at random inputs and with its gradient summed over every outcome of small problems,
    on samples of π and of another policy. What the loss does without advantages is audited as a KL.

    Args:
        loss: as in `audit`; or a `PolicyLoss`. It receives the advantage of each completion as `advantages` (B, T) and
            as `rewards` (B,).
        name: the name in the report; by default that of the function.

    Returns:
        The parts, the drift, and the KL.

    Example:
        >>> from klgrad import policy_losses
        >>> from klgrad.audit.policy import audit_whole
        >>> parts = audit_whole(policy_losses.get("ppo-clip")).policy.parts
        >>> parts.ratio, parts.positive.high, parts.negative.low, parts.unit
        ('token', 1.2, 0.8, 'token-mean')
    """
    entry = loss if isinstance(loss, PolicyLoss) else None
    subject = as_subject(entry.loss, name or entry.name) if entry else as_subject(loss, name)
    policy = read_policy(subject)
    rest: Anatomy | None = None
    names: list[Verdict] = ["nothing", "nothing"]
    if policy.has_rest:
        rest = enumerate_gradients(subject, read_anatomy(subject))
        names = [fresh_name(rest), stale_name(rest)]
    source = entry.source if entry else ""
    return PolicyResult(subject.name, subject.summary, source, subject.call, policy, rest, names[0], names[1])

"""Take a loss apart: divergence, horizon, samples, unit and baseline, each read by a probe of its own.

The parts are a formula for the coefficient of every token. What the formula predicts is compared with the loss at
random inputs, token by token, so that a part that was misread, or that no probe looks for, shows as a difference.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .parts import (
    TAILS,
    UNITS,
    Anatomy,
    Baseline,
    Bound,
    Credit,
    Samples,
    TopK,
    Unit,
    tilted_divergence,
)
from .probes import (
    DEPTH,
    EXACT,
    GRID,
    GROUP,
    HIGHEST_TWIN,
    ODDS,
    RARE_ODDS,
    REACH,
    ROWS,
    SINGLE,
    TOKENS,
    WIDTH,
    Advantages,
    Batch,
    Curve,
    Derivatives,
    ProbeInputs,
    bisect,
    fit,
    function_of,
    is_single,
    read_curve,
    round_short,
)
from .subject import VOCABULARY, Subject, all_finite, evaluate, of_reference, unit_of

PLACE = (0, 4)
"""The token whose log-ratio is moved: it has four tokens before it, four after it, and other rows."""

STEP = 0.75
"""A log-ratio at which the known functions differ, and a log importance ratio that no usual bound cuts off."""

NUDGE = 0.05
"""A log importance ratio that few bounds cut off."""

FAR = 15.0
"""A log importance ratio that every bound cuts off."""

FAR_WEIGHT = 12.0
"""A log importance ratio of one token among fresh ones: gates of common libraries begin before it."""

ROUNDED = 1e-5
"""Share of a coefficient that rounding may leave: many losses cast some of their tensors to float32."""

# Reading.

SHAPES = (
    ([9] * 8, 10),
    ([9, 7, 9, 4, 9, 9, 5, 9], 10),
    ([4, 9, 9, 3, 4, 9, 9, 6, 9, 9, 9, 2], 10),
    ([4, 6, 6, 3, 4, 6, 6, 6], 12),
)
"""Lengths of completions, and the padded width: the first completions of the first two groups are equally long."""

MIXED = [9, 7, 9, 4, 9, 8, 5, 9]


class PartReader:
    """Reads each part of one loss by its own probe."""

    def __init__(self, subject: Subject, advantages: Advantages) -> None:
        self.subject, self.advantages = subject, advantages
        self.size = 1.0
        random = ProbeInputs.at_random([TOKENS] * ROWS, WIDTH, highest=HIGHEST_TWIN)
        first = self.read(random)
        size = max(float(x.nan_to_num(posinf=0.0, neginf=0.0).abs().max()) for x in first)
        # The tolerances are meant for numbers near 1; a division by a power of two is exact.
        self.size = 1.0 if not size or 1e-3 < size < 1e3 else unit_of(torch.tensor(size, dtype=torch.float64))
        self.base = ProbeInputs.at_reference([TOKENS] * ROWS, WIDTH)
        first, again = Derivatives(*(x / self.size for x in first)), self.read(random)
        self.takes_logits = subject.is_given_logits or bool(evaluate(subject, random.batch())[1].logits.any())
        # The logits of the probes have twins of the sampled tokens, so that these have a probability below one half.
        self.highest = HIGHEST_TWIN if self.takes_logits else -1e-6
        self.deterministic = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again, strict=True))
        self.finite = all_finite(first)
        nudged = lambda step: self.read(replace(random, log_ratio=random.log_ratio + step))
        self.same = SINGLE if is_single(first, nudged) else EXACT
        self.unit = Unit("sum")
        self.late, self.anchor = 0, "ref"
        self.coupled = "none"
        self.start = self.read(self.base)
        self.moves: dict[tuple[str, tuple[int, int], float], Derivatives] = {}

    def read(self, inputs: ProbeInputs) -> Derivatives:
        """The derivatives of the loss at chosen inputs."""
        batch = inputs.batch()
        # On stale samples a KL may be frozen at the sampler, and setting ref to π would change it in another way.
        if self.advantages == "random" and not bool(inputs.log_weight.any()):
            rewards = torch.randn(len(batch.group), generator=torch.Generator().manual_seed(0)).double()
            batch = replace(batch, rewards=rewards, advantages=rewards[:, None].expand_as(batch.mask).clone())
        parts = of_reference(self.subject, batch)
        each = parts.logits / batch.logits.detach().exp()
        score = parts.logp + parts.logits[..., 0] - parts.logits[..., 1]
        return Derivatives(score / self.size, (each[..., 2] - each[..., 3]) / self.size)

    # One response at a time.

    def shares(self) -> Tensor:
        """(B, 1) what the unit multiplies each completion's coefficients by."""
        return self.unit.shares(self.base)

    def at_reference(self, lengths: list[int], width: int = WIDTH, group: int = GROUP) -> ProbeInputs:
        """Completions of these lengths at ref, which is where this loss has it."""
        return replace(ProbeInputs.at_reference(lengths, width, group), late=self.late, anchor=self.anchor)

    def at_random(self, lengths: list[int], width: int = WIDTH, group: int = GROUP, **more: Any) -> ProbeInputs:
        """The same at random inputs."""
        inputs = ProbeInputs.at_random(lengths, width, group, highest=self.highest, **more)
        return replace(inputs, late=self.late, anchor=self.anchor)

    def responses(self, name: str, place: tuple[int, int] = PLACE, value: float = STEP) -> Derivatives:
        """What an entry of one table adds to the derivatives, in the unit of the loss."""
        key = (name, place, value)
        if key not in self.moves:
            self.moves[key] = self.read(self.base.with_entries(name, {place: value}))
        pairs = zip(self.moves[key], self.start, strict=True)
        return Derivatives(*(self._change(moved, start) / self.shares() for moved, start in pairs))

    def _change(self, moved: Tensor, start: Tensor) -> Tensor:
        """What was added to the derivatives; 0 where a constant is only rounded to float32 in another way."""
        change = moved - start
        return torch.where(change.abs() <= ROUNDED / 10 * start.abs(), 0.0, change) if self.same == SINGLE else change

    def own_responses(self, name: str, value: float = STEP) -> Tensor:
        """(T,) the same in the row that is moved, less what a row of the other group answers to it."""
        score = self.responses(name, value=value).score
        return score[PLACE[0]] - score[ROWS - 1]

    def over(self, values: Tensor, answer: Callable[[Tensor, ProbeInputs, list[int]], Tensor]) -> Tensor:
        """The answers to many values at once: to some of them in a batch at ref, by rows without mutual influence."""
        apart = {"none": 1, "group": GROUP}.get(self.coupled, ROWS)
        at_once = max((ROWS - 2) // apart, 1) if self.unit.name == "other" or apart == ROWS else len(values)
        answers = []
        for some in values.split(at_once):
            # At least two at the end are not moved.
            rows = ROWS if apart == ROWS else math.ceil((len(some) * apart + 2) / ROWS) * ROWS
            answers.append(answer(some, self.at_reference([TOKENS] * rows), [i * apart for i in range(len(some))]))
        return torch.cat(answers)

    def along(self, log_ratios: Tensor, seen: int, name: str = "log_ratio") -> Tensor:
        """The coefficient of one token as the log-ratio of another one, or its own, takes these values."""

        def answer(some: Tensor, base: ProbeInputs, rows: list[int]) -> Tensor:
            entries = {(row, PLACE[1]): x for row, x in zip(rows, some.tolist(), strict=True)}
            return self.above_others(self.read(base.with_entries(name, entries)).score[:, seen], rows)

        return self.over(log_ratios, answer)

    def above_others(self, answer: Tensor, rows: list[int]) -> Tensor:
        """How much more these rows answer than rows at the end with the same padding, in the unit of the loss."""
        others = [len(answer) - 2 + row % 2 for row in rows]
        return (
            self._change(answer[rows], answer[others]) / self.unit.shares(self.at_reference([TOKENS] * len(answer)))[0]
        )

    # The parts.

    def read_unit(self) -> Unit:
        """The unit by which responses in batches of several shapes are all alike; `other` if none is."""
        shapes = [self.at_reference(*shape) for shape in SHAPES]
        responses = [self._response_in(base, STEP) for base in shapes]
        if not any(responses):  # it may be dead on that side of ref
            responses = [self._response_in(base, -STEP) for base in shapes]
        for unit in UNITS:
            scaled = [r / float(unit.shares(base)[0, 0]) for r, base in zip(responses, shapes, strict=True)]
            if max(scaled) - min(scaled) <= self.same * max(map(abs, scaled)):
                return unit
        return Unit("other")

    def _response_in(self, base: ProbeInputs, step: float) -> float:
        """What a token adds to a derivative, as everything of it moves."""
        for name, value in (("log_ratio", step), ("tilt", step), ("logp", DEPTH + step)):
            base = base.with_entries(name, {(0, 2): value})
        moved = self.read(base)
        own, full = (float(x[0, 2] - x[GROUP, 2]) for x in (moved.score, moved.full))
        rest = float(moved.score[GROUP, 2]), float(moved.full[GROUP, 2])
        return next((x for x in (full, own, *rest) if abs(x) > self.same / 1000), 0.0)

    def read_position(self) -> None:
        """Where the log-probs of ref, or of the sampler in their place, meet those of the policy."""
        row, token = PLACE
        response = self.responses("log_ratio").score[row]
        if not bool(response.any()):
            swapped = replace(self.base, anchor="sampler")
            near, far = (self.read(swapped.with_entries("log_ratio", {PLACE: x})).score for x in (NUDGE, STEP))
            start = self.start.score
            # A ratio alone multiplies a constant.
            growth = float(near[PLACE] / start[PLACE]) - 1
            is_ratio = any(abs(growth - math.expm1(x)) <= max(10 * EXACT, self.same / 10) for x in (NUDGE, -NUDGE))
            is_of_entries = bool(self.responses("tilt").full[PLACE].abs() > self.same)
            if float(far[PLACE]) != float(start[PLACE]) and not is_ratio and not is_of_entries:
                self.anchor = "sampler"
        elif int((response != 0).sum()) == 1 and bool(response[token - 1] != 0) | bool(response[token + 1] != 0):
            self.late = int(response.nonzero()[0, 0]) - token
        if self.late or self.anchor != "ref":
            self.base = replace(self.base, late=self.late, anchor=self.anchor)
            self.start = self.read(self.base)
            self.moves.clear()

    def read_entropy(self) -> tuple[tuple[float, float], bool]:
        """The weights of the log-prob itself, sampled and of the entries; and whether it is that of the completion."""
        moved, start = self.read(self.base.with_entries("logp", {PLACE: DEPTH + STEP})), self.start
        change = (moved.score - start.score)[PLACE[0], :TOKENS] / self.shares()[0, 0] / STEP
        full = float(start.full[PLACE] / self.shares()[0, 0]) / ODDS
        short = lambda x: 0.0 if abs(x) <= self.same else round_short(x, 10 * self.same)
        sampled = short(float(change[PLACE[1]]))
        is_alike = bool((change - sampled).abs().max() <= 10 * self.same * abs(sampled))
        return (sampled, short(full)), sampled != 0 and is_alike

    def counts_cut_off(self, others: Derivatives) -> bool:
        """Whether a completion that fills its row has a gradient, if others have one."""
        inputs = self.at_random([TOKENS] * ROWS, TOKENS, seed=8)
        return not any(bool(x.any()) for x in others) or any(bool(x.any()) for x in self.read(inputs))

    def has_spread(self) -> bool:
        """Whether a completion changes the difference between two others, as a spread that divides them does."""
        differences = []
        for x in (0.0, 1.3):
            inputs = self.base.with_entries("log_ratio", {(0, PLACE[1]): x, (2, PLACE[1]): 3.0})
            score = self.read(inputs).score[:, PLACE[1]]
            differences.append(float(score[2] - score[1]))
        return abs(differences[0] - differences[1]) > 10 * self.same * abs(differences[0])


def read_anatomy(subject: Subject, advantages: Advantages = "zero") -> Anatomy:
    """Read every part, and compare their formula with the loss at random inputs."""
    reader = PartReader(subject, advantages)
    empty = Anatomy(Curve({}, (GRID, 0 * GRID), torch.zeros_like))
    if not reader.deterministic:
        return replace(empty, deterministic=False)
    start = reader.start
    if not reader.finite or not all_finite(start):
        return _read_spread(reader, replace(empty, finite=reader.finite, finite_at_ref=False))
    reader.read_position()
    reader.unit = reader.read_unit()
    start = Derivatives(*(x / reader.shares() for x in reader.start))
    moved = [reader.responses(name).score for name in ("log_ratio", "tilt")]
    couples_rows = any(bool((x[1:] != 0).any()) for x in moved)
    if couples_rows:
        reader.coupled = "batch" if any(bool((x[GROUP:] != 0).any()) for x in moved) else "group"
    if couples_rows and reader.has_spread():
        return _read_spread(reader, empty)
    own = read_curve(lambda x: reader.along(x, PLACE[1]), reader.same)
    full = _read_full(reader)
    entropy, is_of_whole = reader.read_entropy()
    bonus = entropy[0] * DEPTH * (TOKENS if is_of_whole else 1)
    constant = round_short(float(start.score[PLACE]) - bonus, reader.same)
    if abs(constant) <= reader.same * max(1.0, abs(bonus)):
        constant = 0.0
    # A log-ratio near STEP to which the coefficient responds: inside a dead zone the last token has none either.
    responds = own.points[0][(own.points[1] != 0) & (own.points[0] != 0)]
    value = STEP if own.is_zero else float(responds[(responds - STEP).abs().argmin()])
    last = reader.responses("log_ratio", (0, TOKENS - 1), value).score[0, TOKENS - 1]
    check = reader.at_random(MIXED, seed=1)
    answer = reader.read(check)
    parts = Anatomy(
        own,
        full=full,
        credits=_read_credits(reader, own, full),
        unit=reader.unit,
        constant=constant,
        entropy=entropy,
        entropy_of_whole=is_of_whole,
        late=reader.late,
        anchor=reader.anchor,
        ends=bool(last != 0) or own.is_zero,
        allowed=max(reader.same * 10, ROUNDED),
        leaks=any(bool((x * ~check.mask).any()) for x in answer),
        cut_off=reader.counts_cut_off(answer),
    )
    parts = _choose_baseline(reader, parts, couples_rows)
    parts = _choose_samples(reader, parts)
    parts = replace(parts, unexplained=_compare(reader, parts))
    if not parts.proved_fresh and full is not None and subject.temperature == 1:
        temperature = _read_temperature(reader)
        tempered = read_anatomy(replace(subject, temperature=temperature), advantages) if temperature != 1 else parts
        if tempered.proved_fresh:
            return replace(tempered, temperature=temperature)
    if not parts.proved:
        parts = replace(parts, matters=_find_causes(reader, parts), sees_reference=_sees_reference(reader))
    parts = parts.times(reader.size)
    if reader.takes_logits and (subject.kind != "framework" or subject.entries):  # its trainer may have one of its own
        parts = _read_large_vocabulary(subject, parts)
    return parts


def _read_full(reader: PartReader) -> Curve | None:
    """The coefficient of an entry of the logits: that of a rare entry, less that of one whose log-ratio is 0."""
    token = PLACE[1]
    if abs(float(reader.responses("tilt").full[PLACE])) <= reader.same:
        return None

    def read(tilts: Tensor, base: ProbeInputs, rows: list[int]) -> Tensor:
        entries = {(row, token): x for row, x in zip(rows, tilts.tolist(), strict=True)}
        rare = replace(base, odds=RARE_ODDS + 0 * base.odds, logp=2 * RARE_ODDS + 0 * base.logp)
        return reader.above_others(reader.read(rare.with_entries("tilt", entries)).full[:, token], rows)

    return read_curve(lambda tilts: reader.over(tilts, read), 10 * reader.same)


def _read_temperature(reader: PartReader) -> float:
    """By what the logits are divided: the coefficient of a rare entry is a power of its probability."""
    moved = reader.base.with_entries("tilt", {PLACE: STEP})
    at = lambda odds: replace(moved, odds=odds + 0 * moved.odds, logp=2 * RARE_ODDS + 0 * moved.logp)
    more, less = (abs(float(reader.read(at(odds)).full[PLACE])) for odds in (RARE_ODDS / 2, RARE_ODDS))
    if not more or not less:
        return 1.0
    power = 1 + math.log(less / more) / (RARE_ODDS / 2)
    return round_short(1 / power, SINGLE) if power > SINGLE else 1.0


def _read_credits(reader: PartReader, own: Curve, full: Curve | None) -> tuple[Credit, ...]:
    token = PLACE[1]
    response = reader.own_responses("log_ratio")
    # The full-vocabulary KL of a token of probability exp(-32) responds a little; it is read by its own probe.
    response = torch.where(response.abs() > reader.same * max(1e-3, float(response.abs().max())), response, 0.0)
    later, earlier = response[:token].flip(0), response[token + 1 : TOKENS]
    credits = []
    if bool(later.any()) or bool(earlier.any()):
        seen = token - 1 if bool(later[0] != 0) else token + 1
        if not float(response[seen]):
            seen = int((response * (torch.arange(WIDTH) != token)).nonzero()[0, 0])
        curve = read_curve(lambda x: reader.along(x, seen), reader.same, list(own.excess or ()))
        unit = float(response[seen])
        short = lambda xs: tuple(round_short(float(x) / unit, reader.same) for x in xs)
        credits.append(Credit("sampled", curve, 0.0, short(later), short(earlier)))
    if full is not None and full.excess:
        moved = reader.base.with_entries("tilt", {PLACE: STEP})
        response = reader.own_responses("tilt") / float(tilted_divergence(full, moved)[PLACE])
        if bool(response.abs().max() > reader.same):
            short = lambda xs: tuple(round_short(float(x), reader.same) for x in xs)
            later, earlier = short(response[:token].flip(0)), short(response[token + 1 : TOKENS])
            credits.append(Credit("full", full, float(response[token]), later, earlier))
    return tuple(credits)


def _read_large_vocabulary(subject: Subject, parts: Anatomy) -> Anatomy:
    """The parts with what the formula does not explain in a large vocabulary, and how many of its entries matter."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda: torch.randn(ROWS, 3, VOCABULARY, generator=generator, dtype=torch.float64)
    policy = (2 * normal()).log_softmax(-1)
    ref = (policy + normal()).log_softmax(-1)
    tokens = policy.exp().flatten(0, 1).multinomial(1, generator=generator).reshape(ROWS, 3)
    logp, ref_logp = (x.gather(-1, tokens[..., None])[..., 0] for x in (policy, ref))
    base = ProbeInputs.at_reference([3] * ROWS, 3).batch()
    sampled = torch.nn.functional.one_hot(tokens, VOCABULARY).double() - policy.exp()
    of_entries = lambda x: x.logits + x.logp[..., None] * sampled

    def batch_of(sampler: Tensor) -> Batch:
        of_sampler = sampler.gather(-1, tokens[..., None])[..., 0]
        logs = {"logp": logp, "ref_logp": ref_logp, "old_logp": of_sampler, "behavior_logp": of_sampler}
        logits = {"logits": policy, "ref_logits": ref, "behavior_logits": sampler}
        return replace(base, tokens=tokens, **logs, **logits).fresh()

    names = f"a vocabulary of {VOCABULARY}", f"stale samples, a vocabulary of {VOCABULARY}"
    batches = [batch_of(policy), batch_of((policy + 0.3 * normal()).log_softmax(-1))]
    answers = [of_entries(evaluate(subject, batch)[1]) for batch in batches]
    answer = answers[0]

    def explained(parts: Anatomy) -> Anatomy:
        gaps = {}
        for name, batch, x in zip(names, batches, answers, strict=True):
            gaps[name] = float((x - of_entries(parts.predict(batch))).abs().max()) / (float(x.abs().max()) or 1.0)
        return replace(parts, unexplained=parts.unexplained | gaps)

    # Entries that a loss does not look at share the value that their normalisation gives them.
    each = (answer / policy.exp())[0, 0] / parts.unit.shares(ProbeInputs.of_batch(batches[0]))[0]
    rest = each[policy[0, 0].argmin()]
    noise = ROUNDED * float(each.abs().max())
    seen = (each - rest).abs() > noise
    size, parts = int(seen.sum()), explained(parts)
    if parts.proved_fresh or parts.full is None or size > VOCABULARY - 4:
        return parts
    listed = [
        name for name, x in (("ref", ref), ("policy", policy)) if bool(x[0, 0, seen].min() > x[0, 0, ~seen].max())
    ]
    for of, tail in product(listed, TAILS):
        top = TopK(size, of, tail)
        if tail in ("left-out", "ref-renormalised"):  # a constant that is none in a whole vocabulary
            left = (each - rest - top.coefficients(parts.full, policy, ref)[0, 0])[seen]
            constant = float(left.median())
            top = replace(top, constant=0.0 if abs(constant) <= noise else round_short(constant, SINGLE))
        if (listing := explained(replace(parts, top=top))).proved_fresh:
            return listing
    return replace(parts, top=TopK(size, listed[0] if listed else "other", "other"))


# Parts that are chosen by what they predict.


def _difference(parts: Anatomy, inputs: ProbeInputs, answer: Derivatives) -> float:
    """The largest difference of the coefficients from the formula, as a share of the largest coefficient."""
    formula = parts.derivatives(inputs)
    inside = inputs.mask if not parts.late else inputs.mask & inputs.mask.roll(-1, 1) & inputs.mask.roll(1, 1)
    if parts.late:
        inside = inside & (torch.arange(inside.shape[1]) > 0)
    if parts.level == "completion":  # beyond that our exponentials saturate, and those of others overflow
        inside = inside & (torch.where(inputs.mask, inputs.log_ratio, 0.0).sum(-1, keepdim=True).abs() < REACH)
    gap, size = 0.0, 0.0
    for a, f in zip(answer, formula, strict=True):
        a, f = torch.where(inside, a, 0.0), torch.where(inside, f, 0.0)
        if not bool(torch.isfinite(a).all()):
            return math.inf
        if parts.baseline.spread != "none":
            if bool((f.abs() > ROUNDED).any()) and not bool(a.any()):
                return 1.0  # no spread divides it to 0
            f = rescale(f, a, inputs.group, parts.baseline.spread)
        gap, size = max(gap, float((a - f).abs().max())), max(size, float(a.abs().max()))
    return gap / size if size else gap


def rescale(formula: Tensor, answer: Tensor, group: Tensor, spread: str) -> Tensor:
    """The formula with one factor per group, or per batch, which stands for its spread."""
    group = group if spread == "group" else torch.zeros_like(group)
    none = formula.new_zeros(int(group.max()) + 1)
    along, square = (none.index_add(0, group, (formula * x).sum(-1)) for x in (answer, formula))
    return formula * (along / square.clamp(min=1e-300))[group, None]


def _baselines(couples_rows: bool) -> Iterator[Baseline]:
    yield Baseline()
    if couples_rows:
        names, both = ("leave-one-out", "group-mean", "batch-mean"), (True, False)
        yield from (Baseline(*choice) for choice in product(names, both, both))
        yield Baseline("token-mean")
        yield Baseline("return-mean")


def _best(reader: PartReader, candidates: Iterator[Anatomy], *probes: ProbeInputs) -> tuple[Anatomy, float]:
    """The candidate whose formula is nearest; the first that has all coefficients ends the search."""
    best, least = None, math.inf
    answers = [reader.read(inputs) for inputs in probes]
    for parts in candidates:
        gap = max(_difference(parts, *pair) for pair in zip(probes, answers, strict=True))
        if best is None or gap < least:
            best, least = parts, gap
        if gap <= 10 * reader.same:
            break
    assert best is not None
    return best, least


def _choose_baseline(reader: PartReader, parts: Anatomy, couples_rows: bool) -> Anatomy:
    inputs = reader.at_random(MIXED, seed=1)

    def candidates() -> Iterator[Anatomy]:
        for baseline in _baselines(couples_rows):
            factor = 1 / baseline.own_share()
            credits = tuple(c.times(factor) for c in parts.credits)
            option = replace(parts, own=parts.own.times(factor), credits=credits, baseline=baseline)
            yield option
            if parts.unit.name == "other":
                divided = tuple(replace(c, divided=c.source == "sampled") for c in credits)
                for unit in UNITS:
                    in_unit = float(reader.shares()[0, 0] / unit.shares(reader.base)[0, 0])
                    yield replace(
                        option,
                        unit=unit,
                        own=option.own.times(in_unit),
                        credits=tuple(replace(c, curve=c.curve and c.curve.times(in_unit)) for c in divided),
                    )
            if parts.own.shares and any(c.source == "sampled" and c.later and c.earlier for c in parts.credits):
                yield replace(option, level="completion", credits=tuple(c for c in credits if c.source != "sampled"))

    one_group = replace(inputs, group=torch.zeros_like(inputs.group))
    wider = reader.at_random(MIXED, WIDTH + 3, seed=7)
    best, gap = _best(reader, candidates(), inputs, wider, *([one_group] if couples_rows else []))
    if gap > best.allowed and couples_rows and best.baseline.name == "none":
        best = replace(best, baseline=Baseline("other"))
    return best


RATIOS = ("none", "token", "prefix", "sequence", "mean")


def _choose_samples(reader: PartReader, parts: Anatomy) -> Anatomy:
    inputs = reader.at_random([TOKENS] * ROWS, stale=0.02, seed=2)
    has_exact = parts.is_exact or any(c.source != "sampled" for c in parts.credits)
    has_others = parts.baseline.name != "none"
    of = lambda condition: (False, True) if condition else (False,)

    def candidates(pull: Curve | None = None) -> Iterator[Anatomy]:
        for ratio in RATIOS:
            before = of(has_exact and ratio == "prefix")
            for flags in product(of(parts.credits), before, of(has_others), (False, True)):
                per_decision, before_only, on_others, frozen = flags
                samples = Samples(ratio, per_decision, None, before_only, on_others, frozen, pull)
                yield replace(parts, samples=samples)

    best, gap = _best(reader, candidates(), inputs)
    if gap > parts.allowed and not parts.constant:
        pull = read_curve(lambda x: reader.along(x, PLACE[1], "log_weight"), reader.same)
        if pull.shares and not pull.has_edges:
            best, gap = _best(reader, candidates(pull), inputs)
    if gap > parts.allowed:
        return replace(parts, samples=Samples("other"))
    if best.samples.ratio == "none":
        return best
    up, down = (_read_bound(reader, best, step) for step in (STEP, -STEP))
    of_value = _bound_of_value(best.own, up, down)
    if of_value is not None:
        return replace(best, samples=replace(best.samples, bound=of_value))
    if up is not None and up == down and has_others:
        # An estimate that is never negative: the credit of another completion makes the coefficient so.
        down = _read_bound(reader, best, -STEP, AGAINST)
    if up is not None and down is not None and up != down:
        more, less = (up, down) if up.low is not None else (down, up)
        if (more.kind, less.kind, less.low) == ("mask", "mask", None):
            up = Bound("ppo", more.low, less.high, more.high)
    best = replace(best, samples=replace(best.samples, bound=up))
    stale = reader.at_random(MIXED, stale=1.0, seed=6)
    if up is None and best.samples.ratio == "token" and _difference(best, stale, reader.read(stale)) > best.allowed:
        return replace(best, samples=replace(best.samples, bound=_bound_of_probability(reader, best)))
    return best


def _bound_of_probability(reader: PartReader, parts: Anatomy) -> Bound | None:
    """A mask by π - μ: masks by the ratio at two probabilities π, if they begin at one difference."""
    ends: dict[str, float] = {}
    likely = (0.95, 0.9) if math.log(0.95) < reader.highest else (0.4, 0.3)
    for side, probabilities in (("low", (0.05, 0.1)), ("high", likely)):
        masks = [_read_bound(reader, parts, STEP, logp=math.log(p)) for p in probabilities]
        at = {
            p: getattr(mask, side) for p, mask in zip(probabilities, masks, strict=True) if mask and mask.kind == "mask"
        }
        differences = {round_short(p - p / edge, ROUNDED) for p, edge in at.items() if edge}
        if len(differences) > 1:
            return None
        ends |= dict.fromkeys([side], *differences) if differences else {}
    return Bound("probability", ends.get("low"), ends.get("high")) if ends else None


AGAINST = -6.0
"""The log-ratio of the tokens of another completion: the mean over a batch is then larger than an estimate at STEP."""


def _bound_of_value(own: Curve, up: Bound | None, down: Bound | None) -> Bound | None:
    """A bound on the ratio times an estimate, if masks at the log-ratios STEP and -STEP and the curve's edge are it."""
    if up is None or down is None or (up.kind, up.low, down.kind, down.low) != ("mask", None, "mask", None):
        return None
    masks = ((STEP, up.high), (-STEP, down.high), (own.low, 1.0))
    for name in ("k3", "k2"):
        values = [r * float(function_of(name)(torch.tensor(x, dtype=torch.float64))) for x, r in masks if x and r]
        if len(values) == len(masks) and max(values) - min(values) <= ROUNDED * max(values):
            return Bound("value", None, round_short(values[0], ROUNDED), estimate=name)
    return None


def _read_bound(
    reader: PartReader, parts: Anatomy, step: float, against: float = 0.0, logp: float = -FAR
) -> Bound | None:
    """Where the coefficients stop following the ratio, and what they are then.

    Args:
        reader: of the loss.
        parts: what is known of it.
        step: the log-ratio of the token.
        against: the log-ratio of the tokens of another completion of its group.
        logp: log π of the token: no log-prob of the sampler is above 0.
    """
    token, pull = PLACE[1], parts.samples.pull
    columns = range(TOKENS) if parts.samples.ratio == "mean" else (0 if parts.samples.before else token,)

    def ask(log_weights: Tensor, log_ratios: Tensor, kl: float = 0.0) -> Tensor:
        def read(some: Tensor, base: ProbeInputs, rows: list[int]) -> Tensor:
            moves = {(row, token): float(x) for row, x in zip(rows, log_ratios[some], strict=True)}
            moves |= {(row + 1, s): against for row, s in product(rows, range(TOKENS)) if against}
            start = base.with_entries("log_ratio", moves)
            if logp > -FAR:
                start = start.with_entries("logp", {(row, token): logp for row in rows})
            start = start.with_entries("tilt", {(row, token): kl for row in rows})
            stale = {(row, s): float(x) for row, x in zip(rows, log_weights[some], strict=True) for s in columns}
            inputs = start.with_entries("log_weight", stale)
            if parts.samples.frozen:  # the log-ratio that the loss sees stays where it is
                inputs = replace(inputs, log_ratio=inputs.log_ratio + inputs.log_weight)
            answers = torch.stack(list(reader.read(inputs))).sum(0)[rows, token] / parts.unit.shares(base)[0, 0]
            if pull is None:
                return answers
            beside = pull(log_weights[some])
            return torch.where((answers - beside).abs() <= reader.same * beside.abs(), 0.0, answers - beside)

        return reader.over(torch.arange(len(log_weights)), read)

    def answer(xs: Tensor) -> Tensor:
        return ask(xs, torch.full_like(xs, step), STEP)

    most = -logp, FAR
    plain, *ends = answer(torch.tensor([0.0, -most[0], most[1]], dtype=torch.float64)).tolist()
    if not plain:
        return None
    follows = lambda xs: (answer(xs) / (plain * xs.exp()) - 1).abs() <= 10 * reader.same
    edges: list[float | None] = []
    kinds = set()
    for sign, end, far in zip((-1.0, 1.0), ends, most, strict=True):
        if bool(follows(torch.tensor([sign * far], dtype=torch.float64))):
            edges.append(None)
            continue
        share = end / plain
        # Beyond the bound of a detached ratio the coefficient is that of the bound itself.
        at = sign * math.log(share) if share > 0 else -1.0
        near = answer(sign * torch.tensor([at - 1e-3, at + 1e-3], dtype=torch.float64)) / plain
        expected = torch.tensor([math.exp(sign * (at - 1e-3)), share], dtype=torch.float64)
        is_detached = at > 0 and bool((near / expected - 1).abs().max() <= SINGLE)
        if not is_detached:
            at_once = 1 if reader.coupled == "batch" else 32
            at = bisect(lambda xs, sign=sign: follows(sign * xs), 0.0, far, at_once)
        edges.append(round_short(math.exp(sign * at), 1e-6))
        kinds.add("truncate" if is_detached else "differentiated" if end else "mask")
    if not kinds:
        return None
    kind = kinds.pop() if len(kinds) == 1 else "other"
    if kind not in ("truncate", "differentiated"):
        return Bound(kind, edges[0], edges[1])
    bound = Bound("truncate" if edges[0] is None else "clip", edges[0], edges[1])
    if kind == "truncate":
        return bound
    side = -most[0] if edges[1] is None else FAR
    level = float(bound(torch.tensor(side, dtype=torch.float64).exp()))
    beyond = lambda xs: ask(torch.full_like(xs, side), xs) / level
    at_ref = float(beyond(torch.zeros(1, dtype=torch.float64)))
    return replace(bound, beyond=(read_curve(lambda xs: beyond(xs) - at_ref, reader.same), round_short(at_ref)))


# Division by a spread: what is left of it are the ratios of differences between completions.


def _read_spread(reader: PartReader, empty: Anatomy) -> Anatomy:
    """A loss that centres its credit and divides it by the spread: the curve up to a factor, and the credit's shape."""
    reader.coupled = "batch"
    base = ProbeInputs.at_reference([TOKENS] * ROWS, WIDTH)
    token = PLACE[1]
    # Row 2 has a known log-ratio, rows 3 and 7 give both groups a spread.
    entries = {(2, token): STEP, (3, 0): 2.0, (6, 1): 1.0, (7, 0): -1.0}
    inputs = base.with_entries("log_ratio", entries)
    if not all_finite(reader.read(inputs)):
        return replace(empty, finite=False)

    def read(log_ratios: Tensor, seen: int = token) -> Tensor:
        values = []
        for x in log_ratios.tolist():
            score = reader.read(inputs.with_entries("log_ratio", {(0, token): x})).score
            values.append((score[0, seen] - score[1, seen]) / (score[2, token] - score[1, token]))
        return torch.stack(values)

    same = max(reader.same, 1e-7)
    own = read_curve(lambda x: read(x) - read(torch.zeros(1))[0], same)
    near = GRID.abs() <= 4  # where an estimate is large the spread has rounded the others away
    if not own.shares and not own.has_edges and bool(own.points[1][near].isfinite().all()):
        own = replace(own, shares=fit(GRID[near], own.points[1][near], same) or {})
    if len(own.shares) == 1:
        own = own.times(1 / next(iter(own.shares.values())))
    one = torch.tensor([1.0], dtype=torch.float64)
    credit = torch.cat([read(one, seen) for seen in range(TOKENS)]) / read(one)
    short = lambda xs: tuple(round_short(float(x), 1e-6) for x in xs)
    credits = (Credit("sampled", own, 0.0, short(credit[:token].flip(0)), short(credit[token + 1 :])),)
    credits = credits if bool((credit.abs() > 1e-6).sum() > 1) else ()
    check = reader.at_random(MIXED, seed=1)

    def candidates() -> Iterator[Anatomy]:
        names = ("group-mean", "batch-mean", "return-mean")
        for spread, name, of_ended, unit in product(("batch", "group"), names, (True, False), UNITS):
            baseline = Baseline(name, of_ended, spread=spread)
            yield replace(empty, own=own, credits=credits, unit=unit, baseline=baseline, allowed=ROUNDED)

    best, _ = _best(reader, candidates(), check)
    best = _choose_samples(reader, _with_sign(reader, best))
    best = replace(best, unexplained=_compare(reader, best))
    return replace(best, unit=_unit_beside_spread(reader, best)) if best.proved_fresh else best


def _unit_beside_spread(reader: PartReader, parts: Anatomy) -> Unit:
    """The unit of a loss that is divided by a spread: one batch does not tell it, since a spread is any number.

    Batches of other lengths, widths and numbers of completions have the same spread: only the last tokens are away from
    ref, by the same log-ratios.
    """
    factors = []
    shapes = [([9] * ROWS, WIDTH), ([3] * ROWS, WIDTH), ([9] * ROWS, 3 * WIDTH), ([9] * 4 * ROWS, WIDTH)]
    for lengths, width in shapes:
        moves = {(row, lengths[row] - 1): math.sin(1 + row % ROWS) for row in range(len(lengths))}
        inputs = reader.at_reference(lengths, width).with_entries("log_ratio", moves)
        answer = reader.read(inputs).score
        formula = replace(parts, unit=Unit("sum", rows=False)).derivatives(inputs).score
        size = float(formula[inputs.mask].square().mean().sqrt())
        factors.append(size * float((answer * formula).sum() / formula.square().sum()))

    def misfit(unit: Unit) -> float:
        shares = (float(unit.shares(ProbeInputs.at_reference(*shape))[0, 0]) for shape in shapes)
        logs = [math.log(abs(factor) / share) for factor, share in zip(factors, shares, strict=True)]
        return max(logs) - min(logs)

    alike = [unit for unit in UNITS if (unit.name == "completion-mean") == (parts.unit.name == "completion-mean")]
    return min(alike, key=misfit) if all(math.isfinite(x) and x for x in factors) else Unit("other")


def _with_sign(reader: PartReader, parts: Anatomy) -> Anatomy:
    """The parts of a loss that is divided by a spread, with the sign of their factor, or by a number of either sign."""

    def factors(parts: Anatomy) -> list[float]:
        each = []
        for seed, turn in product((1, 3), (1, -1)):
            inputs = reader.at_random(MIXED, seed=seed)
            lower = torch.minimum(inputs.logp, reader.highest - inputs.log_ratio.abs())  # no log-prob of ref is above 0
            inputs = replace(inputs, log_ratio=turn * inputs.log_ratio, logp=lower)
            alike = reader.read(inputs).score * parts.derivatives(inputs).score
            each += [float(alike[inputs.group == g].sum()) for g in inputs.group.unique()]
        return each

    signs = factors(parts)
    if min(signs) < 0 < max(signs):
        signed = replace(parts, baseline=replace(parts.baseline, signed=1))
        return signed if max(factors(signed)) > 0 else replace(parts, baseline=replace(parts.baseline, signed=-1))
    if max(signs) > 0:
        return parts
    return replace(parts, own=parts.own.times(-1), credits=tuple(c.times(-1) for c in parts.credits))


# What a loss depends on that the formula does not have.


def _find_causes(reader: PartReader, parts: Anatomy) -> tuple[str, ...]:
    """What changes the coefficients though the formula says that it does not."""
    is_other = lambda x, y: bool((x - y).abs().max() > 100 * reader.same * max(float(x.abs().max()), reader.same))
    differ = lambda *inputs: any(map(is_other, *map(reader.read, inputs)))
    random = reader.at_random([TOKENS] * ROWS, seed=11)
    plain = replace(random, tilt=0 * random.tilt, odds=ODDS + 0 * random.odds)
    less = torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 3 * plain.mask
    several = reader.at_random([*MIXED, 6, 9, 3, 9], seed=12)
    tables = ("log_ratio", "log_weight", "logp", "mask", "odds", "tilt")
    turned = replace(several, **{name: getattr(several, name).roll(GROUP, 0) for name in tables})
    turned_back = lambda inputs: Derivatives(*(x.roll(-GROUP, 0) for x in reader.read(inputs)))

    def gain(place: tuple[int, int], beside: dict[tuple[int, int], float], base: ProbeInputs = reader.base) -> Tensor:
        """What the log-ratio of one token adds to its own coefficient, beside these of other tokens."""
        some, more = (base.with_entries("log_ratio", x) for x in (beside, beside | {place: STEP}))
        unit = reader.unit if reader.unit.name != "other" else Unit("sum")
        return (reader.read(more).score - reader.read(some).score)[place] / unit.shares(base)[place[0], 0]

    alone = gain(PLACE, {})
    more, group = (1, 3) if reader.coupled == "none" else (GROUP, GROUP)  # an odd number, unless a group is needed
    larger = reader.at_reference([TOKENS] * (ROWS + more), WIDTH, group)
    causes = {
        "the order of the completions in the batch": any(map(is_other, reader.read(several), turned_back(turned))),
        "the probability of the token itself": differ(plain, replace(plain, logp=plain.logp - less)),
        "the other entries of the vocabulary": differ(plain, replace(plain, odds=plain.odds - 3 * ODDS))
        or (parts.full is not None and not parts.full.shares),
        "the position of the token": any(is_other(alone, gain((0, t), {})) for t in (0, 2)),
        "the number of completions": is_other(alone, gain(PLACE, {}, larger)),
        "the log-ratios of the completion's other tokens": is_other(alone, gain(PLACE, {(0, 1): 2.0, (0, 7): 2.0})),
        "the log-ratios of other completions": is_other(alone, gain(PLACE, {(ROWS - 1, 1): 2.0, (1, 2): -2.0})),
    }
    return tuple(name for name, matters in causes.items() if matters)


def _sees_reference(reader: PartReader) -> bool:
    """Whether the reference changes the gradient at random inputs, in a batch of even and one of odd size."""
    for lengths in (MIXED, MIXED[:3]):
        one, other = (reader.at_random(lengths, seed=seed) for seed in (13, 14))
        one = replace(one, logp=torch.minimum(one.logp, other.logp))  # no log-prob of ref is above 0
        changed = replace(one, log_ratio=other.log_ratio, tilt=other.tilt)
        pairs = zip(reader.read(one), reader.read(changed), strict=True)
        if any(bool((a - b).abs().max() > 10 * reader.same * float(a.abs().max())) for a, b in pairs):
            return True
    return False


# Comparison of the formula with the loss.


def _compare(reader: PartReader, parts: Anatomy) -> dict[str, float]:
    """By probe, the share of the coefficients that the formula does not have."""
    probes = {
        "random log-ratios": reader.at_random(MIXED, seed=3),
        "large log-ratios": reader.at_random(MIXED, spread=9.0, seed=4),
        "groups of 64, 64 tokens": reader.at_random([63] * 40 + [1, 5, 33] * 8, 64, 64, seed=5),
        "one group of 2": reader.at_random([9, 4], group=2, seed=9),
        "one group of 3": reader.at_random([9, 4, 7], group=3, seed=10),
        "stale samples": reader.at_random(MIXED, stale=1.0, seed=6),
        # Beyond the bounds of a mean over the completion's tokens.
        "very stale samples": reader.at_random(MIXED, stale=2.5, seed=17),
    }
    for log_weight in (-FAR_WEIGHT, FAR_WEIGHT):
        # A gate that the ratio opens has no bound where the ratio is no factor.
        entries = {(row, row % min(MIXED)): log_weight for row in range(ROWS)}
        inputs = reader.at_random(MIXED, seed=19).with_entries("log_weight", entries)
        lower = inputs.logp.clamp(max=reader.highest - FAR_WEIGHT)  # no log-prob of the sampler is above 0
        probes[f"stale samples, a token with π/μ = {math.exp(log_weight):.1g}"] = replace(inputs, logp=lower)
    if parts.is_exact:
        # Beside small log-ratios: an estimate at large ones would hide that the divergence is clamped.
        far = reader.at_random(MIXED, seed=15)
        probes["large divergences of a token"] = replace(far, tilt=6 * far.tilt)
    return {name: _difference(parts, inputs, reader.read(inputs)) for name, inputs in probes.items()}

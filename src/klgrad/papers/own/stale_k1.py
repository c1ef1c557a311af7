"""A small push of k1 as a loss, on completions that are L updates old, grows if and only if η β λ_max(F) L > 1, under
SGD and without noise; with noise a collapse can begin below that, and under Adam the product is no threshold.

Exact: bandits with 2, 10 and 100 arms in float64, and the places of 32 texts in a transformer of 1.2 million parameters
as prompts of one token each. Sampled: bandits with 64 and 1024 completions in a batch, where a run has collapsed if it
has lost half of its entropy; the same with a reward, by SGD and by Adam, whose product has F times Adam's second
moments; and the transformer with Adam, whole completions and the reward of a right sum. Derivation and limits:
docs/experiments/stale-completions.md.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vjp

from ...drawing import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION
from ..runs import Row, below_over_seeds, counts, difference, exceeds_over_seeds
from ..study import Axes, Check, Figure, Numbers, Settings, at_point, below, columns, error_bars, exceeds, over_repeats
from ..tang_munos.bandits import count
from .small_model import PROMPT, Completions, Transformer, held_out, pretrained, prompts, sample, step, texts

PRODUCTS = (0.5, 0.8, 0.95, 1.05, 1.2, 2.0)
"""Of η β λ_max(F) L, with λ_max at the start."""
ARMS, LAGS = (2, 10, 100), (1, 2, 5, 10, 20, 50)
Bandit = torch.float64


def root(c: float, lag: int) -> float:
    """The largest z with c (1/z + ... + 1/z^lag) = 1."""
    companion = torch.diag(torch.ones(lag - 1, dtype=Bandit), -1)  # of z^lag = c (z^(lag - 1) + ... + 1)
    companion[0] = c
    return float(torch.linalg.eigvals(companion).real.max())


# Bandits, many at a time: (..., arms) logits. A batch is the share of its samples that each arm has.


def fisher(logits: Tensor) -> Tensor:
    """(..., arms, arms) the Fisher matrix of a softmax."""
    p = logits.softmax(-1)
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def largest_eigenvalue(logits: Tensor) -> Tensor:
    """(..., 1) λ_max(F)."""
    return torch.linalg.eigvalsh(fisher(logits))[..., -1:]


def shares(p: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The shares of the arms in so many samples, on the same random numbers for all settings."""
    return count(p, size, generator) / size


def entropy(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def push(logits: Tensor, rate: Tensor, lag: int, updates: int, size: float, seed: int) -> tuple[Tensor, Tensor]:
    """Exact descent after one random push: the length of every step (updates, ...), and the logits at the end."""
    generator = torch.Generator().manual_seed(seed)
    queue = deque([logits.softmax(-1)] * lag)
    now = logits + size * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
    steps = []
    for _ in range(updates):
        p = now.softmax(-1)
        queue.append(p)
        step = rate * (p - queue.popleft())
        now = now + step
        steps.append(step.norm(dim=-1))
    return torch.stack(steps), now


def random_logits(problems: int, arms: int, seed: int) -> Tensor:
    return torch.randn(problems, arms, generator=torch.Generator().manual_seed(seed), dtype=Bandit)


def growth(problems: int, seed: int) -> list[Numbers]:
    """The measured growth of a small push by arms, lag and product, and the one that the law predicts."""
    rows = []
    for arms, lag, product in itertools.product(ARMS, LAGS, PRODUCTS):
        logits = random_logits(problems, arms, seed)
        predicted = math.log(root(product / lag, lag))
        updates = int(min(3000, max(6 * lag, 8 / abs(predicted))))
        rate = product / lag / largest_eigenvalue(logits)
        steps, _ = push(logits, rate, lag, updates, 1e-9, seed + 1)
        half = updates // 2
        # The steps of one lag together, because a step oscillates within it.
        late, early = (steps[end - lag : end].square().sum(0) for end in (updates, half + lag))
        measured = (late / early).log() / 2 / (updates - half - lag)
        setting = {"arms": arms, "lag": lag, "product": product, "predicted": predicted}
        share = float((measured > 0).double().mean())
        rows.append({**setting, "measured": over_repeats(measured), "share that grows": share})
    return rows


def ends(problems: int, seed: int, updates: int = 2000) -> list[Numbers]:
    """Where exact descents end, by arms, lag and product: the share of the entropy that is left."""
    rows, products = [], torch.tensor(PRODUCTS, dtype=Bandit)[:, None, None]
    for arms, lag in itertools.product(ARMS, (2, 10)):
        logits = random_logits(problems, arms, seed)
        rate = products / lag / largest_eigenvalue(logits)
        _, end = push(logits.expand(len(PRODUCTS), -1, -1), rate, lag, updates, 1e-3, seed + 1)
        for product, left in zip(PRODUCTS, entropy(end) / entropy(logits), strict=True):
            rows.append({"arms": arms, "lag": lag, "product": product, "entropy": over_repeats(left)})
    return rows


QUEUES = {"fresh": "fresh", "queue": "filled queue", "repeated": "one batch again"}
FEW = (0.3, *PRODUCTS)


def collapses(problems: int, seed: int) -> list[Numbers]:
    """The share of sampled descents that collapse within 20 lags."""
    rows, products = [], torch.tensor(FEW, dtype=Bandit)[:, None, None]
    for arms, size, lag, queue in itertools.product(ARMS[1:], (64, 1024), (2, 10), QUEUES):
        start = random_logits(problems, arms, seed)
        rate = products / lag / largest_eigenvalue(start)
        end = _sampled(start.expand(len(FEW), -1, -1), rate, lag, size, queue, seed + 1)
        gone = (entropy(end) < entropy(start) / 2).double()
        setting = {"arms": arms, "size": size, "lag": lag, "queue": queue, "products": FEW}
        rows.append({**setting, "collapsed": over_repeats(gone), "each": gone.int().tolist()})
    return rows


def _sampled(logits: Tensor, rate: Tensor, lag: int, size: int, queue: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = deque(shares(logits.softmax(-1), size, generator) for _ in range(lag))
    for _ in range(20 * lag):
        p = logits.softmax(-1)
        kept.append(now := shares(p, size, generator))
        used = {"fresh": now, "queue": kept[0], "repeated": kept[0]}[queue]
        kept.popleft() if queue != "repeated" else kept.pop()
        logits = logits + rate * (p - used)
    return logits


# Bandits with a reward: the policy gradient of fresh samples, and k1 as a loss on stale ones.

REWARDED = (0.0, 0.3, *PRODUCTS, 4.0)
RATES = {"SGD": 0.3, "Adam": 0.03}
SAMPLES, WATCHED = 16, 50
"""Samples of a batch, and the update whose second moments give Adam's threshold."""


def rewarded(problems: int, seed: int, updates: int = 150) -> list[Numbers]:
    """The expected reward at the end less that without the term, on the same random numbers, by product."""
    rows = []
    for (optimiser, rate), lag in itertools.product(RATES.items(), (2, 10)):
        generator = torch.Generator().manual_seed(seed)
        logits, reward = torch.randn(2, problems, 10, generator=generator, dtype=Bandit)
        run = partial(_with_reward, logits, reward, lag, optimiser, rate, updates, seed + 1)
        scale = run(torch.zeros(1, 1, 1, dtype=Bandit))[1][0] if optimiser == "Adam" else torch.ones_like(logits)
        root_of = scale.sqrt()
        largest = torch.linalg.eigvalsh(root_of[:, :, None] * fisher(logits) * root_of[:, None, :])[:, -1:]
        end, _ = run(torch.tensor(REWARDED, dtype=Bandit)[:, None, None] / (lag * rate * largest))
        value = (end.softmax(-1) * reward).sum(-1)
        setting = {"optimiser": optimiser, "lag": lag, "products": REWARDED}
        gone = (entropy(end) < 0.1 * entropy(logits)).double()
        measures = {"difference": value - value[0], "collapsed": gone, "reward": value}
        rows.append({**setting, **{name: over_repeats(x) for name, x in measures.items()}})
    return rows


def _with_reward(
    logits: Tensor, reward: Tensor, lag: int, optimiser: str, rate: float, updates: int, seed: int, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The logits at the end, and one over the root of Adam's second moments after `WATCHED` updates."""
    generator = torch.Generator().manual_seed(seed)
    now = logits.expand(len(beta), -1, -1).clone().requires_grad_()
    descent = torch.optim.SGD([now], rate) if optimiser == "SGD" else torch.optim.Adam([now], rate)
    queue = deque(shares(now.detach().softmax(-1), SAMPLES, generator) for _ in range(lag))
    scale = torch.ones_like(now)
    for update in range(updates):
        p = now.detach().softmax(-1)
        queue.append(fresh := shares(p, SAMPLES, generator))
        weighted = fresh * (reward - (fresh * reward).sum(-1, keepdim=True))
        of_reward = weighted - p * weighted.sum(-1, keepdim=True)
        now.grad = beta * (queue.popleft() - p) - of_reward
        descent.step()
        if update == WATCHED and optimiser == "Adam":
            state = descent.state[now]
            scale = 1 / ((state["exp_avg_sq"] / (1 - 0.999 ** (update + 1))).sqrt() + 1e-8)
    return now.detach(), scale


# The transformer. Its Fisher matrix by products with vectors, and its largest eigenvalue by power iteration.

Parameters = dict[str, Tensor]


def fisher_product(model: Transformer, given: Completions, vector: Parameters) -> Parameters:
    """F v, with the mean over the completions of the sum over their places."""
    parameters = {name: x.detach() for name, x in model.named_parameters()}
    logits = lambda p: functional_call(model, p, (given.ids[:, :-1],))[:, PROMPT - 1 :]
    out, moved, *_ = jvp(logits, (parameters,), (vector,))
    p = out.softmax(-1) * given.mask[..., None] / len(given.ids)
    back = p * (moved - (p * moved).sum(-1, keepdim=True) / p.sum(-1, keepdim=True).clamp(min=1e-30))
    return vjp(logits, parameters)[1](back)[0]


def length(vector: Parameters) -> float:
    return math.sqrt(sum(float(x.square().sum()) for x in vector.values()))


def top_eigenvector(
    model: Transformer, given: Completions, scale: Parameters | None = None, times: int = 20
) -> tuple[float, Parameters]:
    """λ_max of the root of S times F times the root of S, S = `scale` on the diagonal, and its vector."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)
    vector = {name: draw(x) for name, x in model.named_parameters()}
    root_of = {name: 1.0 if scale is None else scale[name].sqrt() for name in vector}
    size = length(vector)
    for _ in range(times):
        vector = {name: x / size * root_of[name] for name, x in vector.items()}
        vector = {name: x * root_of[name] for name, x in fisher_product(model, given, vector).items()}
        size = length(vector)
    return size, {name: x / size for name, x in vector.items()}


TRAINED = 100
"""Updates of pretraining, after which a third of the sums are right."""
IN_TRANSFORMER = ((2, 0.8), (2, 0.95), (2, 1.05), (2, 1.2), (10, 0.8), (10, 1.2))
"""A lag and a product."""


def growth_in_transformer(model: Transformer, shown: int, updates: int, seed: int) -> Numbers:
    """The growth of a push along the top eigenvector: exact, each place of the texts is a prompt of one token."""
    model = deepcopy(model).double()
    given = texts(shown, torch.Generator().manual_seed(seed))
    largest, vector = top_eigenvector(model, given)
    start = {name: x.detach().clone() for name, x in model.named_parameters()}
    rows = []
    for lag, product in IN_TRANSFORMER:
        model.load_state_dict(start)
        rate = product / lag / largest
        with torch.no_grad():
            queue = deque([given.logp(model).exp()] * lag)
            for name, x in model.named_parameters():
                x += 1e-5 * vector[name]
        steps = []
        for _ in range(updates):
            logp = given.logp(model)
            queue.append(logp.detach().exp())
            cross = (queue.popleft() * logp).sum(-1)
            gradient = torch.autograd.grad((cross * given.mask).sum() / shown, list(model.parameters()))
            with torch.no_grad():
                for x, g in zip(model.parameters(), gradient, strict=True):
                    x -= rate * g
            steps.append(sum(float((g * v).sum()) for g, v in zip(gradient, vector.values(), strict=True)))
        half = updates // 2
        late, early = (math.hypot(*steps[end - lag : end]) for end in (updates, half + lag))
        measured = math.log(late / early) / (updates - half - lag)
        predicted = math.log(root(product / lag, lag))
        rows.append({"lag": lag, "product": product, "predicted": predicted, "measured": measured})
    return {"largest eigenvalue": largest, "parameters": sum(x.numel() for x in model.parameters()), "growth": rows}


@dataclass
class Arm:
    """A run of the transformer with the reward of a right sum."""

    lag: int
    beta: float
    repeated: bool = False


LM_ARMS = [
    Arm(1, 0.0),
    *(Arm(lag, beta) for beta in (0.01, 0.03, 0.1) for lag in (2, 10)),
    Arm(10, 0.03, repeated=True),
]
LM_RATE, GROUP = 2e-4, 8
EVALUATION = 0.03
"""Standard error of a difference of two shares near 0.35 of 512 answers each, rounded up to two digits."""


def trained_with_reward(model: Transformer, arm: Arm, updates: int, asked: int, seed: int) -> tuple[float, Parameters]:
    """Right answers after Adam with fresh completions for the reward and stale ones for k1; and its scale half way."""
    policy, generator = deepcopy(model), torch.Generator().manual_seed(seed)
    draw = lambda: sample(policy, prompts(asked, generator).repeat_interleave(GROUP, 0), generator)
    adam = torch.optim.Adam(policy.parameters(), LM_RATE)
    queue = deque(draw() for _ in range(arm.lag))
    scale: Parameters = {}
    for update in range(updates):
        fresh = draw()
        queue.append(fresh)
        stale = queue[0]
        queue.pop() if arm.repeated else queue.popleft()
        grouped = fresh.right.view(-1, GROUP)
        advantage = (grouped - grouped.mean(1, keepdim=True)).flatten()[:, None]
        loss = -(advantage * fresh.of_tokens(fresh.logp(policy))).sum() / len(advantage)
        if arm.beta:
            loss = loss + arm.beta * stale.of_tokens(stale.logp(policy)).sum() / len(advantage)
        step(adam, loss)
        if update == updates // 2:
            correction = 1 - 0.999 ** (update + 1)
            second = {name: adam.state[x]["exp_avg_sq"] / correction for name, x in policy.named_parameters()}
            scale = {name: 1 / (x.sqrt() + 1e-8) for name, x in second.items()}
    return float(held_out(policy).right.mean()), scale


def rewarded_transformer(model: Transformer, updates: int, asked: int, seeds: Sequence[int]) -> Numbers:
    """Right answers at the end by lag and β, and the product of Adam's threshold."""
    largest, runs = [], []
    for seed in seeds:
        for arm in LM_ARMS:
            right, scale = trained_with_reward(model, arm, updates, asked, seed)
            if not arm.beta:
                asked_here, generator = (torch.Generator().manual_seed(each) for each in (seed, 3))
                given = sample(model, prompts(128, asked_here), generator)
                largest.append(LM_RATE * top_eigenvector(model, given, scale)[0])
            product = arm.beta * arm.lag * largest[-1]
            end = {"right": right, "right_se": EVALUATION / 2**0.5}
            runs.append({**asdict(arm), "seed": seed, "product": product, **end})
    return {"start": float(held_out(model).right.mean()), "runs": runs, "updates": updates}


def run(settings: Settings) -> Numbers:
    problems, seed = settings.size(40, 10), settings.seed
    numbers = {
        "problems": problems,
        "growth": growth(problems, seed),
        "ends": ends(problems, seed),
        "collapses": collapses(problems, seed),
        "rewarded": rewarded(problems, seed),
    }
    if settings.quick:
        return numbers | {"transformer": None, "sums": None}
    model = pretrained(TRAINED, seed)
    numbers["transformer"] = growth_in_transformer(model, 32, 50, seed)
    return numbers | {"sums": rewarded_transformer(model, 30, 8, range(3))}


NEAR = 0.05
"""The largest relative difference between a measured and a predicted growth, and a small share of a reward."""


def check(numbers: Numbers) -> list[Check]:
    growth = numbers["growth"]
    off = [abs(x["measured"]["mean"] / x["predicted"] - 1) for x in growth]
    shares = {above: [x["share that grows"] for x in growth if (x["product"] > 1) == above] for above in (True, False)}
    left = {(x["arms"], x["product"], x["lag"]): x["entropy"]["mean"] for x in numbers["ends"]}
    apart = max(abs(left[arms, product, 2] - left[arms, product, 10]) for arms, product, _ in left)
    checks = [
        Check(
            "exact: no push grows at a product of 0.95 or less, and every one at 1.05 or more",
            f"{max(shares[False]):.0%} and {min(shares[True]):.0%} of the problems in every setting",
            max(shares[False]) == 0 and min(shares[True]) == 1,
        ),
        below("exact: it grows at the predicted rate (largest relative difference of a mean)", max(off), NEAR),
        below("exact: where it ends depends on the product and not on the lag (share of the entropy)", apart, 1e-3),
    ]
    of_queue = {name: [x for x in numbers["collapses"] if x["queue"] == name] for name in QUEUES}
    queue = of_queue["queue"]
    gone = [x["collapsed"]["mean"][FEW.index(0.8)] for x in queue]
    checks += [
        exceeds(
            "sampled: above the threshold (1.2) more runs collapse than with fresh completions at the same rate",
            _difference(queue, of_queue["fresh"], 1.2),
        ),
        Check(
            "sampled: no run collapses below the threshold (0.8)",
            f"{min(gone):.0%} to {max(gone):.0%} of the runs of a setting",
            max(gone) == 0,
        ),
        exceeds(
            "a repeated batch collapses more runs than a queue, at 0.3", _difference(of_queue["repeated"], queue, 0.3)
        ),
    ]
    sgd, adam = ([x for x in numbers["rewarded"] if x["optimiser"] == name] for name in RATES)
    lost = [x["collapsed"]["mean"][REWARDED.index(4.0)] for x in adam]
    gaps = (at_point(x["difference"], REWARDED.index(2.0)) for x in sgd)
    costs = max(gaps, key=lambda x: x["mean"] / x["error"])
    checks += [
        exceeds("with a reward, SGD: above the threshold (2) the term costs reward", costs, sign=-1),
        _free("with a reward, SGD: below it (0.5) it costs less than 5% of the reward", sgd, 0.5),
        Check(
            "with a reward, Adam: most policies lose nine tenths of their entropy above the threshold of Adam's second "
            "moments (4)",
            f"at most {max(lost):.0%} of the runs of a setting",
            min(lost) > 0.5,
        ),
    ]
    return [*checks, *_of_transformer(numbers)] if numbers["sums"] else checks


def _of_transformer(numbers: Numbers) -> list[Check]:
    growth, sums = numbers["transformer"]["growth"], numbers["sums"]["runs"]
    off = max(abs(x["measured"] / x["predicted"] - 1) for x in growth)
    signs = all((x["measured"] > 0) == (x["product"] > 1) for x in growth)
    of = lambda lag, beta: [x for x in sums if (x["lag"], x["beta"], x["repeated"]) == (lag, beta, False)]
    base, least = of(1, 0.0), NEAR * fmean(x["right"] for x in of(1, 0.0))
    older = "sums, Adam, β = 0.1: a lag of 10 (product {1:.2g}) ends with fewer right answers than one of 2 ({0:.2g})"
    older = older.format(*(_product(of(lag, 0.1)) for lag in (2, 10)))
    little = "sums, Adam, β = 0.1: a lag of 2 costs less than 5% of the right answers"
    return [
        Check("the same threshold in the transformer, places as prompts", f"{len(growth)} signs of the growth", signs),
        below("the transformer: at the predicted rate (largest relative difference)", off, 2 * NEAR),
        exceeds_over_seeds(older, difference(of(2, 0.1), of(10, 0.1), "right")),
        below_over_seeds(little, difference(base, of(2, 0.1), "right"), least),
        _ordered(base, [of(lag, beta) for beta in (0.01, 0.03, 0.1) for lag in (2, 10)]),
    ]


def _product(runs: list[Row]) -> float:
    return fmean(x["product"] for x in runs)


def _ordered(base: list[Row], arms: list[list[Row]]) -> Check:
    """Whether Adam's product orders the losses of all settings: no smaller product loses more, by two errors."""
    arms = sorted(arms, key=_product)
    pairs = [difference(large, small, "right") for i, small in enumerate(arms) for large in arms[i + 1 :]]
    losses = ((_product(arm), difference(base, arm, "right")["mean"]) for arm in arms)
    parts = "; ".join(f"{product:.2g}: {loss:+.2f}" for product, loss in losses)
    claim = "sums, Adam: of two settings that differ the one with the larger product loses more right answers"
    wrong, right = sum(counts(gap) for gap in pairs), sum(counts(gap, -1) for gap in pairs)
    words = f"{wrong} of {wrong + right} pairs are the other way round; losses by product: {parts}"
    return Check(claim, words, wrong == 0 and right > 0, decided=wrong + right > 0)


def _difference(ones: list[Numbers], others: list[Numbers], product: float) -> Numbers:
    """The smallest mean difference of the settings and its error, problem by problem."""
    at = FEW.index(product)
    each = [torch.tensor([x["each"][at] for x in side], dtype=Bandit) for side in (ones, others)]
    gaps = over_repeats(each[0] - each[1])
    return at_point(gaps, min(range(len(ones)), key=lambda i: (gaps["mean"][i], gaps["error"][i])))


def _free(claim: str, runs: list[Numbers], product: float) -> Check:
    pairs = [(at_point(x["difference"], REWARDED.index(product)), x["reward"]["mean"][0]) for x in runs]
    gap, base = min(pairs, key=lambda x: x[0]["mean"] / x[1])
    cost, error = -gap["mean"] / base, gap["error"] / base
    low, high = cost + 2 * error < NEAR, cost - 2 * error > NEAR
    return Check(claim, f"{cost:.1%} ± {error:.1%}", low, decided=low or high)


def draw(numbers: Numbers, figure: Figure) -> None:
    figure.set_size_inches(12.5, 7.4)
    growth, end, collapse, reward, model, answers = figure.subplots(2, 3).flat
    problems = numbers["problems"]
    of_bandits = [{**x, "measured": x["measured"]["mean"]} for x in numbers["growth"]]
    _draw_growth(of_bandits, growth, f"2, 10, 100 arms, means of {problems} problems")
    if numbers["sums"]:
        _draw_growth(numbers["transformer"]["growth"], model, "transformer of 1.2 million parameters")
        _draw_answers(numbers["sums"], answers)
    else:
        for axis in (model, answers):
            axis.set_axis_off()
    for arms, colour in zip(ARMS, (GREY, BLUE, VERMILION), strict=True):
        entropies = [x["entropy"] for x in numbers["ends"] if x["arms"] == arms and x["lag"] == 10]
        error_bars(end, PRODUCTS, entropies, color=colour, ms=4, label=f"{arms} arms")
    _threshold(end, f"without noise: where it ends\n({problems} problems, ± 1 SE)", "entropy at the end / at the start")
    end.legend(fontsize=8)
    looks = {("fresh", 64): (GREY, ":"), ("queue", 64): (BLUE, "-"), ("repeated", 64): (VERMILION, "--")}
    looks |= {("queue", 1024): (GREEN, "-")}
    for x in numbers["collapses"]:
        if (x["arms"], x["lag"]) == (10, 10) and (x["queue"], x["size"]) in looks:
            (colour, line), share = looks[x["queue"], x["size"]], x["collapsed"]
            collapse.errorbar(x["products"], share["mean"], yerr=share["error"], fmt=f"o{line}", ms=4, color=colour)
            collapse.lines[-1].set_label(f"{QUEUES[x['queue']]}, {x['size']}")
    title = f"10 arms, lag 10, batches of 64 or 1024\n({problems} problems, ± 1 SE)"
    _threshold(collapse, title, "share of runs that collapse")
    collapse.legend(fontsize=8, loc="center right")
    for x in numbers["rewarded"]:
        colour, line = (BLUE if x["optimiser"] == "SGD" else ORANGE), ("-" if x["lag"] == 10 else "--")
        gap, label = x["difference"], f"{x['optimiser']}, lag {x['lag']}"
        reward.errorbar(x["products"], gap["mean"], yerr=gap["error"], fmt=f"o{line}", ms=4, color=colour, label=label)
    title = f"with a reward, 10 arms, 150 updates\n({problems} problems, ± 1 SE)"
    _threshold(reward, title, "reward less that without the term")
    reward.legend(fontsize=8)


def _threshold(axis: Axes, title: str, ylabel: str) -> None:
    axis.axvline(1, color=BLACK, lw=0.8, ls=":")
    axis.set_title(title, fontsize=10)
    axis.set(xlabel="η β λ_max(F) L", ylabel=ylabel)


def _draw_growth(rows: list[Numbers], axis: Axes, what: str) -> None:
    colours = dict(zip(LAGS, (BLACK, BLUE, GREEN, ORANGE, VERMILION, GREY), strict=True))
    for lag in dict.fromkeys(x["lag"] for x in rows):
        own = columns((x for x in rows if x["lag"] == lag), "predicted", "measured")
        axis.plot(*own, "o", ms=4, color=colours[lag], label=f"lag {lag}")
    (reach,) = columns(rows, "predicted")
    axis.plot([min(reach), max(reach)], [min(reach), max(reach)], color=BLACK, lw=0.8)
    axis.set_title(f"growth of a small push, no noise\n({what})", fontsize=10)
    axis.set(xlabel="predicted log growth an update", ylabel="measured")
    axis.legend(fontsize=8)


def _draw_answers(sums: Numbers, axis: Axes) -> None:
    looks = {(2, False): (BLUE, "o"), (10, False): (VERMILION, "o"), (10, True): (VERMILION, "x")}
    for (lag, repeated), (colour, mark) in looks.items():
        own = (x for x in sums["runs"] if (x["lag"], x["repeated"]) == (lag, repeated))
        label, size = f"lag {lag}{', repeated' * repeated}", 6 if repeated else 5
        axis.plot(*columns(own, "product", "right"), mark, ms=size, color=colour, label=label)
    for i, x in enumerate(x for x in sums["runs"] if not x["beta"]):
        axis.axhline(x["right"], color=GREY, lw=0.8, ls="--", label="without the term" if i == 0 else None)
    seeds = len({x["seed"] for x in sums["runs"]})
    title = f"transformer, sums, Adam, {sums['updates']} updates\n({seeds} seeds, one mark a run)"
    _threshold(axis, title, "right answers at the end")
    axis.set(xlabel="η β λ_max L with Adam's second moments", xscale="log")
    axis.legend(fontsize=8)

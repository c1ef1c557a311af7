"""With a KL in the reward and advantages divided by the group's deviation, groups whose rewards are all equal hold a
policy at ref; leaving just these undivided, or the KL in the advantage after the division, restores the learning.

In such a group the deviation is that of β KL alone: divided by it the KL has advantages of size 1 whatever β is. A
softmax policy answers 64 prompts with one of 32 arms, and adds 20 tokens that no reward depends on. Its logits are
linear in 16 random features of the prompt, so that prompts share parameters; the start is the reference. Every update
has 8 completions of each prompt, and Adam at 0.03. All arms share their random numbers, and differences are taken seed
by seed. Then the task is varied. A transformer of 1.2 million parameters, with sums, has too few updates to learn much;
there the pull shows in the KL. Reasons and limits: docs/experiments/division.md.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from ...drawing import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION
from .. import runs
from ..study import Check, Figure, Numbers, Settings, exceeds, over_repeats
from .small_model import Transformer, held_out, pretrained, prompts, sample, step

EPSILON = 1e-4
"""What TRL adds to a deviation before it divides by it."""


# The advantages of groups, (..., completions): reward r and log-ratio x of each completion.


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def divided(x: Tensor, by: Tensor | None = None) -> Tensor:
    """Centred and divided by the deviation of the group, its own or that of another quantity."""
    return centred(x) / ((x if by is None else by).std(-1, keepdim=True) + EPSILON)


def without_spread(r: Tensor) -> Tensor:
    """(..., 1) where the rewards of a group are all equal."""
    return r.std(-1, keepdim=True) == 0


def undivided_without_spread(r: Tensor, x: Tensor, by: Tensor | None = None) -> Tensor:
    return torch.where(without_spread(r), centred(x), divided(x, by))


def random_groups(r: Tensor, generator: torch.Generator) -> Tensor:
    """(..., groups, 1) as many groups as have no spread."""
    none = without_spread(r)
    order = torch.rand(none.shape, generator=generator, dtype=torch.float64).argsort(-2).argsort(-2)
    return order < none.sum(-2, keepdim=True)


Advantage = Callable[[Tensor, Tensor, float, torch.Generator], Tensor]

ADVANTAGES: dict[str, Advantage] = {
    "undivided": lambda r, x, beta, _: centred(r - beta * x),
    "divided": lambda r, x, beta, _: divided(r - beta * x),
    "no spread: undivided": lambda r, x, beta, _: undivided_without_spread(r, r - beta * x),
    "by the reward's deviation": lambda r, x, beta, _: undivided_without_spread(r, r - beta * x, by=r),
    "no spread: dropped": lambda r, x, beta, _: torch.where(without_spread(r), 0, divided(r - beta * x)),
    "random: dropped": lambda r, x, beta, g: torch.where(random_groups(r, g), 0, divided(r - beta * x)),
    "in the advantage": lambda r, x, beta, _: divided(r) - beta * centred(x),
}


# The softmax policy. All tensors have the seeds first.


@dataclass(frozen=True)
class Task:
    """What is varied.

    Attributes:
        features: of a prompt; random, or if there are as many as prompts, each prompt has one of its own.
        rate: the learning rate.
        irrelevant: tokens after the answer, with 8 choices each.
        unsolvable: the share of prompts that have no right answer.
        group: completions of a prompt.
    """

    features: int = 16
    rate: float = 0.03
    irrelevant: int = 20
    unsolvable: float = 0.0
    group: int = 8


PROMPTS, ANSWERS, CHOICES = 64, 32, 8
SHORT, LONG = 60, 300
EVERY = 20
REMEDY, SMALLER = "no spread: undivided", (0.1, 0.01, 0.001)
MAIN = dict.fromkeys(ADVANTAGES, (0.1,)) | {"undivided": (0.0, 0.1)} | dict.fromkeys(("divided", REMEDY), SMALLER)
"""The β of each arm."""
VARIED = {
    "features": [Task(features=features) for features in (32, PROMPTS)],
    "rate": [Task(rate=0.1)],
    "irrelevant": [Task(irrelevant=irrelevant) for irrelevant in (0, 5, 40)],
    "group": [Task(group=group) for group in (4, 16)],
    "unsolvable": [Task(unsolvable=share) for share in (0.3, 0.6)],
}


def train(arm: str, beta: float, task: Task, seeds: int, updates: int, seed: int) -> dict[str, Tensor]:
    """(points, seeds) the probability of right answers to solvable prompts and the KL, every `EVERY` updates."""
    generator, other = (torch.Generator().manual_seed(each) for each in (2 * seed, 2 * seed + 1))
    normal = lambda *shape: torch.randn(seeds, *shape, generator=generator, dtype=torch.float64)
    features = normal(PROMPTS, task.features) / task.features**0.5
    if task.features == PROMPTS:
        features = torch.eye(PROMPTS, dtype=torch.float64).expand(seeds, -1, -1)
    right = torch.zeros(seeds, PROMPTS, ANSWERS, dtype=torch.float64)
    right.scatter_(-1, torch.randint(ANSWERS, (seeds, PROMPTS, 1), generator=generator), 1.0)
    solvable = PROMPTS - round(task.unsolvable * PROMPTS)
    right[:, solvable:] = 0
    first = normal(task.irrelevant, CHOICES)
    weights = torch.zeros(seeds, task.features, ANSWERS, dtype=torch.float64, requires_grad=True)
    rest = first.clone().requires_grad_()
    ref, ref_rest = torch.log_softmax(features @ weights.detach(), -1), first.log_softmax(-1)
    adam, seen = torch.optim.Adam([weights, rest], task.rate), []
    for update in range(updates + 1):
        logp, logp_rest = torch.log_softmax(features @ weights, -1), rest.log_softmax(-1)
        if update % EVERY == 0:
            kl = (logp.exp() * (logp - ref)).sum(-1).mean(-1) + (logp_rest.exp() * (logp_rest - ref_rest)).sum((-1, -2))
            answered = (logp.exp() * right).sum(-1)[:, :solvable].mean(-1)
            seen.append(torch.stack([answered, kl]).detach())
        uniform = torch.rand(seeds, PROMPTS, task.group, generator=generator, dtype=torch.float64)
        answers = drawn(logp, uniform)
        many = torch.rand(seeds, task.irrelevant, PROMPTS * task.group, generator=generator, dtype=torch.float64)
        tokens = drawn(logp_rest, many)
        of_rest = lambda x, tokens=tokens: x.gather(-1, tokens).sum(1).view(seeds, PROMPTS, task.group)
        of_completion = logp.gather(-1, answers) + of_rest(logp_rest)
        with torch.no_grad():
            ratio = of_completion - ref.gather(-1, answers) - of_rest(ref_rest)
            advantage = ADVANTAGES[arm](right.gather(-1, answers), ratio, beta, other)
        step(adam, -(advantage * of_completion).mean((-1, -2)).sum())
    return dict(zip(("right", "kl"), torch.stack(seen, 1), strict=True))


def drawn(logp: Tensor, uniform: Tensor) -> Tensor:
    """Indices of the choices by random numbers, over the last axis."""
    indices = torch.searchsorted(logp.detach().exp().cumsum(-1), uniform)
    return indices.clamp(max=logp.shape[-1] - 1)


# Sums in a transformer.

LM_ARMS = {"undivided": 0.1, "divided": 0.1, "no spread: undivided": 0.1, "in the advantage": 0.1}
TRAINED = 80
"""Updates of pretraining, after which few sums are right."""


def sums(arm: str, beta: float, start: Transformer, updates: int, asked: int, seed: int) -> Numbers:
    """Right answers, KL per completion and the share of groups without spread, every `EVERY` updates."""
    policy, generator = deepcopy(start), torch.Generator().manual_seed(seed)
    adam, seen, spread = torch.optim.Adam(policy.parameters(), 2e-4), [], []
    for update in range(updates + 1):
        if update % EVERY == 0:
            judged = held_out(policy)
            with torch.no_grad():
                logp = judged.logp(policy)
                kl = (logp.exp() * (logp - judged.logp(start))).sum(-1) * judged.mask
            seen.append((float(judged.right.mean()), float(kl.sum(-1).mean())))
        batch = sample(policy, prompts(asked, generator).repeat_interleave(8, 0), generator)
        logp = batch.of_tokens(batch.logp(policy))
        with torch.no_grad():
            ratio = (logp - batch.of_tokens(batch.logp(start))).sum(-1).view(asked, 8)
            reward = batch.right.view(asked, 8)
            advantage = ADVANTAGES[arm](reward, ratio, beta, generator).view(-1, 1)
            spread.append(float(without_spread(reward).double().mean()))
        step(adam, -(advantage * logp).sum() / len(logp))
    right, kl = zip(*seen, strict=True)
    return {"right": right, "kl": kl, "without spread": sum(spread) / len(spread)}


def run(settings: Settings) -> Numbers:
    seeds, long, short = settings.size(8, 2), settings.size(2 * LONG, SHORT), settings.size(LONG, SHORT)
    of = lambda arm, beta, task, updates: train(arm, beta, task, seeds, updates, settings.seed)
    main = {f"{arm}, β = {beta:g}": of(arm, beta, Task(), long) for arm, betas in MAIN.items() for beta in betas}
    named = lambda arm: main[arm if arm in main else f"{arm}, β = 0.1"]
    varied = [
        {"varied": name, "task": asdict(task), **_gap(of, task, long if name == "unsolvable" else short)}
        for name, tasks in VARIED.items()
        for task in tasks
    ]
    return {
        "seeds": seeds,
        "updates": list(range(0, long + 1, EVERY)),
        "main": {name: {key: over_repeats(x) for key, x in measures.items()} for name, measures in main.items()},
        "differences": {
            claim: [_difference(named(more), named(less), at) for at in (SHORT, long)]
            for claim, (more, less) in COMPARED.items()
        },
        "varied": varied,
        "sums": None if settings.quick else _sums(settings),
    }


def _difference(more: dict[str, Tensor], less: dict[str, Tensor], at: int) -> Numbers:
    """Seed by seed, after a number of updates."""
    return {"updates": at, **over_repeats((more["right"] - less["right"])[at // EVERY])}


def _gap(of: Callable[..., dict[str, Tensor]], task: Task, updates: int) -> Numbers:
    sides = {arm: of(arm, 0.1, task, updates) for arm in ("divided", REMEDY)}
    ends = [SHORT, updates] if updates > SHORT else [SHORT]
    return {
        "ends": ends,
        "right": {arm: [over_repeats(x["right"][at // EVERY]) for at in ends] for arm, x in sides.items()},
        "difference": [_difference(sides[REMEDY], sides["divided"], at) for at in ends],
    }


def _sums(settings: Settings) -> Numbers:
    start, seeds, updates, asked = pretrained(TRAINED, settings.seed), 3, 40, 8
    arms = {
        arm: [sums(arm, beta, start, updates, asked, seed) for seed in range(seeds)] for arm, beta in LM_ARMS.items()
    }
    return {"updates": list(range(0, updates + 1, EVERY)), "arms": arms}


REWARD, DROPPED, RANDOM = "by the reward's deviation", "no spread: dropped", "random: dropped"
ADVANTAGE, SMALL = "in the advantage", "divided, β = 0.001"
COMPARED = {
    "undivided, more answers are right than divided": ("undivided", "divided"),
    "with groups without spread undivided, more answers are right than divided": (REMEDY, "divided"),
    "with the same groups dropped, more are right than with as many random ones dropped": (DROPPED, RANDOM),
    "divided with a hundredfold smaller β, fewer are right than with groups without spread undivided": (REMEDY, SMALL),
    "in the advantage, more are right than divided": (ADVANTAGE, "divided"),
    "divided by the reward's deviation only, more are right than divided": (REWARD, "divided"),
    "in the advantage, more are right than divided by the reward's deviation only": (ADVANTAGE, REWARD),
}
"""The arm with more right answers, and the other; with β = 0.1 where it is not said."""


def check(numbers: Numbers) -> list[Check]:
    checks = []
    for claim, (early, late) in numbers["differences"].items():
        judged = exceeds(f"after {early['updates']} updates: {claim}", early)
        more = f"by {early['mean']:.3f} ± {early['error']:.3f}, {judged.measured}"
        then = f"after {late['updates']}: {late['mean']:+.3f} ± {late['error']:.3f}"
        checks.append(replace(judged, measured=f"{more}; {then}"))
    of = {(x["varied"], x["task"][x["varied"]]): x for x in numbers["varied"]}
    for (name, value), x in of.items():
        gap = x["difference"][-1]
        with_it, without = (x["right"][arm][-1]["mean"] for arm in (REMEDY, "divided"))
        claim = f"after {gap['updates']} updates the remedy is ahead by more than {AHEAD:g} with {name} {value:g}"
        judged = exceeds(claim, {**gap, "mean": gap["mean"] - AHEAD})
        checks.append(replace(judged, measured=f"{with_it:.3f} against {without:.3f}, {judged.measured}"))
    return [*checks, *_of_sums(numbers["sums"]["arms"])] if numbers["sums"] else checks


AHEAD = 0.05


def _of_sums(arms: dict[str, list[Numbers]]) -> list[Check]:
    end = lambda arm: [
        {"seed": seed, "right": x["right"][-1], "right_se": EVALUATION / 2**0.5, "kl": x["kl"][-1]}
        for seed, x in enumerate(arms[arm])
    ]
    claims = {
        "right": "with groups without spread undivided, more answers are right than divided",
        "kl": "divided, the policy stays nearer to ref than with these undivided",
    }
    gaps = {key: runs.difference(end(REMEDY), end("divided"), key) for key in claims}
    return [runs.exceeds_over_seeds(f"transformer: {claim}", gaps[key]) for key, claim in claims.items()]


EVALUATION = 0.026
"""Standard error of a difference of two shares near 0.22 of 512 answers each."""
LOOKS = {
    "undivided, β = 0.1": (BLACK, "-"),
    "divided, β = 0.1": (VERMILION, "-"),
    "divided, β = 0.001": (VERMILION, "--"),
    f"{REMEDY}, β = 0.1": (BLUE, "-"),
    "random: dropped, β = 0.1": (GREY, "--"),
    "in the advantage, β = 0.1": (GREEN, "-"),
}


def draw(numbers: Numbers, figure: Figure) -> None:
    figure.set_size_inches(13, 4.6)
    learnt, lead, model = figure.subplots(1, 3)
    for name, (colour, line) in LOOKS.items():
        path = {"updates": numbers["updates"], **numbers["main"][name]["right"]}
        runs.curve(learnt, path, colour, line, label=name)
    learnt.set_title(f"64 prompts, 16 features\n({numbers['seeds']} seeds, ± 1 SE)", fontsize=10)
    learnt.set(xlabel="updates", ylabel="right answers")
    arms = learnt.get_legend_handles_labels()
    figure.legend(*arms, fontsize=8.5, ncols=6, loc="outside lower center", title="left panel")
    labels = []
    for i, x in enumerate(numbers["varied"]):
        labels.append(f"{x['varied']} {x['task'][x['varied']]:g}")
        for gap, colour in zip(x["difference"], (BLUE, ORANGE), strict=False):
            early = gap["updates"] == SHORT
            lead.errorbar([gap["mean"]], [i], xerr=[gap["error"]], fmt="o" if early else "s", ms=5, color=colour)
    lead.plot([], [], "o", color=BLUE, label=f"after {SHORT} updates")
    lead.plot([], [], "s", color=ORANGE, label="after 300; unsolvable: 600")
    lead.axvline(0, color=BLACK, lw=0.8)
    lead.set_yticks(range(len(labels)), labels)
    lead.set_title(f"groups without spread undivided, less divided\n({numbers['seeds']} seeds, ± 1 SE)", fontsize=10)
    lead.set(xlabel="difference of right answers", ylim=(-0.6, len(labels) + 1.2))
    lead.legend(fontsize=8, loc="upper left")
    if not numbers["sums"]:
        model.set_axis_off()
        return
    for arm, colour in zip(LM_ARMS, (BLACK, VERMILION, BLUE, GREEN), strict=True):
        for i, x in enumerate(numbers["sums"]["arms"][arm]):
            model.plot(x["kl"], x["right"], ".-", color=colour, lw=1, label=arm if i == 0 else None)
    last, seeds = numbers["sums"]["updates"][-1], len(numbers["sums"]["arms"]["divided"])
    model.set_title(f"transformer, β = 0.1, {last} updates\n({seeds} seeds, one line a run)", fontsize=10)
    model.set(xlabel="KL(π‖ref) per completion, nats", ylabel="right answers", ylim=(0, 0.4))
    model.legend(fontsize=8)

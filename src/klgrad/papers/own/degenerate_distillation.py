"""Distilled by the sequence-level reverse KL, a student that cannot match its teacher ends with short completions for
good; one that can is there for a while and comes back; the token level keeps the length.

KL(student‖teacher) of completions adds up over tokens, so a student whose KL per token stays above 0 lowers it by
ending early. Gradients and KLs are exact sums: policies are of first order, with a vocabulary of 16 and an end token
(`fig8_sequences.py`), and the student has 2 to 16 rows of logits for the teacher's 16. A warm start has 300 updates at
the token level and goes on at the sequence level. The share is the length of the student's completions over that of the
teacher's. The same, sampled, with transformers that write sums: the teacher has 1.2 million parameters, and a student
either the same or 1% of them.
"""

import itertools
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from ...core.rollout import Rollout
from ...core.term import KLTerm
from ...drawing import BLUE, GREEN, VERMILION
from ...enumeration import END
from ..runs import curve, exceeds_over_seeds
from ..study import Axes, Check, Figure, Numbers, Settings, error_bars, exceeds, over_repeats
from ..tang_munos.fig8_sequences import REF_SCALE, VOCAB, Problems
from .small_model import Transformer, held_out, pretrain, prompts, sample, step

# First-order policies: the gradient of any discount, exactly.


@dataclass(frozen=True)
class Regime:
    """What is varied; the defaults are those of the other cases.

    Attributes:
        rows: of the student's logits.
        distance: deviation of the start's logits from the mean of the teacher's in each class.
        length: most tokens of a completion.
        discount: of the future; 0 is the token level, 1 the sequence level.
        warm: updates at the token level before the others.
    """

    rows: int = 4
    distance: float = 2.0
    length: int = 16
    discount: float = 1.0
    warm: int = 0


RATE, WARM, PROBLEMS = 0.03, 300, 20
POINTS = (0, 5, 10, 20, 40, 60, 100, 150, 200, 300, 305, 310, 320, 340, 400, 500, 600)


def problems_of(case: Regime, number: int, seed: int) -> Problems:
    """Random teachers, the same ones for every case, and students at the start."""
    generator = torch.Generator().manual_seed(seed)
    ref, away = torch.randn(2, number, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    ref, away = REF_SCALE * ref, away[:, : case.rows]
    middle = ref.view(number, VOCAB // case.rows, case.rows, VOCAB).mean(1)
    return Problems(torch.log_softmax(ref, -1), middle + case.distance * away, True, case.length)


def discounted_loss(problems: Problems, logp: Tensor, discount: float) -> Tensor:
    """A scalar whose gradient is E[Σ_t ∇KL_t + s_t Σ_{s>t} discount^{s-t} KL_s], visits and futures held fixed."""
    kl = (logp.exp() * (logp - problems.ref)).sum(-1)
    with torch.no_grad():
        p, own = logp.exp(), kl.detach()
        later = [torch.zeros_like(own)]  # of the state before the last token, the one before it, ...
        for _ in range(problems.length - 1):
            later.append(own + discount * (p * _live(later[-1])[:, None]).sum(-1))
        now = torch.full_like(own, 1 / own.shape[-1])
        visits, future = torch.zeros_like(own), torch.zeros_like(p)
        for value in reversed(later):
            visits += now
            future += now[..., None] * _live(value)[:, None]
            now = _live((now[..., None] * p).sum(-2))
    return (visits * kl).sum() + discount * (future * logp.exp()).sum()


def _live(x: Tensor) -> Tensor:
    """0 at the end token, after which there is nothing."""
    return x.index_fill(-1, torch.tensor([END]), 0.0)


def descend(case: Regime, number: int, updates: int, seed: int) -> Numbers:
    """Both KLs and the share of the teacher's length, exact, at `POINTS`; its lowest since the end of a warm start."""
    problems = problems_of(case, number, seed)
    logits = problems.start.clone().requires_grad_()
    adam, seen = torch.optim.Adam([logits], RATE), []
    points = [point for point in POINTS if point <= updates]
    long = problems.visits(problems.ref).sum(-1)
    for update in range(updates + 1):
        logp = problems.log_probs(logits)
        if update in points:
            now = logp.detach()
            share = problems.visits(now).sum(-1) / long
            seen.append(torch.stack([problems.kl(now, problems.ref), problems.kl(problems.ref, now), share]))
        step(adam, discounted_loss(problems, logp, case.discount if update >= case.warm else 0.0))
    seen = torch.stack(seen, 1)
    return {
        "case": asdict(case),
        "updates": points,
        **{key: over_repeats(x) for key, x in zip(("own", "teacher", "share"), seen, strict=True)},
        "lowest": seen[2, points.index(case.warm) :].amin(0).tolist(),
        "end": seen[2, -1].tolist(),
        "teacher at the end": seen[1, -1].tolist(),
    }


LEVELS = {"token": Regime(discount=0.0), "sequence": Regime(), "warm": Regime(warm=WARM)}
LEVEL_ROWS = (4, 8, 16)
VARIED = {
    "distance": [Regime(rows=rows, distance=distance) for rows in (4, 16) for distance in (0.0, 0.5, 1.0, 4.0)],
    "length": [Regime(rows=rows, length=length) for rows in (4, 16) for length in (4, 8, 32)],
    "discount": [Regime(rows=rows, discount=discount) for rows in (4, 16) for discount in (0.25, 0.5, 0.75, 0.9)],
}


# Transformers.

LM_RATE = 3e-4
STUDENTS = {"the same": (160, 4, 5), "1% of it": (32, 1, 2)}
"""Width, layers and heads."""
LM_LEVELS = {"token": 1.0, "sequence": 0.0, "warm": 0.5}
"""The first part of the updates, which is at the token level."""
TOKEN, SEQUENCE = KLTerm(estimator="exact", level="token"), KLTerm(estimator="exact", baseline="leave_one_out")


def distil(start: Transformer, teacher: Transformer, level: str, updates: int, asked: int, seed: int) -> list[Numbers]:
    """Both KLs per completion, tokens and right answers, every tenth of the updates."""
    student, generator = Transformer(*start.shape), torch.Generator().manual_seed(seed)
    student.load_state_dict(start.state_dict())
    adam, seen = torch.optim.Adam(student.parameters(), LM_RATE), []
    group = torch.arange(asked).repeat_interleave(4)
    for update in range(updates + 1):
        if update % (updates // 10) == 0:
            seen.append({"update": update, **_judged(student, teacher)})
        batch = sample(student, prompts(asked, generator).repeat_interleave(4, 0), generator)
        logp = batch.logp(student)
        with torch.no_grad():
            other = batch.logp(teacher)
        kl, of_tokens = (logp.exp() * (logp - other)).sum(-1), batch.of_tokens
        rollout = Rollout(of_tokens(logp), of_tokens(other), batch.mask, group=group, token_reverse_kl=kl)
        step(adam, (TOKEN if update < LM_LEVELS[level] * updates else SEQUENCE)(rollout).loss)
    return seen


@torch.no_grad()
def _judged(student: Transformer, teacher: Transformer) -> Numbers:
    numbers = {}
    for name, (of, to) in {"own": (student, teacher), "teacher": (teacher, student)}.items():
        made = held_out(of, 256)
        logp, other = made.logp(of), made.logp(to)
        numbers[name] = float(((logp.exp() * (logp - other)).sum(-1) * made.mask).sum(-1).mean())
        if name == "own":
            numbers |= {"tokens": float(made.mask.sum(1).double().mean()), "right": float(made.right.mean())}
    return numbers


def run(settings: Settings) -> Numbers:
    of = lambda case, updates: descend(case, PROBLEMS, updates, settings.seed)
    return {
        "levels": [
            {"level": name, **of(replace(level, rows=rows), 600)}
            for rows, (name, level) in itertools.product(LEVEL_ROWS, LEVELS.items())
        ],
        "varied": [{"varied": name, **of(case, 300)} for name, cases in VARIED.items() for case in cases],
        "sums": [] if settings.quick else _sums(settings),
    }


def _sums(settings: Settings) -> list[Numbers]:
    generator, runs = torch.Generator().manual_seed(settings.seed), []
    torch.manual_seed(settings.seed)
    teacher = Transformer()
    pretrain(teacher, 100, generator)
    for name, shape in STUDENTS.items():
        student = Transformer(*shape)
        pretrain(student, 30, generator)
        for level, seed in itertools.product(LM_LEVELS, range(3)):
            path = distil(student, teacher, level, 60, 8, seed)
            runs.append({"student": name, "level": level, "seed": seed, "path": path})
    return runs


SHORT, KEPT, BACK = 0.5, 0.9, 0.95
"""Shares of the teacher's length: short completions, those that have kept it, and those that have come back."""


def check(numbers: Numbers) -> list[Check]:
    of = {(x["level"], x["case"]["rows"]): x for x in numbers["levels"]}
    ends = {key: x["end"] for key, x in of.items()}
    few, last = LEVEL_ROWS[:-1], numbers["levels"][0]["updates"][-1]
    short = f"rows, which cannot match: after {last} updates at the sequence level completions are shorter than half of"
    longer = "rows: the token level ends with longer completions than the sequence level"
    lowest = over_repeats([SHORT - share for share in of["sequence", 16]["lowest"]])
    transient = exceeds("16 rows: on the way there completions are shorter than half of it", lowest)
    checks = [
        *(_all(f"{rows} {short} the teacher's", ends["sequence", rows], SHORT, above=False) for rows in few),
        _all("16 rows, which can match: there they have the teacher's length", ends["sequence", 16], BACK),
        replace(transient, measured=f"lowest share {SHORT - lowest['mean']:.2f}, {transient.measured}"),
        *(exceeds(f"{rows} {longer}", _less(ends["token", rows], ends["sequence", rows])) for rows in few),
        _same_as(of["warm", 4], of["sequence", 4]),
        _all("16 rows: after a warm start they are never shorter than 0.9 of it", of["warm", 16]["lowest"], KEPT),
        _farther(of),
    ]
    cases = [x for x in numbers["varied"] if x["varied"] == "distance" and x["case"]["rows"] == 4]
    shares = [share for x in cases for share in x["end"]]
    checks.append(_all("4 rows, any distance, 0 too: they end shorter than half of it", shares, SHORT, above=False))
    for name, larger in (("length", "longer the limit"), ("discount", "larger the discount")):
        shares = [x["end"] for x in numbers["varied"] if x["varied"] == name and x["case"]["rows"] == 4]
        pairs = [_less(a, b) for a, b in itertools.pairwise(shares)]
        checks.append(exceeds(f"4 rows: the {larger}, the smaller the share at the end", *pairs))
    return [*checks, *_of_sums(numbers["sums"])] if numbers["sums"] else checks


def _all(claim: str, shares: list[float], limit: float, *, above: bool = True) -> Check:
    """Whether every problem is on one side of a limit; contradicted if most are on the other."""
    right = [share > limit if above else share < limit for share in shares]
    words = f"{sum(right)} of {len(right)} problems, mean share {sum(shares) / len(shares):.2f}"
    return Check(claim, words, all(right), decided=all(right) or 2 * sum(right) < len(right))


def _less(ones: list[float], others: list[float]) -> Numbers:
    return over_repeats([one - other for one, other in zip(ones, others, strict=True)])


def _same_as(warm: Numbers, cold: Numbers) -> Check:
    off = max(abs(a - b) for a, b in zip(warm["end"], cold["end"], strict=True))
    mean = _less(warm["end"], cold["end"])["mean"]
    claim = "4 rows: a warm start at the token level ends as short as none"
    return Check(claim, f"mean shares {mean:+.3f} apart, at most {off:.2f} in a problem", abs(mean) < 0.05)


def _farther(of: dict[tuple[str, int], Numbers]) -> Check:
    ends = [of[name, 4]["teacher at the end"] for name in ("sequence", "token")]
    claim = "4 rows: on the teacher's completions the sequence level ends farther than the token level"
    judged = exceeds(claim, _less(*ends))
    sequence, token = (sum(end) / len(end) for end in ends)
    return replace(judged, measured=f"{sequence:.1f} against {token:.1f} nats, {judged.measured}")


def _of_sums(runs: list[Numbers]) -> list[Check]:
    tokens = lambda student, level: [x["path"][-1]["tokens"] for x in _runs(runs, student, level)]
    show = lambda values: ", ".join(f"{x:.1f}" for x in values)
    checks = []
    for student in STUDENTS:
        token, sequence = tokens(student, "token"), tokens(student, "sequence")
        claim = f"transformer, student {student}: the sequence level ends with shorter completions than the token level"
        judged = exceeds_over_seeds(claim, {**_less(token, sequence), "seeds": len(token)})
        checks.append(replace(judged, measured=f"{show(sequence)} tokens against {show(token)}"))
    last, end = runs[0]["path"][-1]["update"], tokens("the same", "sequence")
    back = [x > KEPT * y for x, y in zip(end, tokens("the same", "token"), strict=True)]
    claim = f"student the same: within {last} updates the sequence level is back at nine tenths of the token's"
    falling = sum(x["path"][-1]["tokens"] < KEPT * x["path"][-2]["tokens"] for x in _runs(runs, "the same", "sequence"))
    words = f"{sum(back)} of {len(back)} seeds; {falling} of the others still fall at the end"
    decided = all(back) or not (any(back) or falling)
    checks.append(Check(f"transformer, {claim}", words, all(back), decided=decided))
    return checks


def _runs(runs: list[Numbers], student: str, level: str) -> list[Numbers]:
    return [x for x in runs if (x["student"], x["level"]) == (student, level)]


COLOURS = {"token": BLUE, "sequence": VERMILION, "warm": GREEN}
NAMES = {"token": "token level", "sequence": "sequence level", "warm": f"token level for {WARM}, then sequence"}


def draw(numbers: Numbers, figure: Figure) -> None:
    figure.set_size_inches(12.5, 10.6)
    axes = figure.subplots(3, 3)
    number = len(numbers["levels"][0]["end"])
    for axis, rows in zip(axes[0], LEVEL_ROWS, strict=True):
        for x in (x for x in numbers["levels"] if x["case"]["rows"] == rows):
            colour = COLOURS[x["level"]]
            curve(axis, {"updates": x["updates"], **x["share"]}, colour, label=NAMES[x["level"]])
        can = "can match" if rows == VOCAB else "cannot match"
        axis.set_title(f"{rows} rows of {VOCAB}: {can}\n({number} problems, ± 1 SE)", fontsize=10)
        axis.set(xlabel="updates", ylabel="length / teacher's", ylim=(0, 1.3))
    axes[0][2].legend(fontsize=8, loc="lower right")
    for axis, name in zip(axes[1], VARIED, strict=True):
        _draw_varied(numbers, axis, name, number)
    if not numbers["sums"]:
        for axis in axes[2]:
            axis.set_axis_off()
        return
    for axis, student in zip(axes[2], STUDENTS, strict=False):
        _draw_sums(numbers["sums"], axis, student, "tokens")
    _draw_sums(numbers["sums"], axes[2][2], "the same", "teacher")


def _draw_varied(numbers: Numbers, axis: Axes, name: str, number: int) -> None:
    for rows, colour in ((4, VERMILION), (16, BLUE)):
        cases = [x for x in numbers["varied"] if x["varied"] == name and x["case"]["rows"] == rows]
        at = [x["case"][name] for x in cases]
        ends = (over_repeats(x["end"]) for x in cases)
        error_bars(axis, at, ends, ms=4, color=colour, label=f"{rows} rows, at the end")
        lowest = [sum(x["lowest"]) / len(x["lowest"]) for x in cases]
        axis.plot(at, lowest, "o:", ms=4, mfc="none", color=colour, label=f"{rows} rows, lowest")
    last = cases[0]["updates"][-1]
    axis.set_title(f"sequence level, {last} updates\n({number} problems, ± 1 SE)", fontsize=10)
    words = {"distance": "distance of the start", "length": "most tokens", "discount": "discount"}
    axis.set(xlabel=words[name], ylabel="length / teacher's", ylim=(0, 1.3))
    axis.legend(fontsize=8)


def _draw_sums(runs: list[Numbers], axis: Axes, student: str, key: str) -> None:
    for level, colour in COLOURS.items():
        for x in (x for x in runs if (x["student"], x["level"]) == (student, level)):
            label = {"warm": "token level, then sequence"}.get(level, NAMES[level]) if x["seed"] == 0 else None
            updates = [point["update"] for point in x["path"]]
            axis.plot(updates, [point[key] for point in x["path"]], color=colour, lw=1.2, label=label)
    seeds = len({x["seed"] for x in runs})
    title = {"the same": "student: the same, 1.2 million", "1% of it": "student: 1% of the parameters"}[student]
    axis.set_title(f"transformer, {title}\n({seeds} seeds, one line a run)", fontsize=10)
    words = {"tokens": "tokens per completion", "teacher": "KL(teacher‖student), nats"}
    axis.set(xlabel="updates", ylabel=words[key], ylim=(0, None))
    axis.legend(fontsize=8)

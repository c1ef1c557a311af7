"""Distilled by the sequence-level reverse KL, a student that cannot match its teacher ends with short completions for
good; one that can is there for a while and comes back; the token level keeps the length.

KL(student‖teacher) of completions adds up over tokens, so a student whose KL per token stays above 0 lowers it by
ending early. That is an optimum and needs no noise: here gradients and KLs are exact sums. Policies are of first order,
with a vocabulary of 16 and an end token (`tang_munos/first_order.py`); the student has 2 to 16 rows of logits for the
teacher's 16, and so can match it with 16 rows only. Varied: the rows, the distance of the start from the nearest
student, the most tokens of a completion, and the discount of the future, from the token level (0) to the sequence
level (1). A warm start has 300 updates at the token level and goes on at the sequence level. Adam at 0.03. The share is
the length of the student's completions over that of the teacher's. The same, sampled, with transformers that write sums
with their working: the teacher has 1.2 million parameters, and a student either the same or 1% of them.
"""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.rollout import Rollout
from ...core.term import KLTerm
from ...drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from ...enumeration import END
from ..runs import band
from ..study import Check, Numbers, Settings, exceeds, over_repeats
from ..tang_munos.first_order import REF_SCALE, VOCAB, Problems
from .small_model import Completions, Transformer, pretrain, prompts, sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# First-order policies: the gradient of any discount, exactly.


@dataclass(frozen=True)
class Case:
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


RATE, WARM = 0.03, 300
POINTS = (0, 5, 10, 20, 40, 60, 100, 150, 200, 300, 305, 310, 320, 340, 400, 500, 600)


def problems_of(case: Case, number: int, seed: int) -> Problems:
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


def descend(case: Case, number: int, updates: int, seed: int) -> Numbers:
    """Both KLs and the share of the teacher's length, exact, at `POINTS`."""
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
        adam.zero_grad()
        discounted_loss(problems, logp, case.discount if update >= case.warm else 0.0).backward()
        adam.step()
    seen = torch.stack(seen, 1)
    found = {key: over_repeats(x) for key, x in zip(("own", "teacher", "share"), seen, strict=True)}
    return {"case": asdict(case), "updates": points, **found, "lowest": seen[2].amin(0).tolist(), "end": seen[2, -1].tolist()}


LEVELS = {"token": Case(discount=0.0), "sequence": Case(), "warm": Case(warm=WARM)}
LEVEL_ROWS = (4, 8, 16)
VARIED = {
    "distance": [Case(rows=rows, distance=distance) for rows in (4, 16) for distance in (0.0, 0.5, 1.0, 4.0)],
    "length": [Case(rows=rows, length=length) for rows in (4, 16) for length in (4, 8, 32)],
    "discount": [Case(rows=rows, discount=discount) for rows in (4, 16) for discount in (0.25, 0.5, 0.75, 0.9)],
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
    shape = start.shape
    student, generator = Transformer(*shape), torch.Generator().manual_seed(seed)
    student.load_state_dict(start.state_dict())
    adam, seen = torch.optim.Adam(student.parameters(), LM_RATE), []
    group = torch.arange(asked).repeat_interleave(4)
    for update in range(updates + 1):
        if update % max(1, updates // 10) == 0:
            seen.append({"update": update, **_judged(student, teacher)})
        batch = sample(student, prompts(asked, generator).repeat_interleave(4, 0), generator)
        term = TOKEN if update < LM_LEVELS[level] * updates else SEQUENCE
        adam.zero_grad()
        term(_rollout(batch, student, teacher, group)).loss.backward()
        adam.step()
    return seen


def _rollout(batch: Completions, student: Transformer, teacher: Transformer, group: Tensor) -> Rollout:
    logp = batch.logp(student)
    with torch.no_grad():
        other = batch.logp(teacher)
    kl = (logp.exp() * (logp - other)).sum(-1)
    tokens = (batch.of_tokens(x) for x in (logp, other))
    return Rollout(*tokens, batch.mask, group=group, token_reverse_kl=kl)


@torch.no_grad()
def _judged(student: Transformer, teacher: Transformer) -> Numbers:
    numbers = {}
    for name, (of, to) in {"own": (student, teacher), "teacher": (teacher, student)}.items():
        made = sample(of, prompts(256, torch.Generator().manual_seed(1)), torch.Generator().manual_seed(2))
        logp, other = made.logp(of), made.logp(to)
        numbers[name] = float(((logp.exp() * (logp - other)).sum(-1) * made.mask).sum(-1).mean())
        if name == "own":
            numbers |= {"tokens": float(made.mask.sum(1).double().mean()), "right": float(made.right.mean())}
    return numbers


def run(settings: Settings) -> Numbers:
    """Exact descents of first-order policies, and distilled transformers."""
    number, updates, short = settings.size(20, 8), settings.size(600, 60), settings.size(300, 40)
    of = lambda case, updates: descend(case, number, updates, settings.seed)
    return {
        "levels": [
            {"level": name, **of(replace(level, rows=rows), updates)}
            for rows in LEVEL_ROWS
            for name, level in LEVELS.items()
        ],
        "varied": [{"varied": name, **of(case, short)} for name, cases in VARIED.items() for case in cases],
        "sums": _sums(settings),
    }


def _sums(settings: Settings) -> list[Numbers]:
    generator = torch.Generator().manual_seed(settings.seed)
    torch.manual_seed(settings.seed)
    teacher, found = Transformer(), []
    pretrain(teacher, settings.size(100, 2), generator)
    for name, shape in STUDENTS.items():
        student = Transformer(*shape)
        pretrain(student, settings.size(30, 2), generator)
        for level in LM_LEVELS:
            for seed in range(settings.size(3, 1)):
                path = distil(student, teacher, level, settings.size(60, 1), settings.size(8, 2), seed)
                found.append({"student": name, "level": level, "seed": seed, "path": path})
    return found

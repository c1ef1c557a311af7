"""Distillation from stale completions over some of the entries: which tail stands it?

The teacher is a first-order chain over 64 tokens, the student one of rank 6: the logits of the next token are a row of
a (64, 6) matrix times a (6, 64) one. So KL(student‖teacher) on the student's completions is an exact sum over the
chain, and a run takes seconds. Completions are `age` updates old, and the first ones are those of the student as it
starts: every run has as many different batches as updates. Each arm and age has its best of three rates, by the mean
over the seeds; a seed is a teacher, a start and the samples. `cost` is by how much more than the fresh run of the seed.

`python benchmarks/stale_topk.py` writes `results/stale_topk.csv` in some minutes.
"""

import argparse
import itertools
from collections import deque
from collections.abc import Callable
from statistics import fmean, stdev

import torch
from harness import RESULTS, provenance, write
from torch import Tensor

from klgrad.kernels import head_kl, lumped_kl, sampled_tail_kl

WORDS, RANK, LENGTH, ROWS = 64, 6, 12, 32
SPREAD = 2.0
"""Of the teacher's logits."""
UPDATES, AGES, RATES, SEEDS = 120, (0, 64), (0.03, 0.1, 0.3), 6
K = 8

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From (..., V) log-probs of the student and the teacher, (...) tokens and their old log-probs, to (...) losses."""


def at(log: Tensor, token: Tensor) -> Tensor:
    return log.gather(-1, token[..., None])[..., 0]


def over_top(tail: str, of: str, divergence: str) -> Loss:
    """The divergence over the `K` likeliest entries of one model, and a tail."""

    def loss(log_p: Tensor, log_q: Tensor, token: Tensor, old: Tensor) -> Tensor:
        ids = (log_q if of == "teacher" else log_p.detach()).topk(K).indices
        pair = log_p.gather(-1, ids), log_q.gather(-1, ids)
        if tail != "sampled":
            return (lumped_kl if tail == "lump" else head_kl)(*pair, divergence)
        own, other = at(log_p, token), at(log_q, token)
        inside = (ids == token[..., None]).any(-1)
        return sampled_tail_kl(*pair, own, other, inside, ratio=(own.detach() - old).exp(), divergence=divergence)

    return loss


def exact(divergence: str) -> Loss:
    def loss(log_p: Tensor, log_q: Tensor, token: Tensor, old: Tensor) -> Tensor:
        a, b = (log_p, log_q) if divergence == "reverse" else (log_q, log_p)
        return (a.exp() * (a - b)).sum(-1)

    return loss


def of_token(log_p: Tensor, log_q: Tensor, token: Tensor, old: Tensor) -> Tensor:
    """The sampled log-ratio as the coefficient, with the importance ratio of the token."""
    own, other = at(log_p, token), at(log_q, token)
    return ((own.detach() - old).exp() * (own - other)).detach() * own


ARMS: dict[str, Loss] = {f"{name}, all entries": exact(name) for name in ("reverse", "forward")}
ARMS |= {
    f"{divergence}, {of}'s {K}, {tail}": over_top(tail, of, divergence)
    for (divergence, of), tail in itertools.product(
        (("reverse", "student"), ("reverse", "teacher"), ("forward", "teacher")), ("lump", "none", "sampled")
    )
}
ARMS["reverse, sampled token alone"] = of_token


def kl_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(...) KL(student‖teacher) per token on the student's completions, whose prefix is token 0."""
    visits, total = torch.zeros(log_p.shape[:-1]), torch.zeros(log_p.shape[:-1])
    visits[..., 0] = 1
    for _ in range(LENGTH):
        total, visits = total + visits, torch.einsum("...i,...ij->...j", visits, log_p.exp())
    return (total * (log_p.exp() * (log_p - log_q)).sum(-1)).sum(-1) / LENGTH


def runs(loss: Loss, age: int) -> tuple[Tensor, Tensor]:
    """(rates, seeds) KL at the end, and as it starts. All runs are computed at once; none depends on another."""
    generator = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(SEEDS, *shape, generator=generator)
    log_q = (SPREAD * new(WORDS, WORDS)).log_softmax(-1)
    start = new(WORDS, RANK), new(RANK, WORDS) / RANK**0.5
    parameters = [[x.clone().requires_grad_() for x in start] for _ in RATES]
    groups = [{"params": pair, "lr": rate} for pair, rate in zip(parameters, RATES, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    waiting: deque[tuple[Tensor, Tensor, Tensor]] = deque()
    log_q = log_q.expand(len(RATES), -1, -1, -1)

    def table() -> Tensor:
        """(rates, seeds, V, V) log-probs of the next token."""
        return torch.stack([a @ b for a, b in parameters]).log_softmax(-1)

    def after(log: Tensor, states: Tensor) -> Tensor:
        return log.gather(2, states[..., None].expand(*states.shape, WORDS))

    @torch.no_grad()
    def sample() -> tuple[Tensor, Tensor, Tensor]:
        log_p, steps = table(), [torch.zeros(len(RATES), SEEDS, ROWS, dtype=torch.long)]
        for _ in range(LENGTH):
            chances = after(log_p, steps[-1]).exp().flatten(0, -2)
            steps.append(chances.multinomial(1, generator=generator).view(steps[-1].shape))
        states, tokens = torch.cat(steps[:-1], -1), torch.cat(steps[1:], -1)
        return states, tokens, at(after(log_p, states), tokens)

    before = kl_of(table().detach(), log_q)
    waiting.extend(sample() for _ in range(age))
    for _ in range(UPDATES):
        waiting.append(sample())
        states, tokens, old = waiting.popleft()
        optimizer.zero_grad()
        loss(after(table(), states), after(log_q, states), tokens, old).mean(-1).sum().backward()
        optimizer.step()
    return kl_of(table().detach(), log_q), before


def summary(name: str, values: list[float]) -> dict[str, str]:
    """The mean over the seeds, and its standard error."""
    return {name: f"{fmean(values):.4f}", f"{name}_error": f"{stdev(values) / len(values) ** 0.5:.4f}"}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    made: list[dict[str, object]] = []
    fresh: list[float] = []
    for (name, loss), age in itertools.product(ARMS.items(), AGES):
        ends, start = runs(loss, age)
        best = int(ends.mean(1).argmin())
        kl = ends[best].tolist()
        fresh = fresh if age else kl
        costs = [x / y - 1 for x, y in zip(kl, fresh, strict=True)]
        row = {"arm": name, "age": age, "rate": RATES[best], **summary("kl", kl), **summary("cost", costs)}
        row["start"] = f"{float(start.mean()):.4f}"
        print(row, flush=True)
        made.append({**row, "updates": UPDATES, "seeds": SEEDS, **provenance()})
        write(made, RESULTS / "stale_topk.csv")


if __name__ == "__main__":
    main()

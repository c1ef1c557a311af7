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
UPDATES, AGES, RATES, SEEDS = 150, (0, 16, 64), (0.03, 0.1, 0.3), range(4)
K = 8

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From (N, V) log-probs of the student and the teacher, (N,) tokens and their old log-probs, to (N,) losses."""


def over_top(tail: str, of: str, divergence: str) -> Loss:
    """The divergence over the `K` likeliest entries of one model, and a tail."""

    def loss(log_p: Tensor, log_q: Tensor, token: Tensor, old: Tensor) -> Tensor:
        ids = (log_q if of == "teacher" else log_p.detach()).topk(K).indices
        pair = log_p.gather(1, ids), log_q.gather(1, ids)
        if tail != "sampled":
            return (lumped_kl if tail == "lump" else head_kl)(*pair, divergence)
        own, other = (x.gather(1, token[:, None])[:, 0] for x in (log_p, log_q))
        inside = (ids == token[:, None]).any(-1)
        return sampled_tail_kl(*pair, own, other, inside, ratio=(own.detach() - old).exp(), divergence=divergence)

    return loss


def exact(divergence: str) -> Loss:
    def loss(log_p: Tensor, log_q: Tensor, token: Tensor, old: Tensor) -> Tensor:
        a, b = (log_p, log_q) if divergence == "reverse" else (log_q, log_p)
        return (a.exp() * (a - b)).sum(-1)

    return loss


def of_token(log_p: Tensor, log_q: Tensor, token: Tensor, old: Tensor) -> Tensor:
    """The sampled log-ratio as the coefficient, with the importance ratio of the token."""
    own, other = (x.gather(1, token[:, None])[:, 0] for x in (log_p, log_q))
    return ((own.detach() - old).exp() * (own - other)).detach() * own


ARMS: dict[str, Loss] = {f"{name}, all entries": exact(name) for name in ("reverse", "forward")}
ARMS |= {
    f"{divergence}, {of}'s {K}, {tail}": over_top(tail, of, divergence)
    for (divergence, of), tail in itertools.product(
        (("reverse", "student"), ("reverse", "teacher"), ("forward", "teacher")), ("lump", "none", "sampled")
    )
}
ARMS["reverse, sampled token alone"] = of_token


def visits(log_p: Tensor) -> Tensor:
    """(V,) the expected number of times that a token is before one of the completion; the first is token 0."""
    at = torch.zeros(WORDS).index_fill_(0, torch.tensor(0), 1.0)
    total = torch.zeros(WORDS)
    for _ in range(LENGTH):
        total, at = total + at, at @ log_p.exp()
    return total


def run(loss: Loss, rate: float, age: int, seed: int) -> tuple[float, float]:
    """KL(student‖teacher) per token at the end, on the student's completions; and as it starts."""
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=generator)
    log_q = (SPREAD * new(WORDS, WORDS)).log_softmax(-1)
    parameters = [new(WORDS, RANK).requires_grad_(), (new(RANK, WORDS) / RANK**0.5).requires_grad_()]
    optimizer = torch.optim.Adam(parameters, rate, betas=(0.9, 0.95))
    waiting: deque[tuple[Tensor, Tensor, Tensor]] = deque()

    @torch.no_grad()
    def sample() -> tuple[Tensor, Tensor, Tensor]:
        log_p, at = (parameters[0] @ parameters[1]).log_softmax(-1), torch.zeros(ROWS, dtype=torch.long)
        before, after = [], []
        for _ in range(LENGTH):
            before.append(at)
            at = log_p[at].exp().multinomial(1, generator=generator)[:, 0]
            after.append(at)
        states, tokens = torch.cat(before), torch.cat(after)
        return states, tokens, log_p[states, tokens]

    @torch.no_grad()
    def measured() -> float:
        log_p = (parameters[0] @ parameters[1]).log_softmax(-1)
        return float(visits(log_p) @ (log_p.exp() * (log_p - log_q)).sum(-1)) / LENGTH

    start = measured()
    waiting.extend(sample() for _ in range(age))
    for _ in range(UPDATES):
        waiting.append(sample())
        states, tokens, old = waiting.popleft()
        log_p = (parameters[0][states] @ parameters[1]).log_softmax(-1)
        optimizer.zero_grad()
        loss(log_p, log_q[states], tokens, old).mean().backward()
        optimizer.step()
    return measured(), start


def summary(name: str, values: list[float]) -> dict[str, str]:
    """The mean over the seeds, and its standard error."""
    return {name: f"{fmean(values):.4f}", f"{name}_error": f"{stdev(values) / len(values) ** 0.5:.4f}"}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    made: list[dict[str, object]] = []
    fresh: list[float] = []
    for (name, loss), age in itertools.product(ARMS.items(), AGES):
        ends = {rate: [run(loss, rate, age, seed) for seed in SEEDS] for rate in RATES}
        best = min(RATES, key=lambda rate: fmean(end for end, _ in ends[rate]))
        kl = [end for end, _ in ends[best]]
        fresh = fresh if age else kl
        costs = [x / y - 1 for x, y in zip(kl, fresh, strict=True)]
        row = {"arm": name, "age": age, "rate": best, **summary("kl", kl), **summary("cost", costs)}
        row |= {"start": f"{fmean(x for _, x in ends[best]):.4f}"}
        print(row, flush=True)
        made.append({**row, "updates": UPDATES, "seeds": len(SEEDS), **provenance()})
        write(made, RESULTS / "stale_topk.csv")


if __name__ == "__main__":
    main()

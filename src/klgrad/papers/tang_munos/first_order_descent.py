"""Gradients and descents on first-order problems: exact ones, and those of a KL term on sampled completions."""

import torch
from torch import Tensor

from ...core.term import KLTerm
from ...zoo import Cell
from .first_order import Problems

SAMPLES = 4
"""Completions of each prompt in a step, as in the paper."""
EVERY = 10
"""Steps between two measurements."""


def exact_gradient(problems: Problems, level: str) -> Tensor:
    """(P, C·V) ∇KL(student‖reference) of completions at the start; at token level the visits are held fixed."""
    logits = problems.start.clone().requires_grad_()
    logp = problems.log_probs(logits)
    visits = problems.visits(logp)
    kl = problems.kl(logp, problems.ref, visits=visits.detach() if level == "token" else visits)
    return torch.autograd.grad(kl.sum(), logits)[0].flatten(1)


def total_loss(method: KLTerm | Cell, problems: Problems, logp: Tensor, uniform: Tensor) -> Tensor:
    """A scalar whose gradient at each problem's parameters is that of the problem's own loss.

    The loss of a problem is a mean over its completions. Problems share no parameters, so the losses are added.
    """
    rollout = problems.rollout(logp, uniform)
    found = method(rollout)
    if isinstance(found, Tensor):  # a mean over the completions of all problems
        return len(problems.ref) * found
    return found.per_token.sum() / uniform.shape[1]


def random_numbers(problems: Problems, generator: torch.Generator) -> Tensor:
    """(P, V·n, length) for `SAMPLES` completions of every prompt."""
    shape = (len(problems.ref), problems.ref.shape[-1] * SAMPLES, problems.length)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def gradient_variance(method: KLTerm | Cell, problems: Problems, draws: int, seed: int) -> Tensor:
    """(P,) the variance E‖g - Eg‖² of one step's gradient, from independent batches."""
    many = problems.repeated(draws)
    logits = many.start.clone().requires_grad_()
    uniform = random_numbers(many, torch.Generator().manual_seed(seed))
    (gradient,) = torch.autograd.grad(total_loss(method, many, many.log_probs(logits), uniform), logits)
    return gradient.view(draws, len(problems.ref), -1).var(0).sum(-1)


def descend(
    method: KLTerm | Cell, problems: Problems, rates: tuple[float, ...], steps: int, seed: int
) -> dict[str, Tensor]:
    """Descend the sampled gradient with Adam, every problem at every learning rate.

    Returns:
        (points, rates, P) exact numbers every `EVERY` steps: KL(student‖teacher) of completions under `kl`,
        KL(teacher‖student) under `forward`, and the student's expected length.
    """
    generator = torch.Generator().manual_seed(seed)  # every arm and every rate has the same random numbers
    many = problems.repeated(len(rates))
    logits = [problems.start.clone().requires_grad_() for _ in rates]
    adam = torch.optim.Adam([{"params": [x], "lr": rate} for x, rate in zip(logits, rates, strict=True)])
    seen = []
    for step in range(steps + 1):
        logp = many.log_probs(torch.cat(logits))
        if step % EVERY == 0:
            now = logp.detach()
            seen.append(torch.stack([many.kl(now, many.ref), many.kl(many.ref, now), many.visits(now).sum(-1)]))
        if step < steps:
            adam.zero_grad()
            total_loss(method, many, logp, random_numbers(problems, generator).repeat(len(rates), 1, 1)).backward()
            adam.step()
    found = torch.stack(seen, 1).view(3, len(seen), len(rates), -1)
    return dict(zip(("kl", "forward", "length"), found, strict=True))


def at_best_rate(seen: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """After each number of steps, the numbers (points, P) at the learning rate with the lowest KL after that many.

    The rate of a problem is chosen by the mean logarithm of the KL over the other half of the problems, so that no
    problem chooses its own. Also returns the indices (points, 2) of the rates of the two halves.
    """
    half = torch.arange(seen["kl"].shape[-1]) % 2
    best = torch.stack([seen["kl"][..., half != mine].log().mean(-1).argmin(-1) for mine in (0, 1)], -1)
    return {name: x.gather(1, best[:, None, half])[:, 0] for name, x in seen.items()}, best

"""First-order policies of many problems at once: sampled completions, and exact divergences between completions.

The next token depends on the previous one only, at every step alike; a prompt is the token before the completion, and
all tokens are equally frequent prompts. The reference has a row of logits for each previous token. The student has one
row for each class of previous tokens, so that it cannot match the reference. How often a completion has each token
before a step follows from the step before, so that no completion has to be listed.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.rollout import Rollout
from ...core.term import KLTerm
from ...enumeration import END
from ...zoo import Cell

VOCAB = 16
CLASSES = 4
LENGTH = 16
REF_SCALE = 1.5
"""Standard deviation of the logits of the reference."""
SPREAD = 2.0
"""Standard deviation of the student's logits at the start from the mean of the reference's logits in each class."""


@dataclass(frozen=True, eq=False)
class Problems:
    """P problems over V tokens.

    Attributes:
        ref: (P, V, V) log-probs of the reference, by previous token and token.
        start: (P, C, V) the student's logits at the start, by class and token; token v is in class v mod C.
        ends: whether token 0 ends a completion.
        length: most tokens in a completion.
    """

    ref: Tensor
    start: Tensor
    ends: bool
    length: int = LENGTH

    def repeated(self, times: int) -> "Problems":
        """The same problems several times, one whole set after the other."""
        return replace(self, ref=self.ref.repeat(times, 1, 1), start=self.start.repeat(times, 1, 1))

    def log_probs(self, logits: Tensor) -> Tensor:
        """(P, C, V) logits of the student to (P, V, V) log-probs by previous token and token."""
        classes = torch.arange(self.ref.shape[-1]) % logits.shape[1]
        return torch.log_softmax(logits, -1)[:, classes]

    def visits(self, logp: Tensor) -> Tensor:
        """(P, V) the expected number of steps that have each token before them; their sum is the expected length."""
        now = torch.full_like(logp[..., 0], 1 / logp.shape[-1])
        total = now
        for _ in range(self.length - 1):
            now = (now[..., None] * logp.exp()).sum(-2)
            if self.ends:
                now = torch.cat([torch.zeros_like(now[:, : END + 1]), now[:, END + 1 :]], -1)
            total = total + now
        return total

    def kl(self, of: Tensor, to: Tensor, *, visits: Tensor | None = None) -> Tensor:
        """(P,) KL between completions of two policies by their log-probs; other `visits` than those of the first."""
        rows = (of.exp() * (of - to)).sum(-1)
        return ((self.visits(of) if visits is None else visits) * rows).sum(-1)

    def sample(self, logp: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Complete every prompt in turn.

        Args:
            logp: (P, V, V) log-probs of the sampler.
            uniform: (P, V·n, length) uniform random numbers for n completions of each of the V prompts.

        Returns:
            Previous tokens, tokens and mask, each (P, V·n, length).
        """
        problems, completions, _ = uniform.shape
        vocab, cumulative = logp.shape[-1], logp.detach().exp().cumsum(-1).flatten(0, 1)
        first_row = vocab * torch.arange(problems)[:, None]
        before = torch.arange(vocab).repeat_interleave(completions // vocab).expand(problems, -1)
        live = torch.ones_like(before, dtype=torch.bool)
        seen = []
        for chance in uniform.movedim(-1, 0).contiguous():
            rows = cumulative.index_select(0, (first_row + before).flatten())
            token = torch.searchsorted(rows, chance.view(-1, 1)).view_as(before)
            token = token.clamp(max=vocab - 1)  # rounding can leave the last cumulative probability below 1
            seen.append((before, token, live))
            live = live & (token != END) if self.ends else live
            before = token
        before, token, mask = (torch.stack(x, -1) for x in zip(*seen, strict=True))
        return before, token, mask

    def rollout(self, logp: Tensor, uniform: Tensor) -> Rollout:
        """Sampled completions of all problems; the completions of one prompt of one problem are a group."""
        before, token, mask = self.sample(logp, uniform)
        vocab, (problems, completions, length) = logp.shape[-1], uniform.shape
        at = lambda table, place: table.flatten(1).gather(1, place.flatten(1)).view(-1, length)
        groups = torch.arange(problems * vocab).repeat_interleave(completions // vocab)
        return Rollout(
            at(logp, before * vocab + token),
            at(self.ref, before * vocab + token),
            mask.flatten(0, 1),
            group=groups,
            token_reverse_kl=at((logp.exp() * (logp - self.ref)).sum(-1), before),
        )


def draw(problems: int, *, ends: bool, generator: torch.Generator) -> Problems:
    """Random problems; the same random numbers whether completions may end or not."""
    ref = REF_SCALE * torch.randn(problems, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    away = torch.randn(problems, CLASSES, VOCAB, generator=generator, dtype=torch.float64)
    # Token v is in class v mod CLASSES, so the members of a class are CLASSES rows apart.
    middle = ref.view(problems, VOCAB // CLASSES, CLASSES, VOCAB).mean(1)
    return Problems(torch.log_softmax(ref, -1), middle + SPREAD * away, ends)


# Gradients and descents on first-order problems: exact ones, and those of a KL term on sampled completions.

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

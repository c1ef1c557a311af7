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
from ...enumeration.space import END

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

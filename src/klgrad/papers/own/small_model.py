"""A transformer of 1.2 million parameters that learns two-digit sums with their working, and its sampler.

A prompt is `47+38=`, and the completion `15,70,85.`: the sum of the units, that of the tens, and both. A completion
ends with its full stop, has at most 11 tokens, and is right if the number before that full stop is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

LETTERS = "0123456789+=,."
PROMPT, LONGEST = 6, 11
"""Tokens of a prompt, and the most tokens of a completion."""
STOP = LETTERS.index(".")


class Transformer(nn.Module):
    """A causal transformer over `LETTERS`, with layer norm before each sublayer."""

    def __init__(self, width: int = 160, layers: int = 4, heads: int = 5) -> None:
        super().__init__()
        self.shape = (width, layers, heads)
        self.token, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(PROMPT + LONGEST, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, ids: Tensor, cache: dict[int, Tensor] | None = None) -> Tensor:
        """(B, T, V) logits of the next token; the tokens follow those whose keys and values a `cache` has."""
        cache = {} if cache is None else cache
        before = cache[0].shape[3] if cache else 0
        x = self.token(ids) + self.place.weight[before : before + ids.shape[1]]
        for i, layer in enumerate(self.layers):
            x, cache[i] = layer(x, cache.get(i))
        return self.head(self.norm(x))


class Layer(nn.Module):
    """Attention and a perceptron. Attention is written out, because forward derivatives go through it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """The layer's output, and the keys and values of all places so far."""
        batch, length, width = x.shape
        query, *now = self.inward(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        both = torch.stack(now)
        both = both if past is None else torch.cat([past, both], 3)
        key, value = both
        total = key.shape[2]
        later = torch.ones(length, total, dtype=torch.bool).triu(total - length + 1)
        weight = (query @ key.mT / math.sqrt(width // self.heads)).masked_fill(later, -math.inf).softmax(-1)
        x = x + self.outward((weight @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norms[1](x)))), both


@dataclass(frozen=True)
class Completions:
    """Prompts with sampled completions.

    Attributes:
        ids: (B, PROMPT + LONGEST) tokens; those after the full stop are full stops.
        mask: (B, LONGEST) the completion's tokens.
    """

    ids: Tensor
    mask: Tensor

    def logp(self, model: Transformer) -> Tensor:
        """(B, LONGEST, V) log-probs of every token at each place of the completions."""
        return model(self.ids[:, :-1])[:, PROMPT - 1 :].log_softmax(-1)

    def of_tokens(self, logp: Tensor) -> Tensor:
        """(B, LONGEST) of the sampled tokens, 0 after the full stop."""
        return logp.gather(-1, self.ids[:, PROMPT:, None])[..., 0] * self.mask

    @property
    def right(self) -> Tensor:
        """(B,) 1.0 where the last number is the sum."""
        texts = ["".join(LETTERS[i] for i in row) for row in self.ids.tolist()]
        return torch.tensor([float(_is_right(text)) for text in texts])


def _is_right(text: str) -> bool:
    total = int(text[:2]) + int(text[3:5])
    return text[PROMPT:].split(".")[0].split(",")[-1] == str(total) and "." in text[PROMPT:]


def prompts(number: int, generator: torch.Generator) -> Tensor:
    """(B, PROMPT) tokens of random sums."""
    return _tokens([f"{a:02d}+{b:02d}=" for a, b in _pairs(number, generator)])


def texts(number: int, generator: torch.Generator) -> Completions:
    lines = []
    for a, b in _pairs(number, generator):
        text = f"{a:02d}+{b:02d}={a % 10 + b % 10},{a // 10 * 10 + b // 10 * 10},{a + b}."
        lines.append(text.ljust(PROMPT + LONGEST, "."))
    return with_mask(_tokens(lines))


def _pairs(number: int, generator: torch.Generator) -> list[list[int]]:
    return torch.randint(100, (number, 2), generator=generator).tolist()


def _tokens(lines: Sequence[str]) -> Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text] for text in lines])


def with_mask(ids: Tensor) -> Completions:
    """Completions whose mask includes the first full stop."""
    stops = (ids[:, PROMPT:] == STOP).long()
    return Completions(ids, stops.cumsum(1) - stops == 0)


@torch.no_grad()
def sample(model: Transformer, asked: Tensor, generator: torch.Generator) -> Completions:
    """One completion of each prompt, at temperature 1."""
    cache: dict[int, Tensor] = {}
    ids, now = asked, asked
    for _ in range(LONGEST):
        chance = model(now, cache)[:, -1].double().softmax(-1).cumsum(-1)
        uniform = torch.rand(len(ids), 1, generator=generator, dtype=torch.float64) * chance[:, -1:]
        now = torch.searchsorted(chance, uniform).clamp(max=len(LETTERS) - 1)
        now = torch.where((ids[:, PROMPT:] == STOP).any(1, keepdim=True), STOP, now)
        ids = torch.cat([ids, now], 1)
    return with_mask(ids)


@torch.no_grad()
def held_out(model: Transformer, number: int = 512) -> Completions:
    """Completions of the sums that policies are judged by."""
    return sample(model, prompts(number, torch.Generator().manual_seed(1)), torch.Generator().manual_seed(2))


def pretrained(updates: int, seed: int) -> Transformer:
    """A transformer that has learnt the sums from texts for a while."""
    torch.manual_seed(seed)
    model = Transformer()
    pretrain(model, updates, torch.Generator().manual_seed(seed))
    return model


def pretrain(model: Transformer, updates: int, generator: torch.Generator) -> None:
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(updates):
        shown = texts(64, generator)
        logp = shown.logp(model)
        step(adam, cross_entropy(logp[shown.mask], shown.ids[:, PROMPT:][shown.mask]))


def step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """One update of a loss."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

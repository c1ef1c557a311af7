"""Inputs of the kernels: hidden states, heads and targets; and their specification in float64."""

import math
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import torch
from tolerances import BFLOAT16, EXACT, FLOAT16, SINGLE, Tol
from torch import Tensor

from klgrad import kernels
from klgrad.core.divergences import (
    CHI_SQUARE,
    FORWARD_KL,
    HELLINGER,
    REVERSE_KL,
    TOTAL_VARIATION,
    Divergence,
    alpha,
    huber,
    jensen_shannon,
    mixture,
    named,
)  # fmt: skip
from klgrad.kernels import Head, TokenStatistics, fused_statistics, state, tiling

OUTPUTS = ("logp", "entropy", "reverse_kl", "forward_kl", "entries_logp", "divergence")
"""The outputs with a gradient."""
GRADIENT = {torch.float64: EXACT, torch.float32: SINGLE, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""The tolerance of gradients, by dtype."""
GENERATORS = [
    REVERSE_KL, FORWARD_KL, HELLINGER, CHI_SQUARE, TOTAL_VARIATION, alpha(-0.7), alpha(0.3), alpha(1.6),
    jensen_shannon(), jensen_shannon(0.1), jensen_shannon(1 / 3), huber(0.8),
    mixture((0.3, FORWARD_KL), (0.7, REVERSE_KL)), mixture((2.0, jensen_shannon(0.2)), (0.5, TOTAL_VARIATION)),
]  # fmt: skip
"""Every generator of the core."""
SMALL_TILES = {"GRANULE": 8, "WIDTH": 16, "STRIP": 3, "ROWS": 5}
"""Values for the constants of `plan`."""


@dataclass(frozen=True, eq=False)
class Case:
    """Positional inputs of `token_statistics`, and the requested entries."""

    hidden: Tensor
    head: Head
    targets: Tensor
    ref_hidden: Tensor | None = None
    ref_head: Head | None = None
    entries: Tensor | None = None

    def to(self, dtype: torch.dtype, device: str | torch.device | None = None) -> "Case":
        """The same numbers in another dtype or on another device, with separate leaves."""
        cast = lambda x: None if x is None else x.detach().to(device or x.device, dtype, copy=True)
        moved = lambda x: None if x is None else x.to(device or x.device)
        head = lambda h: None if h is None else replace(h, weight=cast(h.weight), bias=cast(h.bias))
        return replace(
            self,
            hidden=cast(self.hidden),
            head=head(self.head),
            targets=moved(self.targets),
            ref_hidden=cast(self.ref_hidden),
            ref_head=head(self.ref_head),
            entries=moved(self.entries),
        )

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        return [x for x in (self.hidden, self.head.weight, self.head.bias) if x is not None]

    def require_grad(self) -> "Case":
        """The case itself, with gradients required."""
        for x in self.leaves:
            x.requires_grad_()
        return self

    def statistics(self, package: ModuleType = kernels, **options) -> TokenStatistics:
        """The statistics by the kernels, or by a faulty copy of them."""
        own = lambda h: None if h is None else package.Head(h.weight, h.bias, h.temperature, h.softcap, h.scale)
        given = (self.hidden, own(self.head), self.targets, self.ref_hidden, own(self.ref_head))
        return package.token_statistics(*given, entries=self.entries, **options)

    def specification(self, divergence: str | Divergence | None = None) -> TokenStatistics:
        """The statistics by the specification, in the dtype of the case."""
        given = (self.hidden, self.head, self.targets, self.ref_hidden, self.ref_head)
        generator = None if divergence is None else named(divergence)
        return fused_statistics.reference_statistics(*given, entries=self.entries, divergence=generator)


def make(
    shape: tuple[int, ...] = (7,),
    vocabulary: int = 50,
    size: int = 16,
    ref_size: int | None = None,
    *,
    seed: int = 0,
    bias: bool = False,
    ref_bias: bool = False,
    entries: int = 3,
    paired: bool = True,
    dtype: torch.dtype = torch.float64,
    policy: dict | None = None,
    ref: dict | None = None,
) -> Case:
    """Random inputs; logits have a spread of about 2, and `policy` and `ref` are further fields of the heads."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)

    def model(size: int, biased: bool, fields: dict | None) -> tuple[Tensor, Head]:
        weight = 2 * normal(vocabulary, size) / size**0.5
        return normal(*shape, size), Head(weight, normal(vocabulary) if biased else None, **(fields or {}))

    hidden, head = model(size, bias, policy)
    ref_hidden, ref_head = model(ref_size or size, ref_bias, ref)
    draw = lambda *s: torch.randint(vocabulary, s, generator=generator)
    case = Case(hidden, head, draw(*shape), entries=draw(*shape, entries) if entries else None)
    return (replace(case, ref_hidden=ref_hidden, ref_head=ref_head) if paired else case).to(dtype)


def confident(
    doubt: float, tokens: int = 24, vocabulary: int = 4096, size: int = 64, *, seed: int = 0, device: str = "cpu"
) -> Case:
    """Sampled tokens of probability about 1 - doubt by the policy and exp(-11) by the reference, in bfloat16.

    Each model's hidden state is moved along the token's row of the head, until the probability is right.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)
    weight = 2 * normal(vocabulary, size) / size**0.5
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)

    def hidden(logit: float) -> Tensor:
        x = normal(tokens, size)
        for _ in range(50):
            logp = (x @ weight.T).log_softmax(-1).gather(1, targets[:, None])
            missing = logit - (logp - torch.log(-torch.expm1(logp)))
            x = x + 0.7 * missing * weight[targets] / (weight[targets] ** 2).sum(-1, keepdim=True)
        return x

    policy, ref = (Head(weight.clone()) for _ in range(2))
    return Case(hidden(-math.log(doubt)), policy, targets, hidden(-11.0), ref).to(torch.bfloat16)


def weighted_sum(found: TokenStatistics, seed: int = 1) -> Tensor:
    """A weighted sum of all outputs, with the same random weights for the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64, device=found.logp.device)
    for name in OUTPUTS:
        x = getattr(found, name)
        if x is not None:
            weights = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
            total = total + (weights * x).sum()
    return total


def compare(found: TokenStatistics, expected: TokenStatistics, tolerance) -> None:
    """Compare every output; None must be None on both sides."""
    for name, x in found._asdict().items():
        y = getattr(expected, name)
        assert (x is None) == (y is None), name
        if x is not None:
            tolerance.check(x, y)


def agree(case: Case, value_tolerance, gradient_tolerance=None, **options) -> None:
    """Compare values, and gradients of a weighted sum of all outputs, with the specification in float64."""
    wide = case.to(torch.float64).require_grad()
    found = case.require_grad().statistics(**options)
    expected = wide.specification(options.get("divergence"))
    compare(found, expected, value_tolerance)
    tolerance = gradient_tolerance or value_tolerance
    compare_gradients(weighted_sum(found), case.leaves, weighted_sum(expected), wide.leaves, tolerance)


def compare_gradients(found: Tensor, leaves: list[Tensor], truth: Tensor, true_leaves: list[Tensor], tolerance) -> None:
    """Compare the gradients of two scalars, each by its own leaves."""
    gradients = torch.autograd.grad(found, leaves), torch.autograd.grad(truth, true_leaves)
    for x, y in zip(*gradients, strict=True):
        tolerance.check_vector(x.double(), y.double())


def check_gradients(case: Case, tolerance: Tol, *names: str, **options) -> None:
    """Compare the gradient of the sum of each output, both KLs, entropy and log-prob or those named, in float64."""
    for name in names or ("reverse_kl", "forward_kl", "entropy", "logp"):
        wide = case.to(torch.float64).require_grad()
        found = getattr(case.require_grad().statistics(**options), name)
        truth = getattr(wide.specification(options.get("divergence")), name)
        compare_gradients(found.sum(), case.leaves, truth.sum(), wide.leaves, tolerance)


def check_again(total: Tensor, case: Case, tolerance: Tol) -> None:
    """A second backward pass has the gradient of the first, which overwrites the kept logits."""
    first = torch.autograd.grad(total, case.leaves, retain_graph=True)
    for again, before in zip(torch.autograd.grad(total, case.leaves), first, strict=True):
        tolerance.check_vector(again.double(), before.double())


def keeping(case: Case, kept: float | str) -> dict[str, int | str]:
    """The options with which so many entries of every token are kept, such a share of them, or those of a mode."""
    if isinstance(kept, str):
        return {"mode": kept}
    return {"budget": budget(case, kept=kept if isinstance(kept, int) else int(kept * case.head.vocabulary))}


def gradient_of_pair(z: Tensor, z_ref: Tensor, hit: Tensor, upstream: state.Upstream) -> tuple[Tensor, Tensor]:
    """The numbers of each token for given weights of the outputs, and the gradient of the logits."""
    finished = state.finish(state.of_logits(z, z_ref)[2])
    numbers = state.gradient_numbers(finished, upstream)
    lse, shift = finished.logsumexp[:, None], finished.lse_difference[:, None]
    return numbers, state.logit_gradient(numbers, z - lse, (z - z_ref - shift, z_ref - lse + shift), hit, None)


def budget(case: Case, *, kept: int) -> int:
    """Bytes for a tile of one granule and `kept` entries of every token; part of it can become a wider tile."""
    tokens, paired = case.targets.numel(), case.ref_head is not None
    plenty = tiling.make_plan(tokens, case.head.vocabulary, case.hidden.dtype, paired=paired, mode="fast")
    per_column = plenty.tile_bytes // plenty.columns
    per_kept = plenty.kept_bytes // plenty.kept
    return tiling.GRANULE * per_column + kept * per_kept

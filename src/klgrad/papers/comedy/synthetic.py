r"""Only k1 in reward, and k1 or k3 in both places, give ∇KL(A‖B); k3 in reward is furthest off; k1 in loss has a lower
bias than that and, for close chains, a higher variance than k1 in reward.

*A Comedy of Estimators* (arXiv 2512.21852), section 3.3, known from summaries only: binary autoregressive A_θ and B_φ
of 5 to 20 tokens, 200 rounds of 1000 samples. Here every sequence is summed instead, so that a bias is an exact number.
Ours: first-order chains (see `chains`), standard normal logits, and a second axis, the distance of B from A.

The bias of k1 in loss is lower, not low. Its expected gradient is zero (as in the paper's own table), hence its bias is
all of ∇KL; k3 in reward exceeds it by a tenth of ∇KL on average, and in two pairs of three. For close chains that is
small against the noise: a few per cent of one sample's standard deviation, against several standard deviations for k3
in reward. The variance of k1 in loss is higher than that of k1 in reward for close chains only; for independent ones it
is lower, and more so with length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.credit import whole
from ...core.estimators import k1, k3
from ...core.rollout import Rollout
from ...drawing import style
from ..study import Check, Numbers, Settings, below, exceeds_zero, ours

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Binary Markov chains of a fixed length, and the mean and variance of a KL gradient over all their sequences.
#
# The paper's parametrisation of A_θ and B_φ is not in the sources at hand. Chosen here: first-order chains with
# one logit per (step, previous token), the logit of token 1; the token before the first is 0.
# The score of token t then depends on one logit, so that the gradient of a sequence consists of T numbers and a
# million sequences are summed in seconds. Everything is in float64 and for P problems at once.

CHUNK = 2**15 - 1
"""Tokens summed at a time: few enough for a processor's cache, and for torch not to use several threads.

Synchronising threads thousands of times costs more than they save, and far more on a busy machine.
"""

EXACT = 1e-9
"""Relative error below which sums over a million sequences in float64 count as equal; they reach 1e-13."""

Coefficients = Callable[[Rollout], dict[str, Tensor]]
"""From sequences to a coefficient (n, T) on the scores of their tokens, by configuration."""

LABELS = {f"{k}-{place}": f"{k} in {place}" for place in ("reward", "loss", "both") for k in ("k1", "k3")}
"""The paper's configurations under the paper's names, in the order in which they are drawn."""

MARKERS = dict(zip(LABELS, "o^xdsv", strict=True))


def placements(
    rollout: Rollout, credit: Callable[[Tensor, Tensor], Tensor] = whole, weight: Tensor | float = 1.0
) -> dict[str, Tensor]:
    """The coefficient (n, T) of each configuration, at strength β = 1 in each of its places.

    In the reward, the sum of the estimate over the sequence, detached, multiplies the score of every token; with
    `to_go` for `credit`, the sum over this and later tokens. In the loss, the slope of the estimate multiplies the
    score of its own token. In both, the two are added. `weight` multiplies the term of each token before sums.
    """
    log_ratio, found = rollout.log_ratio, {}
    for estimator in (k1, k3):
        reward = credit(weight * estimator.value(log_ratio), rollout.mask)
        loss = weight * estimator.slope(log_ratio)
        found |= {f"{estimator}-reward": reward, f"{estimator}-loss": loss, f"{estimator}-both": reward + loss}
    return found


@dataclass(frozen=True, eq=False)
class Moments:
    """Of the gradient from one sampled sequence: its mean (P, T, 2), by logit, and its variance E‖g - Eg‖² (P,)."""

    mean: Tensor
    variance: Tensor

    def bias(self, target: Tensor) -> Tensor:
        """‖E g - target‖ / ‖target‖, (P,)."""
        return relative_error(self.mean, target)

    def deviation(self, target: Tensor) -> Tensor:
        """The standard deviation over ‖target‖, (P,)."""
        return self.variance.clamp(min=0).sqrt() / _norm(target)


@dataclass(frozen=True, eq=False)
class Chains:
    """Logits (P, T, 2) of the policy A, the reference B and the sampler; None means that A samples."""

    policy: Tensor
    reference: Tensor
    behaviour: Tensor | None = None

    def towards(self, share: float) -> "Chains":
        """The same policies, with references at this share of the distance from them, on a line in the logits."""
        return replace(self, reference=torch.lerp(self.policy, self.reference, share))

    def sampled_by(self, behaviour: Tensor) -> "Chains":
        """The same pairs with sequences drawn by other chains."""
        return replace(self, behaviour=behaviour)

    @cached_property
    def kl_gradient(self) -> Tensor:
        """∇KL(A‖B) of whole sequences, (P, T, 2): autograd through its chain rule, without listing sequences."""
        return _gradient(lambda logits: _visited_kl(_visits(logits), logits, self.reference), self.policy)

    @cached_property
    def token_forward_kl_gradient(self) -> Tensor:
        """∇ of the tokens' KL(B‖A), (P, T, 2), at prefixes as A visits them, the visits held fixed."""
        visits = _visits(self.policy)
        return _gradient(lambda logits: _visited_kl(visits, self.reference, logits), self.policy)

    def moments(self, coefficients: Coefficients) -> dict[str, Moments]:
        """Exact moments of Σ_t c_t s_t, one sequence sampled, by configuration."""
        mean: dict[str, Tensor] = {}
        square: dict[str, Tensor] = {}
        scores = _scores(self.policy)
        for place, rollout, probability in self._sequences():
            score = _look_up(scores, place)
            weighted, after_one = probability[..., None] * score, (place & 2).to(score) / 2
            for name, flat in coefficients(rollout).items():
                coefficient = flat.view_as(score)
                gradient = coefficient * weighted
                total, of_one = gradient.sum(1), (gradient * after_one).sum(1)
                mean[name] = mean.get(name, 0) + torch.stack([total - of_one, of_one], -1)
                # Each token has its own logit, so the squares of a sequence's gradient add up.
                square[name] = square.get(name, 0) + (gradient * coefficient * score).sum((1, 2))
        return {name: Moments(x, square[name] - _norm(x).square()) for name, x in mean.items()}

    def expectation(self, of: Callable[[Rollout], Tensor]) -> Tensor:
        """The mean (P,) over sampled sequences of one number (n,) per sequence."""
        parts = [(weight * of(rollout).view_as(weight)).sum(1) for _, rollout, weight in self._sequences()]
        return torch.stack(parts).sum(0)

    def _sequences(self) -> Iterator[tuple[Tensor, Rollout, Tensor]]:
        """Every sequence in chunks: places (n, T), log-probs of all problems (P·n, T), probability (P, n)."""
        problems, length, _ = self.policy.shape
        policy, reference = _log_probs(self.policy), _log_probs(self.reference)
        behaviour = policy if self.behaviour is None else _log_probs(self.behaviour)
        for place in _places(length, max(1, CHUNK // (problems * length))):
            flat = [_look_up(table, place).flatten(0, 1) for table in (policy, reference, behaviour)]
            rollout = Rollout(flat[0], flat[1], torch.ones_like(flat[0], dtype=torch.bool), behavior_logp=flat[2])
            yield place, rollout, flat[2].sum(-1).exp().view(problems, -1)


def relative_error(gradient: Tensor, target: Tensor) -> Tensor:
    """‖gradient - target‖ / ‖target‖ of (P, T, 2), (P,)."""
    return _norm(gradient - target) / _norm(target)


def random_logits(problems: int, length: int, generator: torch.Generator) -> Tensor:
    """Standard normal logits (P, T, 2), one chain for each problem."""
    return torch.randn(problems, length, 2, generator=generator, dtype=torch.float64)


def random_chains(problems: int, length: int, generator: torch.Generator) -> Chains:
    """Two independent chains of standard normal logits for each problem."""
    return Chains(random_logits(problems, length, generator), random_logits(problems, length, generator))


def _places(length: int, size: int) -> Iterator[Tensor]:
    """Every sequence in chunks (n, T): the index of each token's entry in a flat table (T, 2, 2).

    An entry is (step, previous token, token), so that bit 0 of the index is the token and bit 1 the one before.
    """
    step = torch.arange(length)
    for start in range(0, 2**length, size):
        number = torch.arange(start, min(start + size, 2**length))[:, None]
        # Doubling puts a 0 before the first token; the two lowest bits are then (token t, token t - 1).
        window = (2 * number >> step) & 3
        yield 4 * step + 2 * (window & 1) + (window >> 1)


def _look_up(table: Tensor, place: Tensor) -> Tensor:
    """(P, T, 2, 2) at places (n, T) to (P, n, T)."""
    return table.flatten(1).index_select(1, place.flatten()).view(len(table), *place.shape)


def _log_probs(logits: Tensor) -> Tensor:
    """(P, T, 2, 2) log-prob by (step, previous token, token)."""
    return torch.log_softmax(torch.stack([torch.zeros_like(logits), logits], -1), -1)


def _scores(logits: Tensor) -> Tensor:
    """(P, T, 2, 2) ∇log-prob by the one logit that it depends on: token - P(token = 1)."""
    return torch.tensor([0.0, 1.0], dtype=logits.dtype) - torch.sigmoid(logits)[..., None]


def _visits(logits: Tensor) -> Tensor:
    """(P, T, 2) how often the token before step t is 0 and 1."""
    visits = [torch.tensor([[1.0, 0.0]], dtype=logits.dtype).expand(len(logits), 2)]
    for step in _log_probs(logits).exp().unbind(1)[:-1]:
        visits.append((visits[-1][..., None] * step).sum(1))
    return torch.stack(visits, 1)


def _visited_kl(visits: Tensor, of: Tensor, to: Tensor) -> Tensor:
    """Σ over problems, steps and previous tokens of visits x KL of the next token."""
    p, q = _log_probs(of), _log_probs(to)
    return (visits * (p.exp() * (p - q)).sum(-1)).sum()


def _gradient(objective: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    logits = at.clone().requires_grad_()
    return torch.autograd.grad(objective(logits), logits)[0]


def _norm(gradient: Tensor) -> Tensor:
    return gradient.flatten(1).norm(dim=1)


FULL, QUICK = {5: 512, 10: 128, 15: 8, 20: 2}, {5: 512, 8: 64, 10: 8}
"""Pairs of chains by length: a pair costs twice as much with every token."""

SHARES = [1 / 16, 1 / 8, 1 / 4, 1 / 2]
"""How far B stands on the way from A to an independent chain."""

Measured = dict[str, dict[str, list[float]]]
"""By what was measured and by configuration, one number a pair."""


def run(settings: Settings) -> Numbers:
    """Bias and standard deviation of every configuration, by length and by distance of B from A."""
    generator = torch.Generator().manual_seed(settings.seed)
    pairs = QUICK if settings.quick else FULL
    by_length = [_measure(random_chains(n, length, generator)) for length, n in pairs.items()]
    length = settings.size(10, 8)
    apart = random_chains(settings.size(32, 16), length, generator)
    return {
        "lengths": list(pairs),
        "by_length": by_length,
        "length_of_shares": length,
        "shares": [*SHARES, 1.0],
        "by_share": [_measure(apart.towards(share)) for share in [*SHARES, 1.0]],
    }


def _measure(chains: Chains) -> Measured:
    target, found = chains.kl_gradient, chains.moments(placements)
    return {
        "bias": {name: found[name].bias(target).tolist() for name in LABELS},
        "deviation": {name: found[name].deviation(target).tolist() for name in LABELS},
        "identity": {
            "k1-loss-is-zero": relative_error(target + found["k1-loss"].mean, target).tolist(),
            "k3-loss-is-forward": found["k3-loss"].bias(chains.token_forward_kl_gradient).tolist(),
            **{f"{k}-halves-are-half": _halves(found, k, target) for k in ("k1", "k3")},
        },
    }


def _halves(found: dict[str, Moments], estimator: str, target: Tensor) -> list[float]:
    """How far β/2 in the reward and β/2 in the loss are from half of ∇KL."""
    mean = found[f"{estimator}-reward"].mean / 2 + found[f"{estimator}-loss"].mean / 2
    return relative_error(mean, target / 2).tolist()


def check(numbers: Numbers) -> list[Check]:
    """Exact sentences in every pair; comparisons over independent pairs of all lengths, most of them short."""
    groups = numbers["by_length"] + numbers["by_share"]
    near = numbers["by_share"][0]
    worst = lambda kind, name: max(value for group in groups for value in group[kind][name])
    bias = {name: [value for group in numbers["by_length"] for value in group["bias"][name]] for name in LABELS}
    noticed = {name: _over(near["bias"][name], near["deviation"][name]) for name in LABELS}
    return [
        below("k1 in reward: unbiased", worst("bias", "k1-reward"), EXACT),
        below("k1 in both: unbiased", worst("bias", "k1-both"), EXACT),
        below("k3 in both: unbiased", worst("bias", "k3-both"), EXACT),
        below("k1 in both, β/2 in each: half of ∇KL", worst("identity", "k1-halves-are-half"), EXACT),
        below("k3 in both, β/2 in each: half of ∇KL", worst("identity", "k3-halves-are-half"), EXACT),
        below("k1 in loss: expected gradient zero", worst("identity", "k1-loss-is-zero"), EXACT),
        below("k3 in loss: the tokens' forward KL", worst("identity", "k3-loss-is-forward"), EXACT),
        _more("k3 in loss: biased", bias["k3-loss"], bias["k1-reward"]),
        _more("k3 in reward: more bias than k3 in loss", bias["k3-reward"], bias["k3-loss"]),
        _more("k1 in loss: less bias than k3 in reward", bias["k3-reward"], bias["k1-loss"]),
        _more(
            "k1 in loss: more deviation than k1 in reward, B close to A",
            near["deviation"]["k1-loss"],
            near["deviation"]["k1-reward"],
        ),
        *ours(
            _more(
                "k1 in loss: less deviation than k1 in reward, A and B independent",
                numbers["by_share"][-1]["deviation"]["k1-reward"],
                numbers["by_share"][-1]["deviation"]["k1-loss"],
            ),
            _more(
                "k1 in loss: its bias is less of its deviation than k3 in reward's is, B close to A",
                noticed["k3-reward"],
                noticed["k1-loss"],
            ),
        ),
    ]


def _over(above: list[float], under: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, under, strict=True)]


def _more(claim: str, larger: list[float], smaller: list[float]) -> Check:
    """Whether it is larger on average, by the z-score; also reports in how many pairs."""
    differences = torch.tensor(larger, dtype=torch.float64) - torch.tensor(smaller, dtype=torch.float64)
    mean, positive = differences.mean().item(), (differences > 0).double().mean().item()
    judged = exceeds_zero(claim, differences)
    return replace(judged, measured=f"by {mean:.3g}, {judged.measured}, in {positive:.0%} of pairs")


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Bias above, standard deviation below; by length on the left, by distance on the right."""
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    columns = [
        (numbers["lengths"], numbers["by_length"], "tokens (independent A and B)"),
        (numbers["shares"], numbers["by_share"], f"distance of B from A ({numbers['length_of_shares']} tokens)"),
    ]
    for column, (x, groups, label) in enumerate(columns):
        for row, kind in enumerate(("bias", "deviation")):
            for name, text in LABELS.items():
                means = [fmean(group[kind][name]) for group in groups]
                look = style(name) | {"label": text if row == column == 0 else None}
                # Three lines coincide at no bias: hollow markers let each be seen.
                axes[row][column].plot(x, means, marker=MARKERS[name], markersize=6, markerfacecolor="none", **look)
        axes[1][column].set_xlabel(label)
        many = dict.fromkeys(str(len(group["bias"]["k1-reward"])) for group in groups)
        axes[0][column].set_title(f"means over {', '.join(many)} problems", fontsize=10)
    axes[0][0].set(ylabel="bias / ‖∇KL‖", xticks=numbers["lengths"])
    axes[1][0].set(ylabel="std of one\nsample / ‖∇KL‖", yscale="log")
    axes[1][1].set_xscale("log", base=2)
    axes[1][1].set_xticks(numbers["shares"], ["1/16", "1/8", "1/4", "1/2", "1"])
    figure.legend(loc="outside upper center", ncols=3, fontsize=9)

"""k1 and k3 in the reward, as a loss and in both, summed over every sequence of the policy or of a stale sampler."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from ...core.credit import to_go, whole
from ...core.estimators import k1, k3
from ...core.importance import prefix_ratio, sequence_ratio, token_ratio
from ...core.rollout import Rollout
from ...drawing import style
from ..study import Check, Figure, Numbers, Settings, below, exceeds, ours, over_repeats

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
    log_ratio, coefficients = rollout.log_ratio, {}
    for estimator in (k1, k3):
        reward = credit(weight * estimator.value(log_ratio), rollout.mask)
        loss = weight * estimator.slope(log_ratio)
        coefficients |= {f"{estimator}-reward": reward, f"{estimator}-loss": loss, f"{estimator}-both": reward + loss}
    return coefficients


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
        return self.variance.clamp(min=0).sqrt() / _length(target)


@dataclass(frozen=True, eq=False)
class Chains:
    """Logits (P, T, 2) of the policy A, the reference B and the sampler; None means that A samples."""

    policy: Tensor
    reference: Tensor
    behaviour: Tensor | None = None

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
        # (P, T, 2, 2) ∇log-prob by the one logit that it depends on: token - P(token = 1).
        scores = torch.arange(2, dtype=self.policy.dtype) - torch.sigmoid(self.policy)[..., None]
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
        return {name: Moments(x, square[name] - _length(x).square()) for name, x in mean.items()}

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
    return _length(gradient - target) / _length(target)


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


def _length(gradient: Tensor) -> Tensor:
    return gradient.flatten(1).norm(dim=1)


FULL, QUICK = {5: 512, 10: 128, 15: 8, 20: 2}, {5: 512, 8: 64, 10: 8}
"""Pairs of chains by length: a pair costs twice as much with every token."""
SHARES = [1 / 16, 1 / 8, 1 / 4, 1 / 2]
"""How far B stands on the way from A to an independent chain."""
ByName = dict[str, list[float]]
"""By configuration, one number a problem."""


class Synthetic:
    r"""Only k1 in reward, and k1 or k3 in both places, give ∇KL(A‖B); k3 in reward is furthest off; k1 in loss has a
    lower bias than that and, for close chains, a higher variance than k1 in reward.

    *A Comedy of Estimators* (arXiv 2512.21852), section 3.3, known from summaries only: binary autoregressive A_θ and
    B_φ of 5 to 20 tokens, 200 rounds of 1000 samples. Here every sequence is summed instead, so that a bias is an exact
    number. Ours: first-order chains (see `chains`), standard normal logits, and a second axis, the distance of B from
    A.

    The bias of k1 in loss is lower, not low. Its expected gradient is zero (as in the paper's own table), hence its
    bias is all of ∇KL; k3 in reward exceeds it by a tenth of ∇KL on average, and in two pairs of three. For close
    chains that is small against the noise: a few per cent of one sample's standard deviation, against several standard
    deviations for k3 in reward. The variance of k1 in loss is higher than that of k1 in reward for close chains only;
    for independent ones it is lower, and more so with length.
    """

    def run(self, settings: Settings) -> Numbers:
        generator = torch.Generator().manual_seed(settings.seed)
        pairs = QUICK if settings.quick else FULL
        by_length = [_measure(random_chains(n, length, generator)) for length, n in pairs.items()]
        length = settings.size(10, 8)
        apart = random_chains(settings.size(32, 16), length, generator)
        at = lambda share: torch.lerp(apart.policy, apart.reference, share)
        return {
            "lengths": list(pairs),
            "by_length": by_length,
            "length_of_shares": length,
            "shares": [*SHARES, 1.0],
            "by_share": [_measure(replace(apart, reference=at(share))) for share in [*SHARES, 1.0]],
        }

    def check(self, numbers: Numbers) -> list[Check]:
        """Exact sentences in every pair; comparisons over independent pairs of all lengths, most of them short."""
        groups = numbers["by_length"] + numbers["by_share"]
        near = numbers["by_share"][0]
        worst = lambda kind, name: max(value for group in groups for value in group[kind][name])
        bias = {name: [value for group in numbers["by_length"] for value in group["bias"][name]] for name in LABELS}
        close, apart = near["deviation"], numbers["by_share"][-1]["deviation"]
        noticed = {k: [a / b for a, b in zip(near["bias"][k], close[k], strict=True)] for k in ("k1-loss", "k3-reward")}
        independent = "k1 in loss: less deviation than k1 in reward, A and B independent"
        less = "k1 in loss: its bias is less of its deviation than k3 in reward's is, B close to A"
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
            _more("k1 in loss: more deviation than k1 in reward, B close to A", close["k1-loss"], close["k1-reward"]),
            *ours(
                _more(independent, apart["k1-reward"], apart["k1-loss"]),
                _more(less, noticed["k3-reward"], noticed["k1-loss"]),
            ),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
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


def _measure(chains: Chains) -> dict[str, ByName]:
    target, moments = chains.kl_gradient, chains.moments(placements)
    # The mean with β/2 in the reward and β/2 in the loss.
    halves = lambda k: moments[f"{k}-reward"].mean / 2 + moments[f"{k}-loss"].mean / 2
    return {
        "bias": {name: moments[name].bias(target).tolist() for name in LABELS},
        "deviation": {name: moments[name].deviation(target).tolist() for name in LABELS},
        "identity": {
            "k1-loss-is-zero": relative_error(target + moments["k1-loss"].mean, target).tolist(),
            "k3-loss-is-forward": moments["k3-loss"].bias(chains.token_forward_kl_gradient).tolist(),
            **{f"{k}-halves-are-half": relative_error(halves(k), target / 2).tolist() for k in ("k1", "k3")},
        },
    }


def _more(claim: str, larger: list[float], smaller: list[float]) -> Check:
    """Whether it is larger on average, by the z-score; also reports in how many pairs."""
    differences = torch.tensor(larger, dtype=torch.float64) - torch.tensor(smaller, dtype=torch.float64)
    mean, positive = differences.mean().item(), (differences > 0).double().mean().item()
    judged = exceeds(claim, over_repeats(differences))
    return replace(judged, measured=f"by {mean:.3g}, {judged.measured}, in {positive:.0%} of pairs")


STALENESS = [0.0, 0.1, 0.2, 0.4, 0.8]
"""Standard deviation of the sampler's logits from the policy's."""
BIASED = 1e3 * EXACT
"""A relative bias above this in every problem is not due to rounding."""
PAPERS_FOUR = ("k1-reward", "k1-loss", "k3-reward", "k3-loss")
SOUND = ("k1-reward", "k1-both", "k3-both")
"""Unbiased on-policy."""
WEIGHTS = {"none": "no weight", "token": "token ratio", "sequence": "sequence ratio", "prefix": "prefix ratio"}
REPAIRS = {
    "sequence": ("w_T", "o-"),
    "sequence to go": ("w_T, terms to go", "s--"),
    "prefix": ("w_t, terms to go", "^:"),
}
"""The exact ones, with their label, marker and line: the second differs from each of the others in one respect."""


class Stale:
    r"""Stale samples bias every configuration; ratios of sequences or of prefixes repair k1 in reward and k1, k3 in
    both, token ratios do not.

    *A Comedy of Estimators* (arXiv 2512.21852), off-policy part, known from summaries: neither k1 nor k3, in reward or
    in loss, is unbiased at the sequence level; an unbiased estimator was left open. Here the chains of `chains` are
    sampled by a stale policy and every sequence is summed. Ours: standard normal logits of policy and reference, a
    sampler whose logits are off by normal noise of a given size, and three weights. r_t is the ratio of the token whose
    score it weights. w_T is the ratio of the whole sequence. w_t = r_1...r_t is the ratio of the prefix up to the
    present token: it weights the term of that token, which the score of this and of every earlier token is multiplied
    by. w_T and w_t are exact, and either answers the open question; both cost variance, and w_t costs less, also if w_T
    weights the same sums over later tokens. With either, k3 in reward and k3 in loss keep their on-policy bias.
    """

    def run(self, settings: Settings) -> Numbers:
        generator = torch.Generator().manual_seed(settings.seed)
        length, problems = settings.size(10, 6), settings.size(64, 32)
        chains = random_chains(problems, length, generator)
        noise = random_logits(problems, length, generator)
        samplers = (chains.policy + stale * noise for stale in STALENESS)
        return {
            "length": length,
            "staleness": STALENESS,
            "by_staleness": [_measure_stale(replace(chains, behaviour=sampler)) for sampler in samplers],
        }

    def check(self, numbers: Numbers) -> list[Check]:
        """Exact sentences in every problem at every staleness; the cost, at the stalest."""
        fresh, *stale = numbers["by_staleness"]
        every = lambda kind, name: [value for group in stale for value in group[kind][name]]
        ends = (stale[0]["weights"], stale[-1]["weights"])
        of = lambda name, weight: stale[-1]["deviation"][f"{name}/{weight}"]
        more = "{}, sequence ratio: more deviation than on-policy"
        less = "{}, prefix ratio: less deviation than a sequence ratio on the same terms"
        return [
            *(_biased(f"{LABELS[name]}, no weight: biased", every("bias", f"{name}/none")) for name in PAPERS_FOUR),
            *ours(
                *(_biased(f"{LABELS[name]}, token ratio: biased", every("bias", f"{name}/token")) for name in SOUND),
                below("sequence ratio: mean 1", max(abs(x - 1) for x in every("weights", "mean")), EXACT),
                *_repaired(fresh["bias"], [group["bias"] for group in stale], "sequence"),
                *_repaired(fresh["bias"], [group["bias"] for group in stale], "prefix"),
                *(_larger(more.format(LABELS[k]), of(k, "sequence"), fresh["deviation"][f"{k}/none"]) for k in SOUND),
                *(_larger(less.format(LABELS[k]), of(k, "sequence to go"), of(k, "prefix")) for k in SOUND),
                _larger("the staler, the fewer effective samples", *(group["effective"] for group in ends)),
            ),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        """Bias against staleness under each weight, and what the exact weights cost."""
        figure.set_size_inches(9.6, 5.4)
        axes = figure.subplots(2, 3, sharex=True)
        x, groups = numbers["staleness"], numbers["by_staleness"]
        mean = lambda kind, name: [fmean(group[kind][name]) for group in groups]
        look = lambda name: style(name) | {"marker": MARKERS[name], "markersize": 5, "markerfacecolor": "none"}
        top = 1.05 * max(max(mean("bias", f"{name}/{weight}")) for name in LABELS for weight in WEIGHTS)
        for axis, (weight, title) in zip(axes[:, :2].flat, WEIGHTS.items(), strict=True):
            for name, text in LABELS.items():
                label = {"label": text if weight == "none" else None}
                axis.plot(x, mean("bias", f"{name}/{weight}"), **look(name) | label)
            axis.set_title(title, fontsize=10)
            axis.set(ylabel="bias / ‖∇KL‖", ylim=(-0.05 * top, top))
        cost, samples = axes[:, 2]
        for weight, (text, line) in REPAIRS.items():
            colour = style("k1-reward")["color"]
            cost.plot(x, mean("deviation", f"k1-reward/{weight}"), line, color=colour, ms=4, label=text)
        cost.set_title("k1 in reward, exact weights", fontsize=10)
        cost.set(ylabel="std of one sample / ‖∇KL‖", ylim=(0, None))
        cost.legend(fontsize=8)
        samples.plot(x, mean("weights", "effective"), color="black", marker=".")
        samples.set_title("effective samples, sequence ratio", fontsize=10)
        samples.set(ylabel="share of samples", ylim=(0, 1.05))
        for axis in axes[1]:
            axis.set_xlabel("std of sampler's logits\nfrom policy's")
        # The legend has the configurations only: the panel of costs has its own.
        title = f"means over {len(groups[0]['bias']['k1-reward/none'])} problems"
        handles = axes[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=6, fontsize=9, title=title)


def _coefficients(rollout: Rollout) -> dict[str, Tensor]:
    plain, sequence = placements(rollout), sequence_ratio(rollout)
    times = lambda ratio, group: {name: ratio * coefficient for name, coefficient in group.items()}
    by_weight = {
        "none": plain,
        "token": times(token_ratio(rollout), plain),
        "sequence": times(sequence, plain),
        "sequence to go": times(sequence, placements(rollout, to_go)),
        "prefix": placements(rollout, to_go, prefix_ratio(rollout)),
    }
    return {f"{name}/{weight}": c for weight, group in by_weight.items() for name, c in group.items()}


def _measure_stale(chains: Chains) -> dict[str, ByName]:
    """By what was measured and by configuration, one number a problem."""
    target, moments = chains.kl_gradient, chains.moments(_coefficients)
    mean = chains.expectation(sequence_ratio)
    square = chains.expectation(lambda rollout: sequence_ratio(rollout).square())
    return {
        "bias": {name: x.bias(target).tolist() for name, x in moments.items()},
        "deviation": {name: x.deviation(target).tolist() for name, x in moments.items()},
        # What the effective sample size of many weights tends to, as a share of their number.
        "weights": {"mean": mean.tolist(), "effective": (mean.square() / square).tolist()},
    }


def _repaired(fresh: ByName, stale: list[ByName], weight: str) -> list[Check]:
    """An exact weight: what is unbiased on-policy is unbiased again, and what is biased has its on-policy bias."""
    title, checks = WEIGHTS[weight], []
    for name in SOUND:
        off = max(value for bias in stale for value in bias[f"{name}/{weight}"])
        checks.append(below(f"{LABELS[name]}, {title}: unbiased", off, EXACT))
    for name in ("k3-reward", "k3-loss"):
        on_policy = fresh[f"{name}/none"]
        pairs = [pair for bias in stale for pair in zip(bias[f"{name}/{weight}"], on_policy, strict=True)]
        off = max(abs(now - before) / before for now, before in pairs)
        checks.append(below(f"{LABELS[name]}, {title}: as biased as on-policy", off, EXACT))
    return checks


def _biased(claim: str, values: list[float]) -> Check:
    return Check(claim, f"at least {min(values):.2g} in every problem", min(values) > BIASED)


def _larger(claim: str, larger: list[float], smaller: list[float]) -> Check:
    """By the logarithm of the ratio of each problem: a few large weights would dominate any difference."""
    ratio = torch.tensor(larger, dtype=torch.float64) / torch.tensor(smaller, dtype=torch.float64)
    return exceeds(claim, over_repeats(ratio.log()))

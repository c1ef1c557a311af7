"""Far from ref, k3 as a token loss makes little progress; sequence-level gradients, which are unbiased, beat
token-level ones, and variance reduction makes them faster.

Figure 8 of the paper, which distils a 70B into an 8B model, with policies whose KL between completions is an exact sum:
the next token depends on the previous one, in a vocabulary of 16; the student has 4 rows of logits for the teacher's
16, so that it cannot match the teacher, and starts far from it (`first_order`). A step has 16 prompts with 4
completions of at most 16 tokens each, and Adam. For each number of steps an arm has the learning rate that ends lowest
after that many, chosen on the other half of the 100 problems; the jumps in the figure are changes of that rate. The
z-scores are of the logarithm of the KL, problem by problem. Unbiasedness is summed over all pairs of completions of
small problems, the bias of the token level is exact, and variances are measured at the start. The paper's sentences are
judged where completions may end, as the paper's do; the last two arms are ours.

After 300 steps the paper's order of the arms reproduces, but k3 as a token loss is only worse, not stuck: it makes most
of the progress of token vanilla. (In runs of 20 to 40 steps leave-one-out is not significantly ahead of sequence
vanilla.) The sequence level gets ahead by ending: its completions shrink to two or three tokens, while token-level ones
keep ten; the paper shows no lengths. On the teacher's completions, where the KL starts at 23 nats, its students end at
12 to 19, and token-level ones at 5 to 6. At fixed length the order depends on the number of steps: sequence vanilla is
behind token vanilla for the first hundred and ahead after about two hundred. Its variance delays it: arms with the same
expected gradient and less variance are ahead sooner, the exact one already after 30 steps. On the teacher's completions
all sequence-level students remain farther there too.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...audit.subject import as_subject, expected_gradient
from ...core.term import KLTerm
from ...drawing import STYLES
from ...enumeration import autoregressive, target_gradients
from ...zoo import Cell, get
from ..runs import curve
from ..study import Check, Numbers, Settings, below, exceeds, ours, over_repeats
from .first_order import (
    EVERY,
    SPREAD,
    Problems,
    at_best_rate,
    descend,
    draw as draw_problems,
    exact_gradient,
    gradient_variance,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The figure of `fig8_sequences`: a row of panels for each kind of length.

LABELS = {
    "k3-loss": "token: k3 as loss",
    "token": "token: vanilla",
    "k1-reward": "sequence: vanilla",
    "k1-reward-leave-one-out": "sequence: leave-one-out",
    "to-go": "sequence: cumulative",
    "exact-leave-one-out": "sequence: exact, leave-one-out by step",
    "discount": "the same with discount 0.9, last step alone",
}
MOST_LINES = 6
"""In a panel: of the last arm, which is ours, the end is drawn alone."""
TITLES = {"may end": "Completions may end", "fixed length": "16 tokens"}
PANELS = {
    "kl": "KL(student‖teacher),\non the student's completions (the paper's measure)",
    "forward": "KL(teacher‖student),\non the teacher's completions",
    "length": "tokens per completion",
}


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Means over problems, with bands of one standard error; lengths only where they vary."""
    figure.set_size_inches(12, 7.2)
    axes = figure.subplots(2, len(PANELS))
    for across, (lengths, title) in zip(axes, TITLES.items(), strict=True):
        for axis, (measure, label) in zip(across, PANELS.items(), strict=True):
            if (lengths, measure) == ("fixed length", "length"):
                axis.set_axis_off()
                axis.legend(*axes[0][0].get_legend_handles_labels(), loc="center", fontsize=10)
                continue
            arms = numbers["descents"][lengths]["arms"]
            for i, (name, text) in enumerate(LABELS.items()):
                seen, (colour, line, _) = arms[name][measure], STYLES[name]
                if i < MOST_LINES:
                    curve(axis, {"updates": numbers["steps"], **seen}, colour, line, alpha=0.15, label=text, lw=1.6)
                else:
                    axis.plot(numbers["steps"][-1], seen["mean"][-1], "o", color=colour, ms=6, label=text)
            axis.set_title(f"{title}: {label}\n{numbers['problems']} problems, ± 1 SE", fontsize=9)
            axis.set(xlabel="steps of the run", ylabel="tokens" if measure == "length" else "nats", yscale="log")
            axis.grid(alpha=0.25)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.tick_params(which="both", labelsize=8)


METHODS: dict[str, KLTerm | Cell] = {
    "k3-loss": get("k3-loss"),
    "token": KLTerm(level="token"),
    "k1-reward": get("k1-reward"),
    "k1-reward-leave-one-out": get("k1-reward-leave-one-out"),
    "to-go": KLTerm(),
    "exact-leave-one-out": KLTerm(estimator="exact", baseline="leave_one_out"),
    "discount": KLTerm(estimator="exact", baseline="leave_one_out", discount=0.9),
}
TOKEN_LEVEL = ("k3-loss", "token")
SEQUENCE_LEVEL = tuple(name for name in METHODS if name not in TOKEN_LEVEL)
UNBIASED = tuple(name for name in SEQUENCE_LEVEL if name != "discount")
LENGTHS = {"may end": True, "fixed length": False}
RATES = (0.03, 0.1, 0.3)
STEPS, EARLY = 300, 30
LITTLE = 0.5
"""The share of vanilla's progress up to which progress would be called little."""
LESS_VARIANCE = {
    "leave-one-out has less variance than sequence vanilla": ("k1-reward", "k1-reward-leave-one-out"),
    "cumulative has less variance than sequence vanilla": ("k1-reward", "to-go"),
}
NEARER = {
    "k3 as a token loss ends farther than token vanilla": ("k3-loss", "token"),
    "sequence vanilla ends nearer than token vanilla": ("token", "k1-reward"),
    "leave-one-out ends nearer than sequence vanilla": ("k1-reward", "k1-reward-leave-one-out"),
    "cumulative ends nearer than sequence vanilla": ("k1-reward", "to-go"),
}
"""The arm with the higher variance or KL, and the one with the lower."""
NEARER_AT_FIXED_LENGTH = {
    "k3 as a token loss ends farther than token vanilla": ("k3-loss", "token"),
    "leave-one-out ends nearer than sequence vanilla": ("k1-reward", "k1-reward-leave-one-out"),
    "cumulative ends nearer than sequence vanilla": ("k1-reward", "to-go"),
    "exact with leave-one-out by step ends nearer than cumulative": ("to-go", "exact-leave-one-out"),
}
AHEAD, DISCOUNTED = ("k1-reward", "token"), ("exact-leave-one-out", "discount")
REPORTED = (("token", "k1-reward-leave-one-out"), ("token", "to-go"))
COMPARED = {*NEARER.values(), *NEARER_AT_FIXED_LENGTH.values(), AHEAD, DISCOUNTED, *REPORTED}


def run(settings: Settings) -> Numbers:
    """Exact bias, measured variance, and descents."""
    problems, steps = settings.size(100, 48), settings.size(STEPS, EARLY)
    of_problems, of_samples = 2 * settings.seed, 2 * settings.seed + 1
    rates = RATES if not settings.quick else (0.1,)
    drawn = {
        name: draw_problems(problems, ends=ends, generator=torch.Generator().manual_seed(of_problems))
        for name, ends in LENGTHS.items()
    }
    return {
        "problems": problems,
        "steps": list(range(0, steps + 1, EVERY)),
        "bias": largest_bias(settings.size(12, 4), of_problems),
        **at_the_start(drawn["may end"], settings.size(32, 8), of_samples),
        "descents": {name: _descents(given, rates, steps, of_samples) for name, given in drawn.items()},
    }


def largest_bias(problems: int, seed: int) -> dict[str, float]:
    """The largest relative bias of sequence-level gradients over small problems, from all pairs of completions."""
    found = dict.fromkeys(UNBIASED, 0.0)
    for i in range(problems):
        problem = autoregressive(3, 3, ends=True, seed=1000 * seed + i, away_from_ref=SPREAD).on_policy()
        target = target_gradients(problem)["reverse-kl-sequence"]
        none = torch.zeros(len(problem.space), dtype=torch.float64)
        for name in UNBIASED:
            mean = expected_gradient(as_subject(METHODS[name]), problem, 2, none).mean[: len(target)]
            found[name] = max(found[name], float((mean - target).norm() / target.norm()))
    return found


def at_the_start(problems: Problems, draws: int, seed: int) -> Numbers:
    """The exact bias of the token level, and each arm's variance of one step's gradient, at the start."""
    target, token_level = (exact_gradient(problems, level) for level in ("sequence", "token"))
    bias = (token_level - target).norm(dim=1) / target.norm(dim=1)
    variance = {name: gradient_variance(method, problems, draws, seed) for name, method in METHODS.items()}
    return {
        "bias of the token level": {"least": float(bias.min()), **over_repeats(bias)},
        "variance": {name: over_repeats(x / target.square().sum(-1)) for name, x in variance.items()},
        "log variance": {_over(a, b): over_repeats((variance[a] / variance[b]).log()) for a, b in sorted(COMPARED)},
    }


def _descents(problems: Problems, rates: tuple[float, ...], steps: int, seed: int) -> Numbers:
    """Every arm after each number of steps at its best rate, and the differences between arms."""
    arms, chosen = {}, {}
    for name, method in METHODS.items():
        arms[name], best = at_best_rate(descend(method, problems, rates, steps, seed))
        chosen[name] = [sorted({rates[i] for i in pair}) for pair in best.tolist()]
    at_end = lambda key, names: torch.stack([arms[name][key][-1] for name in names])
    # The smallest gap in each problem: between the extreme arms of the two levels.
    shorter = at_end("length", TOKEN_LEVEL).amin(0) - at_end("length", SEQUENCE_LEVEL).amax(0)
    farther = at_end("forward", SEQUENCE_LEVEL).amin(0) - at_end("forward", TOKEN_LEVEL).amax(0)
    return {
        "rates": chosen,
        "arms": {name: {key: over_repeats(x) for key, x in arm.items()} for name, arm in arms.items()},
        "log kl": {_over(a, b): over_repeats((arms[a]["kl"] / arms[b]["kl"]).log()) for a, b in sorted(COMPARED)},
        "apart": {"length": over_repeats(shorter), "forward": over_repeats(farther)},
    }


def check(numbers: Numbers) -> list[Check]:
    """The paper's sentences where completions may end, then ours."""
    bias, end = numbers["bias of the token level"]["least"], numbers["steps"][-1]
    free, fixed = (numbers["descents"][name] for name in LENGTHS)
    variance = {claim: numbers["log variance"][_over(*sides)] for claim, sides in LESS_VARIANCE.items()}
    return [
        below("sequence-level estimates are unbiased (largest relative bias)", max(numbers["bias"].values()), 1e-9),
        Check("the token level is biased", f"at least {bias:.1%} of the gradient", bias > 0.01),
        *(exceeds(claim, x["mean"], x["error"]) for claim, x in variance.items()),
        *(_nearer(claim, free, *sides) for claim, sides in NEARER.items()),
        _little_progress("k3 as a token loss makes little progress", free),
        *ours(
            _apart("sequence-level arms end with shorter completions than token-level", free, "length", "tokens"),
            _apart("on the teacher's completions they end farther than token-level", free, "forward", "nats"),
            _at_first("a discount of 0.9 is nearer than none", free, *DISCOUNTED, end),
            _at_first("fixed length: token vanilla is nearer than sequence vanilla", fixed, *AHEAD, end),
            *(_nearer(f"fixed length: {claim}", fixed, *sides) for claim, sides in NEARER_AT_FIXED_LENGTH.items()),
        ),
    ]


def _over(above: str, under: str) -> str:
    return f"{above} over {under}"


def _nearer(claim: str, found: Numbers, above: str, under: str, point: int = -1) -> Check:
    """Whether an arm's KL is above another's, in the mean logarithm, at one of the points."""
    x = found["log kl"][_over(above, under)]
    return exceeds(claim, x["mean"][point], x["error"][point])


def _at_first(claim: str, found: Numbers, above: str, under: str, end: int) -> Check:
    """Whether it holds after a few steps; also reports the end."""
    early = _nearer(f"{claim} after {EARLY} steps", found, above, under, EARLY // EVERY)
    late = _nearer(claim, found, above, under)
    return replace(early, measured=f"{early.measured}; after {end} steps {late.measured}")


def _little_progress(claim: str, found: Numbers) -> Check:
    k3, vanilla = (kl[0] - kl[-1] for kl in (found["arms"][name]["kl"]["mean"] for name in TOKEN_LEVEL))
    share = k3 / vanilla
    return Check(claim, f"{share:.0%} of token vanilla's, limit {LITTLE:.0%}", share < LITTLE)


def _apart(claim: str, found: Numbers, key: str, unit: str) -> Check:
    """Whether the levels are apart, problem by problem; also reports the means of the arms."""
    ends = [[found["arms"][name][key]["mean"][-1] for name in names] for names in (SEQUENCE_LEVEL, TOKEN_LEVEL)]
    sequence, token = (f"{min(x):.1f} to {max(x):.1f}" for x in ends)
    tested = exceeds(claim, found["apart"][key]["mean"], found["apart"][key]["error"])
    return replace(tested, measured=f"{sequence} {unit} against {token}, {tested.measured}")

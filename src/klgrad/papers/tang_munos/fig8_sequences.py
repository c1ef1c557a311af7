"""Far from ref, k3 as a token loss makes little progress; sequence-level gradients, which are unbiased, beat
token-level ones, and variance reduction makes them faster.

Figure 8 of the paper, which distils a 70B into an 8B model, with policies whose KL between completions is an exact sum:
the next token depends on the previous one, in a vocabulary of 16; the student has 4 rows of logits for the teacher's
16, so that it cannot match the teacher, and starts far from it. A step has 16 prompts with 4
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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...audit.subject import as_subject, expected_gradient
from ...core.rollout import Rollout
from ...core.term import KLTerm
from ...drawing import STYLES
from ...enumeration import END, autoregressive, target_gradients
from ...zoo import Cell, get
from ..runs import curve, logarithmic
from ..study import Check, Figure, Numbers, Settings, at_point, below, exceeds, ours, over_repeats

# First-order policies of many problems at once: sampled completions, and exact divergences between completions.
#
# The next token depends on the previous one only, at every step alike; a prompt is the token before the completion, and
# all tokens are equally frequent prompts. The reference has a row of logits for each previous token. The student has
# one row for each class of previous tokens, so that it cannot match the reference. How often a completion has each
# token before a step follows from the step before, so that no completion has to be listed.

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


def draw_problems(problems: int, *, ends: bool, generator: torch.Generator) -> Problems:
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
    result = method(rollout)
    if isinstance(result, Tensor):  # a mean over the completions of all problems
        return len(problems.ref) * result
    return result.per_token.sum() / uniform.shape[1]


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
    paths = torch.stack(seen, 1).view(3, len(seen), len(rates), -1)
    return dict(zip(("kl", "forward", "length"), paths, strict=True))


def at_best_rate(seen: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """After each number of steps, the numbers (points, P) at the learning rate with the lowest KL after that many.

    The rate of a problem is chosen by the mean logarithm of the KL over the other half of the problems, so that no
    problem chooses its own. Also returns the indices (points, 2) of the rates of the two halves.
    """
    half = torch.arange(seen["kl"].shape[-1]) % 2
    best = torch.stack([seen["kl"][..., half != mine].log().mean(-1).argmin(-1) for mine in (0, 1)], -1)
    return {name: x.gather(1, best[:, None, half])[:, 0] for name, x in seen.items()}, best


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


def draw(numbers: Numbers, figure: Figure) -> None:
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
            axis.set(xlabel="steps of the run", ylabel="tokens" if measure == "length" else "nats")
            axis.grid(alpha=0.25)
            logarithmic(axis)
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
    **{claim: sides for claim, sides in NEARER.items() if sides != ("token", "k1-reward")},
    "exact with leave-one-out by step ends nearer than cumulative": ("to-go", "exact-leave-one-out"),
}
AHEAD, DISCOUNTED = ("k1-reward", "token"), ("exact-leave-one-out", "discount")
REPORTED = (("token", "k1-reward-leave-one-out"), ("token", "to-go"))
COMPARED = {*NEARER.values(), *NEARER_AT_FIXED_LENGTH.values(), AHEAD, DISCOUNTED, *REPORTED}


def run(settings: Settings) -> Numbers:
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
    biases = dict.fromkeys(UNBIASED, 0.0)
    for i in range(problems):
        problem = autoregressive(3, 3, ends=True, seed=1000 * seed + i, away_from_ref=SPREAD).on_policy()
        target = target_gradients(problem)["reverse-kl-sequence"]
        none = torch.zeros(len(problem.space), dtype=torch.float64)
        for name in UNBIASED:
            mean = expected_gradient(as_subject(METHODS[name]), problem, 2, none, at_once=True).mean[: len(target)]
            biases[name] = max(biases[name], float((mean - target).norm() / target.norm()))
    return biases


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
    k3, vanilla = (kl[0] - kl[-1] for kl in (free["arms"][name]["kl"]["mean"] for name in TOKEN_LEVEL))
    progress = k3 / vanilla
    measured = f"{progress:.0%} of token vanilla's, limit {LITTLE:.0%}"
    return [
        below("sequence-level estimates are unbiased (largest relative bias)", max(numbers["bias"].values()), 1e-9),
        Check("the token level is biased", f"at least {bias:.1%} of the gradient", bias > 0.01),
        *(exceeds(claim, numbers["log variance"][_over(*sides)]) for claim, sides in LESS_VARIANCE.items()),
        *(_nearer(claim, free, *sides) for claim, sides in NEARER.items()),
        Check("k3 as a token loss makes little progress", measured, progress < LITTLE),
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


def _nearer(claim: str, numbers: Numbers, above: str, under: str, point: int = -1) -> Check:
    """Whether an arm's KL is above another's, in the mean logarithm, at one of the points."""
    return exceeds(claim, at_point(numbers["log kl"][_over(above, under)], point))


def _at_first(claim: str, numbers: Numbers, above: str, under: str, end: int) -> Check:
    """Whether it holds after a few steps; also reports the end."""
    early = _nearer(f"{claim} after {EARLY} steps", numbers, above, under, EARLY // EVERY)
    late = _nearer(claim, numbers, above, under)
    return replace(early, measured=f"{early.measured}; after {end} steps {late.measured}")


def _apart(claim: str, numbers: Numbers, key: str, unit: str) -> Check:
    """Whether the levels are apart, problem by problem; also reports the means of the arms."""
    ends = [[numbers["arms"][name][key]["mean"][-1] for name in names] for names in (SEQUENCE_LEVEL, TOKEN_LEVEL)]
    sequence, token = (f"{min(x):.1f} to {max(x):.1f}" for x in ends)
    tested = exceeds(claim, numbers["apart"][key])
    return replace(tested, measured=f"{sequence} {unit} against {token}, {tested.measured}")

"""Facts 24 to 31: every coefficient has its divergence: f'(u) on the token's own score, f(u)/u on those before."""

import math
from dataclasses import replace

import oracle
import pytest
import torch
from oracle import ON_SEQUENCES, PROBLEMS, SEQUENCES, differentiated, mean_gradient, mean_gradient_over_groups
from tolerances import EXACT, OPTIMUM

from klgrad import ImportanceWeighting, KLTerm, Rollout, divergences as d, forward_optimum, optimum, reverse_optimum
from klgrad.core.estimators import k1
from klgrad.enumeration import autoregressive

CUBIC = d.from_slope("cubic", lambda l: 2 + l + l**3, "2 + l + l^3")  # the constant is no part of the divergence

GENERATORS = {**oracle.GENERATORS, CUBIC: lambda u: u * (u.log() ** 3 - 3 * u.log() ** 2 + 7 * u.log() - 7) + 7}
name_of = lambda x: x if isinstance(x, str) else x.name
GIVEN = pytest.mark.parametrize("given", GENERATORS, ids=name_of)


def token_divergences(problem, given):
    """(P,) D_f at each prefix, by its definition over the whole vocabulary."""
    logp, ref_logp = problem.logits.log_softmax(-1), problem.ref_logits.log_softmax(-1)
    return (ref_logp.exp() * GENERATORS[given]((logp - ref_logp).exp())).sum(-1)


def every_completion(problem, given):
    """As one batch, with the divergence of each token in the field that an exact term reads."""
    field = {"reverse": "token_reverse_kl", "forward": "token_forward_kl"}.get(given, "token_divergence")
    full = {field: problem.at_tokens(token_divergences(problem, given))}
    return Rollout(problem.logp, problem.ref_logp, problem.space.mask, problem.behavior_logp, **full)


def expected_gradient(term, problem, given):
    """Of the loss of a term, over what the sampler draws."""
    return differentiated(problem, lambda p: problem.probability @ term(every_completion(p, given)).per_token.sum(-1))


# The definitions, as differentiable functions of a problem.


def along_completions(given, discount):
    """E_π[ Σ_s D_s ], in which the probability of an earlier token t moves with the power discount^(s-t) alone.

    With 1 it is the sum of the tokens' divergences, with 0 the same at prefixes that are held fixed.
    """

    def value(p):
        fixed, own = p.logp.detach(), p.at_tokens(token_divergences(p, given))
        steps = torch.arange(p.logp.shape[1])
        lag = steps - steps[:, None]  # from an earlier token (row) to the token whose divergence is counted
        share = torch.where(lag > 0, torch.tensor(float(discount), dtype=torch.float64) ** lag.clamp(min=0), 0)
        probability = (fixed.sum(-1, keepdim=True) + (p.logp - fixed) @ share).exp()
        return (probability * own).sum()

    return value


def on_the_samplers_prefixes(given):
    return lambda p: (p.prefix_probability(p.behavior_logits).detach() * token_divergences(p, given)).sum()


def between_completions(given):
    def value(p):
        ref = p.ref_logp.sum(-1)
        return (ref.exp() * GENERATORS[given]((p.logp.sum(-1) - ref).exp())).sum()

    return value


FORMS = {
    # what is declared, its definition, and the ratios that exist
    "token": ({"level": "token"}, lambda f: along_completions(f, 0), ("token", "prefix", "sequence")),
    "future": ({"level": "future"}, lambda f: along_completions(f, 1), ("prefix", "sequence")),
    "discounted": ({"level": "future", "discount": 0.7}, lambda f: along_completions(f, 0.7), ("prefix", "sequence")),
    "completions": ({"level": "sequence"}, between_completions, ("sequence",)),
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def estimators_of(given, form):
    exact = () if form == "completions" and given != "reverse" else ("exact",)
    if given == "reverse":
        return ("k1", *(("k1_k3",) if form != "token" else ()), *exact)
    return ("k3" if given == "forward" else "sampled", *exact)


@GIVEN
@EVERY_FORM
@ON_SEQUENCES
def test_facts_24_26_27_a_term_on_fresh_samples_has_the_gradient_of_its_divergence(problem, form, given):
    choices, definition, _ = FORMS[form]
    fresh = problem.on_policy()
    expected = differentiated(fresh, definition(given))
    for estimator in estimators_of(given, form):
        term = KLTerm(divergence=given, estimator=estimator, **choices)
        EXACT.check_vector(expected_gradient(term, fresh, given), expected)


@GIVEN
@EVERY_FORM
@ON_SEQUENCES
def test_fact_29_with_its_ratio_it_has_the_same_gradient_on_stale_samples(problem, form, given):
    choices, definition, ratios = FORMS[form]
    target = differentiated(problem, definition(given))
    for estimator in estimators_of(given, form):
        for ratio in ratios:
            if (ratio, estimator) == ("token", "exact"):
                continue  # refused: without a ratio it is the same
            weighting = ImportanceWeighting(ratio, bound=None)
            term = KLTerm(divergence=given, estimator=estimator, weighting=weighting, **choices)
            expected = target if ratio != "token" else differentiated(problem, on_the_samplers_prefixes(given))
            EXACT.check_vector(expected_gradient(term, problem, given), expected)


@GIVEN
@ON_SEQUENCES
def test_fact_29_the_exact_token_term_needs_no_ratio_on_the_samplers_prefixes(problem, given):
    term = KLTerm(divergence=given, level="token", estimator="exact")
    found = expected_gradient(term, problem, given)
    EXACT.check_vector(found, differentiated(problem, on_the_samplers_prefixes(given)))


SMALL = autoregressive(2, 2, ends=True, seed=8, away_from_ref=1.0)


@GIVEN
@EVERY_FORM
@pytest.mark.parametrize("ratio", [None, "sequence"])
def test_a_baseline_of_the_other_completions_leaves_the_gradient_as_it_is(ratio, form, given):
    choices, definition, _ = FORMS[form]
    problem = SMALL.on_policy() if ratio is None else SMALL
    weighting = None if ratio is None else ImportanceWeighting(ratio, bound=None)
    choices = choices | {"estimator": estimators_of(given, form)[0], "baseline": "leave_one_out"}
    term = KLTerm(divergence=given, weighting=weighting, **choices)
    found = mean_gradient_over_groups(problem, 2, lambda r: term(r).loss, on_policy=ratio is None)
    EXACT.check_vector(found, differentiated(problem, definition(given)))


ANTIDERIVATIVES = {
    # h' = c, for fact 29
    "reverse": lambda l: l**2 / 2,
    "forward": lambda l: (-l).exp() + l,
    "chi-square": lambda l: l.exp() - l,
    "hellinger": lambda l: 2 * l + 4 * (-l / 2).exp(),
    "total-variation": torch.abs,
    "alpha(0.3)": lambda l: (l + (-0.7 * l).exp() / 0.7) / 0.7,
    "huber(0.7)": lambda l: torch.where(l.abs() <= 0.7, l**2 / 2, 0.7 * l.abs() - 0.7**2 / 2),
    CUBIC: lambda l: l**2 / 2 + l**4 / 4,
}


@pytest.mark.parametrize("given", ANTIDERIVATIVES, ids=name_of)
@ON_SEQUENCES
def test_fact_29_without_a_ratio_it_is_the_mean_of_the_antiderivative_under_the_sampler(problem, given):
    term = KLTerm(divergence=given, level="token", estimator=estimators_of(given, "token")[0])
    mean = lambda p: (problem.probability * ANTIDERIVATIVES[given](p.logp - p.ref_logp).sum(-1)).sum()
    found = expected_gradient(term, problem, given)
    EXACT.check_vector(found, differentiated(problem, mean))
    away = found - differentiated(problem, along_completions(given, 0))
    assert away.norm() > 0.01 * found.norm()


@ON_SEQUENCES
def test_fact_29_credit_from_earlier_tokens_has_mean_zero_on_fresh_samples_alone(problem):
    log_ratio = problem.logp - problem.ref_logp
    earlier = (log_ratio.cumsum(-1) - log_ratio) * problem.space.mask
    EXACT.check_vector(mean_gradient(problem.on_policy(), earlier), torch.zeros(problem.logits.numel()))
    assert mean_gradient(problem, earlier).norm() > 1e-4


def test_fact_29_credit_from_other_completions_has_mean_zero_on_fresh_samples_alone():
    def gap(on_policy):
        with_others, alone = (KLTerm(level="token", baseline=b) for b in ("leave_one_out", "none"))
        loss = lambda r: with_others(r).loss - alone(r).loss
        return mean_gradient_over_groups(SMALL, 2, loss, on_policy=on_policy).norm()

    assert gap(on_policy=True) < 1e-12
    assert gap(on_policy=False) > 1e-3


@GIVEN
def test_fact_25_near_ref_it_is_its_scale_times_the_kl(given):
    scale = d.named(given).scale
    if scale == math.inf:  # the slope jumps
        step = torch.tensor([-1e-9, 1e-9], dtype=torch.float64)
        assert d.named(given).slope(step).tolist() == [-1, 1]
        return
    problem, step = SEQUENCES["fixed"], 1e-5
    noise = torch.randn(problem.logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def odd_part(divergence):
        """Of the gradient as a function of the step from ref: without its term of second order."""
        ends = []
        for sign in (1, -1):
            logits = problem.ref_logits + sign * step * noise
            near = replace(problem, logits=logits, behavior_logits=logits)
            term = KLTerm(divergence=divergence, level="token", estimator=estimators_of(divergence, "token")[0])
            ends.append(expected_gradient(term, near, divergence))
        return (ends[0] - ends[1]) / 2

    EXACT.check_vector(odd_part(given), scale * odd_part("reverse"))


@GIVEN
def test_fact_28_over_the_vocabulary_the_coefficient_of_an_entry_is_the_slope_at_its_log_ratio(given):
    problem, divergence = PROBLEMS["bandit"], d.named(given)
    logits, ref_logp = problem.logits.clone().requires_grad_(), problem.ref_logits.log_softmax(-1)
    logp = logits.log_softmax(-1)
    value = divergence.over(logp, ref_logp)
    (found,) = torch.autograd.grad(value.sum(), logits)
    p, slope = logp.exp().detach(), divergence.slope((logp - ref_logp).detach())
    EXACT.check(found, p * (slope - (p * slope).sum(-1, keepdim=True)))
    EXACT.check(value, token_divergences(problem, given))
    EXACT.check_vector(found.flatten(), differentiated(problem, lambda q: token_divergences(q, given).sum()))


OVER_VOCABULARY = {
    "top-2, renormalised": lambda p, ref: (
        (p[:2] / p[:2].sum()) * (p[:2] / p[:2].sum() / (ref[:2] / ref[:2].sum())).log()
    ).sum(),
    "clip of each entry of the sum": lambda p, ref: (p * (p / ref).log()).clamp(max=0.2).sum(),
    "entropy bonus": lambda p, ref: (p * (p / ref).log()).sum() + 0.1 * (p * p.log()).sum(),
    "squared difference": lambda p, ref: (p - ref).square().sum(),
}


@pytest.mark.parametrize("name", OVER_VOCABULARY)
def test_fact_28_a_loss_whose_coefficient_is_no_function_of_the_log_ratio_is_no_f_divergence(name):
    """The first and the third entry have one log-ratio, and so would have one coefficient."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    ref = torch.tensor([0.2, 0.4, 0.1, 0.3], dtype=torch.float64)
    logits = p.log().requires_grad_()

    def coefficients(loss):
        (found,) = torch.autograd.grad(loss(logits.softmax(-1), ref), logits)
        return found / p

    for f in GENERATORS.values():
        first, _, third, _ = coefficients(lambda p, ref, f=f: (ref * f(p / ref)).sum())
        EXACT.check(first, third)
    first, _, third, _ = coefficients(OVER_VOCABULARY[name])
    assert abs(first - third) > 0.01


def test_fact_30_k1_as_loss_over_the_length_asks_for_longer_completions():
    problem = SEQUENCES["varying"].on_policy()
    lengths = problem.space.mask.sum(-1).double()
    expected = differentiated(problem, lambda p: (p.logp.sum(-1).exp() / lengths).sum())
    loss = lambda p: problem.probability @ (k1(p.logp - p.ref_logp).sum(-1) / lengths)
    for ref_logits in (problem.ref_logits, problem.logits):  # whatever ref is
        EXACT.check_vector(differentiated(replace(problem, ref_logits=ref_logits), loss), expected)
    assert expected.norm() > 0.01


@GIVEN
def test_the_excess_is_an_unbiased_estimate_that_is_never_negative(given):
    divergence, problem = d.named(given), PROBLEMS["bandit"]
    log_ratio = problem.logits.log_softmax(-1) - problem.ref_logits.log_softmax(-1)
    EXACT.check((problem.logits.softmax(-1) * divergence.excess(log_ratio)).sum(-1), token_divergences(problem, given))
    for dtype in (torch.float64, torch.float32):
        for reach in (1e-4, 1.0, 100.0):
            values = divergence.excess(torch.linspace(-reach, reach, 401, dtype=dtype))
            assert bool((values >= -torch.finfo(dtype).eps * min(reach, 1)).all()), (dtype, reach)


@GIVEN
@EVERY_FORM
def test_the_value_of_a_term_estimates_its_divergence_without_bias(form, given):
    choices, definition, ratios = FORMS[form]
    problem, weighting = SEQUENCES["varying"], ImportanceWeighting(ratios[-1], bound=None)
    for estimator in estimators_of(given, form):
        term = KLTerm(divergence=given, estimator=estimator, weighting=weighting, **choices)
        values = term(every_completion(problem, given))._value_per_sequence
        EXACT.check(problem.probability @ values, definition(given)(problem))


@pytest.mark.parametrize("given", [x for x in GENERATORS if x != "total-variation"], ids=name_of)
def test_fact_31_nothing_is_better_than_the_optimum(given):
    """The gradient of the regularised objective vanishes there along the simplex, but where π has lost an outcome."""
    ref = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    reward, beta = torch.tensor([1.0, 0.0, 0.3, -0.2], dtype=torch.float64), 1.5
    pi = optimum(given, ref.log(), reward, beta).exp()
    EXACT.check(pi.sum(), 1.0)
    moved = pi.clone().requires_grad_()
    value = (moved * reward).sum() - beta * (ref * GENERATORS[given](moved / ref)).sum()
    (rise,) = torch.autograd.grad(value, moved)
    OPTIMUM.check(rise - rise.mean(), torch.zeros(4))


def test_fact_31_the_optima_of_the_two_kls_are_the_closed_forms():
    ref = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    reward = torch.tensor([1.0, 0.0, 0.3, -0.2], dtype=torch.float64)
    OPTIMUM.check(optimum("reverse", ref, reward, 0.5), reverse_optimum(ref, reward, 0.5))
    OPTIMUM.check(optimum("forward", ref, reward, 0.5), forward_optimum(ref, reward, 0.5))


def test_fact_31_a_slope_that_is_bounded_below_drops_outcomes():
    ref = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    pi = optimum("chi-square", ref, torch.tensor([10.0, 0.0], dtype=torch.float64), 1.0).exp()
    EXACT.check(pi, torch.tensor([1.0, 0.0]))


def test_fact_31_a_slope_that_jumps_or_is_flat_keeps_the_middle_outcomes():
    """Moving a unit of probability to the best outcome costs at most 2β, by total variation: the nearer ones stay."""
    numbers = lambda *xs: torch.tensor(xs, dtype=torch.float64)
    ref, reward = numbers(0.5, 0.3, 0.2), numbers(1.0, 0.3, 0.0)
    OPTIMUM.check(optimum("total-variation", ref.log(), reward, 0.4).exp(), numbers(0.7, 0.3, 0.0))
    OPTIMUM.check(optimum("total-variation", ref.log(), reward, 0.6).exp(), ref)
    # huber(1/2): the best is beyond the bound, so λ = 1 - β/2; the second has log π/ref = (r - λ)/β, the last 0.
    ref, reward, beta = numbers(0.1, 0.5, 0.4), numbers(1.0, 0.7, 0.0), 0.8
    second = 0.5 * math.exp((0.7 - 0.6) / beta)
    OPTIMUM.check(optimum("huber(0.5)", ref.log(), reward, beta).exp(), numbers(1 - second, second, 0.0))

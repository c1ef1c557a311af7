"""Properties over shapes, masks, dtypes and groups."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from strategies import LOWEST, rollouts
from tolerances import EXACT, SINGLE

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate, kl_report, squared_sequence, zoo as cells
from klgrad.audit.subject import every_term
from klgrad.core.credit import future, leave_one_out, running_sum, to_go, whole
from klgrad.core.importance import prefix_ratio, sequence_ratio, token_ratio
from klgrad.core.result import reduce
from klgrad.core.rollout import DIVERGENCES

OTHERS = [
    KLTerm(divergence=name, level=level, estimator=estimator)
    for name in ("jensen-shannon", "hellinger", "huber(2)")
    for level, estimator in (("token", "sampled"), ("future", "sampled"), ("future", "exact"), ("sequence", "sampled"))
]
TERMS = [*every_term(), *OTHERS]
terms = st.sampled_from(TERMS)


@given(rollouts(), terms)
def test_the_two_shapes_of_the_gradient_are_equal(rollout, term):
    result = term(rollout)
    other = reduce(result.coefficient * rollout.logp, rollout, term.reduction) + result.pathwise
    leaves = (rollout.logp, *(getattr(rollout, name) for name in DIVERGENCES))
    shapes = (torch.autograd.grad(y, leaves, allow_unused=True, retain_graph=True) for y in (result.loss, other))
    for mine, theirs in zip(*shapes, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            EXACT.check(mine, theirs)


@given(rollouts(), terms)
def test_the_loss_has_the_estimate_as_its_value(rollout, term):
    result = term(rollout)
    EXACT.check(result.loss, result.value.mean)


@given(rollouts(gradient=False), terms, st.sampled_from([float("-inf"), float("nan"), float("inf"), -1e30, 5.0]))
def test_nothing_at_a_masked_position_reaches_anything(rollout, term, junk):
    dirty = {k: torch.where(rollout.mask, x, junk) if x.is_floating_point() else x for k, x in vars(rollout).items()}
    dirty["logp"].requires_grad_()
    result = term(Rollout(**dirty))
    EXACT.check(result.loss, term(rollout).loss)
    if result.loss.requires_grad:
        (gradient,) = torch.autograd.grad(result.loss, dirty["logp"])
        assert bool((gradient[~rollout.mask] == 0).all())


@given(rollouts(gradient=False), terms, st.randoms(use_true_random=False))
def test_the_order_of_completions_does_not_matter(rollout, term, random):
    order = list(range(len(rollout.logp)))
    random.shuffle(order)
    fields = {name: x[order] for name, x in vars(rollout).items()}
    EXACT.check(term(Rollout(**fields)).coefficient, term(rollout).coefficient[order])


@given(rollouts(gradient=False))
def test_trailing_padding_does_not_matter(rollout):
    pad = lambda x: torch.nn.functional.pad(x, (0, 3)) if x.ndim == 2 else x
    wide = Rollout(**{name: pad(x) for name, x in vars(rollout).items()})
    for term in TERMS[::7]:
        EXACT.check(term(wide).coefficient[:, :-3], term(rollout).coefficient)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def naive_to_go(x, mask, discount):
    out = torch.zeros_like(x)
    for b in range(len(x)):
        live = [t for t in range(x.shape[1]) if mask[b, t]]
        for i, t in enumerate(live):
            out[b, t] = sum(discount ** (j - i) * x[b, s] for j, s in enumerate(live) if j >= i)
    return out


@given(rollouts(gradient=False), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
@settings(max_examples=50)
def test_credit_is_what_its_sums_say(rollout, discount):
    x, mask = rollout.log_ratio, rollout.mask
    expected = naive_to_go(x, mask, discount)
    EXACT.check(to_go(x, mask, discount), expected)
    with deterministic():  # by another algorithm
        EXACT.check(to_go(x, mask, discount), expected)
        EXACT.check(running_sum(x), x.cumsum(-1))
    EXACT.check(future(x, mask, discount), expected - torch.where(mask, x, 0))
    for b in range(len(x)):
        EXACT.check(whole(x, mask)[b], torch.where(mask[b], x[b][mask[b]].sum(), 0))


@given(rollouts(gradient=False))
@settings(max_examples=50)
def test_leave_one_out_is_the_mean_of_the_others(rollout):
    x = rollout.log_ratio
    for i, g in enumerate(rollout.group):
        others = [j for j in range(len(x)) if j != i and rollout.group[j] == g]
        EXACT.check(leave_one_out(x, rollout.group)[i], x[others].mean(0))
        EXACT.check(leave_one_out(x[:, 0], rollout.group)[i], x[others, 0].mean())


@given(rollouts(low=-2.0, gradient=False))
@settings(max_examples=50)
def test_ratios_are_what_their_products_say(rollout):
    r = (rollout.logp - rollout.behavior_logp).exp()
    EXACT.check(token_ratio(rollout), r)
    EXACT.check(prefix_ratio(rollout), r.cumprod(-1))
    before = ImportanceWeighting("prefix", bound=None).weights(rollout).before
    EXACT.check(before, torch.cat([torch.ones_like(r[:, :1]), r.cumprod(-1)[:, :-1]], -1))
    EXACT.check(sequence_ratio(rollout), r.prod(-1, keepdim=True))


EXTREME = [term for term in TERMS if term.weighting is None or term.weighting.bound is None]


@given(rollouts(low=LOWEST, dtype=torch.float32), st.sampled_from(EXTREME))
def test_forward_and_backward_are_finite_down_to_the_lowest_log_probs(rollout, term):
    result = term(rollout)
    assert bool(torch.isfinite(result.loss))
    assert bool(torch.isfinite(result.coefficient).all())
    if result.loss.requires_grad:
        leaves = (rollout.logp, *(getattr(rollout, name) for name in DIVERGENCES))
        for g in torch.autograd.grad(result.loss, leaves, allow_unused=True):
            assert g is None or bool(torch.isfinite(g).all())


@given(rollouts(low=LOWEST, dtype=torch.float32))
@settings(max_examples=30)
def test_cells_and_reports_are_finite_too(rollout):
    for cell in cells.CELLS.values():
        loss = cell(rollout)
        assert bool(torch.isfinite(loss)), cell.name
        if loss.requires_grad:
            (g,) = torch.autograd.grad(loss, rollout.logp, retain_graph=True)
            assert bool(torch.isfinite(g).all()), cell.name
    assert bool(torch.isfinite(squared_sequence(rollout).loss))
    finite = {k: v for k, v in kl_report(rollout).metrics().items() if not k.endswith("standard_error")}
    assert all(torch.isfinite(torch.tensor(v)) for v in finite.values()), finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(rollout=rollouts(gradient=False), term=terms)
@settings(max_examples=30)
def test_half_precision_is_computed_in_float32(dtype, rollout, term):
    cut = {k: x.to(dtype) if x.is_floating_point() else x for k, x in vars(rollout).items()}
    lifted = {k: x.float() if x.is_floating_point() else x for k, x in cut.items()}
    result = term(Rollout(**cut))
    assert result.loss.dtype == result.coefficient.dtype == torch.float32
    assert torch.equal(result.coefficient, term(Rollout(**lifted)).coefficient)


@given(rollouts(gradient=False), terms)
@settings(max_examples=50)
def test_float32_agrees_with_float64(rollout, term):
    if term.weighting is not None or term.divergence == "forward":
        rollout = replace(rollout, behavior_logp=rollout.logp.detach())
    single = {k: x.float() if x.is_floating_point() else x for k, x in vars(rollout).items()}
    high = term(rollout).coefficient
    error = (term(Rollout(**single)).coefficient - high).abs()
    assert bool((error <= SINGLE.rtol * high.abs().amax() + 1e-4).all())


def trl_form(logp, ref_logp):
    """Ratio times k3 as trainers write it, differentiated by autograd."""
    away = ref_logp - logp
    return ((logp - logp.detach()).exp() * (away.exp() - away - 1)).sum()


def clamped_k3(logp, ref_logp):
    away = ref_logp - logp
    return (away.exp() - away - 1).clamp(-10, 10).sum()


@pytest.mark.parametrize("away", [1.0, 2.7, 5.0, 17.0, 25.0, 90.0, 1000.0])
def test_the_coefficient_survives_where_the_forms_in_use_lose_it(away):
    """float32, log ref/π = away: TRL's form is 0 at 25 and NaN at 90; a clamped k3 is 0 from 2.61 on."""
    logp = torch.tensor([[-0.5 - away]], requires_grad=True)
    ref = torch.tensor([[-0.5]])
    result = KLTerm(level="token")(Rollout(logp, ref, torch.ones(1, 1)))
    (gradient,) = torch.autograd.grad(result.loss, logp)
    SINGLE.check(gradient, -torch.tensor([[away]]))
    (trl,) = torch.autograd.grad(trl_form(logp, ref), logp)
    assert (float(trl) == pytest.approx(-away, rel=0.01)) == (away <= 10)
    if away >= 25:
        assert float(trl) == 0 or float(trl) != float(trl)
    (clamped,) = torch.autograd.grad(clamped_k3(logp, ref), logp)
    assert (float(clamped) == 0 or float(clamped) != float(clamped)) == (away > 2.61)


def test_an_influence_bound_has_no_dead_zone():
    x = torch.linspace(-50, 0, 101)[:, None].requires_grad_()
    result = KLTerm(level="token", influence_bound=2.0)(Rollout(x, torch.full_like(x, -25.0), torch.ones_like(x)))
    assert float(result.coefficient.abs().max()) == 2.0
    assert bool((result.coefficient[x.detach() != -25.0] != 0).all())
    far = (x.detach() + 25.0).abs() > 2
    SINGLE.check(result.diagnostics["influence/share_bounded"], far.float().mean())


def test_truncation_is_counted():
    logp = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    rollout = Rollout(logp, logp, torch.ones(2, 2), behavior_logp=logp - torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    found = KLTerm(level="token", weighting=ImportanceWeighting("token", bound=Truncate(2.0)))(rollout).diagnostics
    assert float(found["ratio/share_bounded"]) == 0.25
    SINGLE.check(found["ratio/max"], torch.e)

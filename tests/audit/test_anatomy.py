"""Each part of a loss is read as it was declared."""

import pytest
import torch

from klgrad import ImportanceWeighting, KLTerm, Truncate
from klgrad.audit import audit, catalogue
from klgrad.audit.anatomy import Bound, read_anatomy
from klgrad.audit.probes import read_curve
from klgrad.audit.subject import as_subject
from klgrad.core.divergences import REVERSE_KL, alpha, huber
from klgrad.testing import assert_descends

TERMS = {
    "token": KLTerm(level="token"),
    "sequence": KLTerm(),
    "k1_k3": KLTerm(estimator="k1_k3"),
    "discount": KLTerm(discount=0.9),
    "forward": KLTerm(divergence="forward", level="token", estimator="k3"),
    "leave-one-out": KLTerm(baseline="leave_one_out"),
    "token mean": KLTerm(level="token", reduction="token"),
    "token ratio": KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None)),
    "prefix ratio": KLTerm(weighting=ImportanceWeighting("prefix", bound=None)),
    "sequence ratio": KLTerm(weighting=ImportanceWeighting("sequence", bound=None)),
    "truncated": KLTerm(level="token", weighting=ImportanceWeighting("token", bound=Truncate(1.2))),
    "huber": KLTerm(level="token", influence_bound=1.0),
}


@pytest.fixture(params=TERMS)
def term(request):
    return TERMS[request.param]


def test_the_parts_of_a_term_are_those_that_it_declares(term):
    parts = read_anatomy(as_subject(term))
    assert parts.shares == {f"{term.divergence}-kl": 1.0}
    assert (parts.own.low, parts.own.high) == (
        (None, None) if term.influence_bound is None else pytest.approx((-term.influence_bound, term.influence_bound))
    )
    assert parts.horizon.kind == ("none" if term.discount == 0 else "all" if term.discount == 1 else "discount")
    assert parts.horizon.discount == (term.discount if 0 < term.discount < 1 else None)
    assert parts.horizon.estimate == ("" if term.discount == 0 else "k3" if term.estimator == "k1_k3" else "k1")
    assert parts.unit.name == ("sum" if term.reduction == "sequence" else "token-mean")
    assert parts.samples.ratio == ("none" if term.weighting is None else term.weighting.ratio)
    bound = None if term.weighting is None else term.weighting.bound
    assert parts.samples.bound == (None if bound is None else Bound("truncate", None, bound.high))
    assert parts.baseline.name == term.baseline.replace("_", "-")
    assert (parts.constant, parts.has_past, parts.proved) == (0.0, False, True)


CELLS = {
    # own curve, its edges, horizon and estimate, unit, constant
    "k1-loss": ({}, None, "none", "", "sum", 1.0),
    "k3-loss-clamped": ({"forward-kl": 1.0}, (-2.610869, 10.999983), "none", "", "sum", 0.0),
    "abs-loss": ({"total-variation": 1.0}, None, "none", "", "sum", 0.0),
    "k-half-loss": ({"forward-kl": 0.5}, None, "none", "", "sum", 0.5),
    "k2-loss-length-mean": ({"reverse-kl": 1.0}, None, "none", "", "completion-mean", 0.0),
    "k2-loss-token-mean": ({"reverse-kl": 1.0}, None, "none", "", "token-mean", 0.0),
    "ratio-k2-loss": ({"reverse-kl": 1.0, "k2": 1.0}, None, "none", "", "sum", 0.0),
    "k3-reward": ({"k3": 1.0}, None, "all", "k3", "sum", 0.0),
    "k3-both-half": ({"reverse-kl": 0.5}, None, "all", "k3", "sum", 0.0),
    "k1-reward-group-mean": ({"reverse-kl": 1.0}, None, "all", "k1", "sum", 0.0),
}


@pytest.mark.parametrize("name", CELLS)
def test_the_parts_of_a_loss_of_the_zoo(name):
    shares, edges, horizon, estimate, unit, constant = CELLS[name]
    parts = read_anatomy(catalogue()[name])
    assert parts.own.shares == pytest.approx(shares)
    assert parts.proved
    assert (parts.own.low, parts.own.high) == ((None, None) if edges is None else pytest.approx(edges, abs=1e-6))
    assert (parts.horizon.kind, parts.horizon.estimate) == (horizon, estimate)
    assert (parts.unit.name, parts.constant) == (unit, constant)


def test_a_curve_that_is_no_known_function_keeps_its_points():
    curve = read_curve(lambda x: torch.tanh(x) ** 3)
    assert curve.shares == {}
    at = torch.tensor([-1.95, 0.35], dtype=torch.float64)
    assert curve(at).tolist() == pytest.approx((torch.tanh(at) ** 3).tolist())


def test_the_scale_of_a_curve_is_its_slope_at_the_reference():
    assert read_curve(lambda x: 3 * REVERSE_KL.slope(x)).scale == pytest.approx(3)
    assert read_curve(huber(0.5).slope).scale == pytest.approx(1)
    assert read_curve(alpha(-1.0).slope).scale == pytest.approx(1, rel=0.01)  # between points, by interpolation


def test_the_parts_in_json():
    found = audit(catalogue()["k3-loss-clamped"]).to_dict()["anatomy"]
    assert found["divergence"] | {"convex": False} == found["divergence"]
    assert (found["divergence"]["name"], found["divergence"]["scale"], found["divergence"]["level"]) == (
        "forward-kl",
        1.0,
        "token",
    )
    assert found["horizon"] == {"kind": "none", "discount": None, "weights": [], "estimate": None}
    assert (found["samples"]["ratio"], found["samples"]["bound"]) == ("none", None)
    assert (found["unit"], found["baseline"], found["divided_by_spread"]) == ("sum", "none", False)
    assert (found["constant"], found["entropy"], found["additive"], found["masked_tokens_leak"]) == (
        0.0,
        0.0,
        True,
        False,
    )
    assert found["proved"]
    assert found["unexplained"] < 1e-9


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (
            lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2 * (logp.detach().exp() < 0.6),
            "the probability of the token itself",
        ),
        (lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2 * (len(logp) % 2 == 0), "the number of completions"),
        (
            lambda logp, ref_logp: (logp - ref_logp) ** 2 * (torch.arange(logp.shape[1]) == 0),
            "the position of the token",
        ),
        (
            lambda logp, ref_logp: (logp - ref_logp)[: (len(logp) + 1) // 2].square().mean(),
            "the order of the completions in the batch",
        ),
    ],
)
def test_what_else_a_coefficient_depends_on(loss, cause):
    parts = audit(loss).anatomy
    assert not parts.proved
    assert cause in parts.matters


def test_an_expected_scale_is_a_part():
    assert_descends("k2-loss", "divergence=reverse-kl,horizon=none,scale=1")
    with pytest.raises(AssertionError, match="scale=2"):
        assert_descends("k2-loss", "scale=2")


def test_a_loss_that_is_not_proved_meets_no_expectation():
    with pytest.raises(AssertionError, match="not proved"):
        assert_descends(lambda logp, ref_logp: (logp - ref_logp) ** 2 * (logp.detach() < -0.5), "divergence=reverse-kl")

"""Values and slopes of the estimators."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from tolerances import EXACT, Tol

from klgrad.core.estimators import MAX_EXPONENT, forward_k3, k1, k2, k3, k_lambda

NAIVE = {
    k1: lambda l: l,
    k2: lambda l: l**2 / 2,
    k3: lambda l: torch.exp(-l) - 1 + l,
    k_lambda(0.3): lambda l: l + 0.3 * (torch.exp(-l) - 1),
    forward_k3: lambda l: torch.exp(-l) * -l - torch.exp(-l) + 1,
}
SERIES = Tol(2e-5, 1e-40, "float32 rounds expm1(x) - x at 0.01 to eps / 0.01; squares below 1e-38 underflow")


@pytest.mark.parametrize("estimator", NAIVE, ids=repr)
@given(x=st.floats(-30, 30).filter(lambda x: abs(x) > 0.05))
def test_value_and_slope_are_those_of_the_formula(estimator, x):
    l = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    naive = NAIVE[estimator](l)
    EXACT.check(estimator.value(l.detach()), naive)
    (slope,) = torch.autograd.grad(naive, l)
    EXACT.check(estimator.slope(l.detach()), slope)
    (mine,) = torch.autograd.grad(estimator(l), l)
    EXACT.check(mine, slope)


@given(x=st.floats(-0.1, 0.1))
def test_k3_keeps_its_digits_near_zero(x):
    """In float32 the plain formula loses them: at l = 1e-4 it is off by more than a tenth."""
    single = torch.tensor(x, dtype=torch.float32)
    # A series long enough for |x| <= 0.1: its next term is x^12/12!.
    exact = sum((-single.double()) ** n / math.factorial(n) for n in range(2, 12))
    SERIES.check(k3.value(single), exact)


def test_the_plain_formula_would_have_lost_them():
    l = torch.tensor(1e-4)
    plain = torch.exp(-l) - 1 + l
    assert abs(float(plain) / 5e-9 - 1) > 0.1
    assert float(k3.value(l)) == pytest.approx(5e-9, rel=1e-3)


@pytest.mark.parametrize("estimator", NAIVE, ids=repr)
def test_beyond_the_cap_values_saturate_and_keep_their_sign(estimator):
    for dtype in (torch.float32, torch.float64):
        l = torch.tensor([-1e4, -100.0, 100.0, 1e4], dtype=dtype)
        for x in (estimator.value(l), estimator.slope(l)):
            assert bool(torch.isfinite(x).all())
    assert float(k3.slope(torch.tensor(-1e4))) == pytest.approx(-torch.tensor(MAX_EXPONENT).exp().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("estimator", NAIVE, ids=repr)
def test_half_precision_is_converted_to_float32(estimator, dtype):
    l = torch.tensor([-12.0, 0.25, 12.0], dtype=dtype, requires_grad=True)
    assert torch.equal(estimator.value(l.detach()), estimator.value(l.detach().float()))
    (gradient,) = torch.autograd.grad(estimator(l).sum(), l)
    assert bool(torch.isfinite(gradient[1:]).all())


@given(x=st.floats(-60, 60))
def test_k3_and_forward_k3_are_never_negative(x):
    for dtype in (torch.float32, torch.float64):
        l = torch.tensor(x, dtype=dtype)
        assert k3.value(l) >= 0
        assert forward_k3.value(l) >= 0

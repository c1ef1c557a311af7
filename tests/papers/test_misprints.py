"""The misprints of docs/papers.md: as printed they fail, as corrected they hold, summed over every outcome."""

from pathlib import Path

import torch
from tolerances import EXACT

from klgrad.core.estimators import k2, k3, k_lambda
from klgrad.papers.study import studies

GENERATOR = torch.Generator().manual_seed(7)
LOGITS, REF_LOGITS, REWARD = torch.randn(3, 6, generator=GENERATOR, dtype=torch.float64)
LOGP, REF_LOGP = torch.log_softmax(LOGITS, -1), torch.log_softmax(REF_LOGITS, -1)
P, REF = LOGP.exp(), REF_LOGP.exp()
SCORES = torch.eye(6, dtype=torch.float64) - P
"""Row y: ∇log π(y) over the logits."""

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"


def gradient(of):
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(of(torch.log_softmax(logits, -1)), logits)[0]


def forward_kl(logp):
    return (REF * (REF_LOGP - logp)).sum()


def reverse_kl(logp):
    return (logp.exp() * (logp - REF_LOGP)).sum()


def test_the_control_variate_is_ref_over_pi_minus_1():
    EXACT.check((P * (REF / P - 1)).sum(), 0.0)
    chi_square = ((P - REF).square() / REF).sum()
    EXACT.check((P * (1 - P / REF)).sum(), -chi_square)
    assert chi_square > 0.1


def test_a_loss_is_the_estimate_and_not_its_negative():
    descended = gradient(lambda logp: (P * k2(logp - REF_LOGP)).sum())
    EXACT.check(descended, gradient(reverse_kl))


def test_the_lambda_formula_has_a_gradient_on_its_right_side():
    for lam in (0.5, 2.0):
        found = gradient(lambda logp, lam=lam: (P * k_lambda(lam)(logp - REF_LOGP)).sum())
        EXACT.check(found, lam * gradient(forward_kl))


def test_the_step_c_of_appendix_a_has_one_minus():
    found = gradient(lambda logp: (P * k3(logp - REF_LOGP)).sum())
    EXACT.check(found, -(REF[:, None] * SCORES).sum(0))
    EXACT.check(found, gradient(forward_kl))
    printed = -(REF[:, None] * -SCORES).sum(0)
    EXACT.check(printed, -found)
    assert found.norm() > 0.1


def test_the_objective_is_a_constant_minus_beta_times_the_kl_to_the_optimum():
    beta = 0.3
    optimum = torch.log_softmax(REF_LOGP + REWARD / beta, -1)
    objective = lambda logp: (logp.exp() * REWARD).sum() - beta * (logp.exp() * (logp - REF_LOGP)).sum()
    distance = lambda logp: (logp.exp() * (logp - optimum)).sum()
    EXACT.check(objective(LOGP) + beta * distance(LOGP), objective(REF_LOGP) + beta * distance(REF_LOGP))
    assert abs(objective(LOGP) + distance(LOGP) - objective(REF_LOGP) - distance(REF_LOGP)) > 0.1


def test_the_page_names_tests_and_studies_that_exist():
    """Each row ends with what shows it: `tests/...::name`, a name of this file, or a study."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and "::" in line]
    root = PAGE.parents[1]
    named = [name.strip("`, ") for row in rows for name in row.split("|")[-2].split(", ")]
    assert len(rows) >= 5
    for name in named:
        if "::" in name:
            path, _, test = name.partition("::")
            assert f"def {test}(" in (root / path).read_text(encoding="utf-8"), name
        else:
            assert name in studies(), name

"""Every docstring that claims a gradient, held against the audit."""

import re

import pytest
from claims.docstrings import as_a_loss, gradient_section, on_and_off_policy
from tolerances import EXACT

from klgrad import ImportanceWeighting, KLTerm, squared_sequence, zoo as cells
from klgrad.audit import audit, catalogue
from klgrad.audit.subject import every_term
from klgrad.core.estimators import Estimator, forward_k3, k1, k2, k3, k_lambda
from klgrad.core.result import reduce
from klgrad.targets import Descends

TERMS = {term.name: term for term in every_term()}
NO_VERDICT = ("nothing", "sum-of-targets", "unknown")


def hold(result, on_policy, off_policy, scale, holds="always"):
    assert (result.verdict, result.verdict_off_policy) == (on_policy, off_policy), str(result.advice)
    assert result.holds == (None if on_policy == "unknown" else holds)
    assert result.anatomy.proved
    if scale is not None and on_policy not in NO_VERDICT:
        EXACT.check(result.scale, scale)


@pytest.mark.parametrize("cell", cells.CELLS.values(), ids=cells.CELLS)
def test_cell(cell):
    claim = on_and_off_policy(cell.doc)
    hold(audit(cell), *claim)


@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS)
def test_term(term):
    over_tokens = term.reduction == "token"  # its scale is one over the mean length
    scale, holds = (None, "large-batches") if over_tokens else (1.0, "always")
    hold(audit(term), term.descends.on_policy, term.descends.off_policy, scale, holds)


def test_squared_sequence():
    claim = on_and_off_policy(squared_sequence.__doc__ or "")
    hold(audit(catalogue()["squared-sequence"]), *claim)


@pytest.mark.parametrize("estimator", [k1, k2, k3, k_lambda(0.25), forward_k3], ids=repr)
def test_estimator(estimator: Estimator):
    loss = lambda r: reduce(estimator(r.logp - r.ref_logp), r, "sequence")
    cell = cells.Cell(repr(estimator), loss, Descends("unknown", "unknown"), None, couples_groups=False)
    result = audit(cell)
    assert result.verdict == as_a_loss(estimator.__doc__ or "")
    if estimator.__name__ == "k_lambda(0.25)":
        EXACT.check(result.scale or 0.0, 0.25)


def test_the_docstring_of_klterm_says_what_its_configurations_descend():
    text = gradient_section(KLTerm.__doc__ or "")
    claimed = re.findall(r"(reverse|forward), (token|sequence): `([a-z-]+)`", text)
    assert len(claimed) == 4
    for divergence, level, verdict in claimed:
        estimator = "k1" if divergence == "reverse" else "k3"
        assert KLTerm(divergence=divergence, level=level, estimator=estimator).descends.on_policy == verdict
    assert "with the token ratio off-policy `reverse-kl-token-sampler`" in text
    assert (
        KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None)).descends.off_policy
        == "reverse-kl-token-sampler"
    )
    assert "`descends` says `unknown`" in text
    assert KLTerm(discount=0.5).descends == ("unknown", "unknown")
    assert 'With reduction="token" and varying lengths it is that of the target in the limit of large batches' in text
    assert KLTerm(reduction="token").descends == KLTerm().descends


def test_every_configuration_has_its_own_name():
    terms = list(every_term())
    assert len({term.name for term in terms}) == len(terms) >= 50


def test_a_claim_that_drifts_fails():
    drifted = (cells.get("k3-loss").doc).replace("forward-kl-token", "reverse-kl-token")
    with pytest.raises(AssertionError, match="Descends the forward KL, token by token"):
        hold(audit(cells.get("k3-loss")), *on_and_off_policy(drifted))

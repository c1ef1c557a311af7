"""`assert_descends` passes and fails as `klgrad audit --expect` does, and says why."""

import pickle
from contextlib import nullcontext

import pytest
import torch
from typer.testing import CliRunner

from klgrad import KLTerm
from klgrad.audit import audit
from klgrad.audit.advice import OFF_POLICY, ON_POLICY, STALE
from klgrad.cli import app
from klgrad.errors import LossCallError, UnknownNameError, VerdictError
from klgrad.testing import assert_descends

FILE = """
def penalty(logp, ref_logp, beta):
    return beta * (logp - ref_logp) ** 2
"""


class K2(torch.nn.Module):
    def forward(self, log_prob, ref_log_prob):
        return (log_prob - ref_log_prob) ** 2 / 2


@pytest.fixture(autouse=True, scope="module")
def audited_once():
    """Audit each cell once: the audit itself is tested elsewhere."""
    known = {}

    def once(subject, **options):
        key = (subject.name, *options.values())
        if subject.kind != "cell" or key not in known:
            known[key] = audit(subject, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("klgrad.testing.audit", once)
        yield


@pytest.mark.parametrize("loss", [K2, KLTerm(level="token"), "k2-loss"], ids=["class", "term", "name"])
def test_every_form_of_a_loss(loss):
    assert assert_descends(loss, "reverse-kl-token").verdict == "reverse-kl-token"


def test_a_loss_in_a_file_with_settings(tmp_path):
    (tmp_path / "own_penalty.py").write_text(FILE)
    spec = f"{tmp_path}/own_penalty.py:penalty"
    error = message(spec, "reverse-kl-token", settings={"beta": -1})
    assert error.expected == f"reverse-kl-token on-policy from {spec}"
    assert error.received.startswith("climbs reverse-kl-token: it climbs")
    # A loss that can be repaired is repaired first.
    assert error.remedy == (
        "return the quantity to minimise. For reverse-kl-token on-policy, use KLTerm(level='token') instead."
    )
    with pytest.raises(LossCallError, match="beta"):
        assert_descends(spec, "reverse-kl-token")


def message(*arguments, **options):
    with pytest.raises(VerdictError) as failed:
        assert_descends(*arguments, **options)
    return failed.value


def test_the_message_has_the_explanation_of_the_audit():
    error = message("k3-loss", "reverse-kl-token")
    assert error.expected == "reverse-kl-token on-policy from k3-loss"
    assert error.received.startswith("forward-kl-token: it descends the forward KL, token by token; on stale samples: ")
    assert error.remedy == "for reverse-kl-token on-policy, use KLTerm(level='token') instead."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # xdist sends it to another process


def test_the_remedy_is_for_what_was_expected_and_not_for_the_reverse_kl():
    assert "use KLTerm() instead" in message("k3-loss", "reverse-kl-sequence").remedy
    assert "KLTerm(divergence='forward', level='token'" in message("k2-loss", "forward-kl-token").remedy
    assert message("k2-loss", "nothing").remedy == "change the loss, or what is expected of it"  # the audit has none


def test_off_policy():
    assert_descends("ratio-k3-loss", "reverse-kl-token", off_policy="reverse-kl-token-sampler")
    error = message("ratio-k3-loss", "reverse-kl-token", off_policy="reverse-kl-token")
    assert error.expected == "reverse-kl-token off-policy from ratio-k3-loss"
    assert "ImportanceWeighting('prefix', bound=None)" in error.remedy
    both = message("ratio-k3-loss", "nothing", off_policy="nothing")
    assert both.expected.startswith("nothing on-policy and nothing off-policy from")
    assert both.received.startswith("reverse-kl-token and reverse-kl-token-sampler: it")


def test_strict_and_parts():
    assert_descends("k2-loss-token-mean", "reverse-kl-token")
    error = message("k2-loss-token-mean", "reverse-kl-token", strict=True)
    assert error.expected == "a verdict that holds in batches of every size from k2-loss-token-mean"
    assert error.received.startswith("reverse-kl-token in large batches only: it")
    assert error.remedy.endswith("or leave out strict")
    assert message("k3-loss-clamped", "unknown", strict=True).expected.startswith("a finite gradient without")
    assert_descends("k2-loss-length-mean", "divergence=reverse-kl,horizon=none,unit=completion-mean")
    assert message("k2-loss-length-mean", "reverse-kl-token").received.startswith("unknown: it")


def test_an_unknown_name_is_an_error_and_no_failure():
    assert not issubclass(UnknownNameError, AssertionError)
    with pytest.raises(UnknownNameError, match="did you mean 'reverse-kl-token'"):
        assert_descends("k2-loss", "reverse-kl-tokens")
    with pytest.raises(UnknownNameError, match="did you mean 'k2-loss'"):
        assert_descends("k2-los", "nothing")


# On-policy squared-token and reverse-kl-token are one.
@pytest.mark.parametrize(("verdict", "status"), [("squared-token", 0), ("reverse-kl-sequence", 1)])
def test_it_agrees_with_the_command(verdict, status):
    assert CliRunner().invoke(app, ["audit", "k2-loss", "--expect", verdict]).exit_code == status
    with pytest.raises(VerdictError) if status else nullcontext():
        assert_descends("k2-loss", verdict)


class RunningMean:
    """Keeps state between calls; the sums alone would be those of the reverse KL."""

    def __init__(self):
        self.mean = 0.0

    def __call__(self, logp, ref_logp, mask):
        k = ((logp - ref_logp).detach() * mask).sum(-1)
        out = ((k - self.mean) * (logp * mask).sum(-1)).mean()
        self.mean = 0.9 * self.mean + 0.1 * float(k.mean())
        return out


@pytest.mark.slow
def test_a_loss_that_is_not_deterministic_never_passes(monkeypatch):
    result = audit(RunningMean())
    assert result.verdict == result.verdict_off_policy == "unknown"
    assert result.holds is result.holds_off_policy is None
    monkeypatch.setattr("klgrad.testing.audit", lambda *_, **__: result)
    monkeypatch.setattr("klgrad.audit.audit", lambda *_, **__: result)
    status = lambda *options: CliRunner().invoke(app, ["audit", "k2-loss", *options]).exit_code
    for verdict in ("reverse-kl-sequence", "unknown"):
        error = message(RunningMean(), verdict)
        assert error.received.startswith("none, since the same batch gives different gradients: it ")
        assert status("--expect", verdict) == 1
    assert (status("--strict"), status()) == (1, 0)


@pytest.mark.parametrize("verdict", ON_POLICY)
def test_the_recommended_terms_have_the_verdict(verdict):
    fresh, stale = audit(ON_POLICY[verdict]), audit(STALE[verdict])
    assert (fresh.verdict, stale.verdict, stale.verdict_off_policy) == (verdict, verdict, verdict)


def test_the_terms_for_stale_samples_are_recommended_off_policy():
    assert STALE.items() <= OFF_POLICY.items()
    assert all(audit(OFF_POLICY[name]).verdict_off_policy == name for name in OFF_POLICY.keys() - STALE.keys())

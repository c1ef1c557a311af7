"""The wider problems: each exists for a fault that the standard ones let pass."""

from dataclasses import replace

import pytest
import torch
from tolerances import EXACT

from klgrad import KLTerm
from klgrad.audit import audit, catalogue
from klgrad.audit.advice import in_words, listed
from klgrad.audit.gradients import expected_gradient
from klgrad.audit.match import MATCH
from klgrad.audit.problems import LONG, MANY, WIDE, cases
from klgrad.audit.procedure import _compare
from klgrad.audit.subject import Subject, as_subject


def audited(loss, **settings):
    """The losses here treat the rows of a group alike, which saves calls."""
    return audit(replace(as_subject(loss, "fault"), exchangeable=True), **settings)


def scored(coefficient, logp, mask):
    """The surrogate loss that puts these coefficients on the scores."""
    return (coefficient.detach() * logp * mask).sum() / len(logp)


def credit_of(tokens):
    """Each token is credited with its own log-ratio and those of the next ones, `tokens` in all."""

    def loss(logp, ref_logp, mask):
        l = (logp - ref_logp) * mask
        ahead = [torch.nn.functional.pad(l[:, k:], (0, min(k, l.shape[1]))) for k in range(tokens)]
        return scored(torch.stack(ahead).sum(0), logp, mask)

    return loss


def flips_below(bound):
    def loss(logp, ref_logp, mask):
        l = logp - ref_logp
        return scored(torch.where(l < bound, -l, l), logp, mask)

    return loss


def bounded_by(bound):
    return lambda logp, ref_logp, mask: scored((logp - ref_logp).clamp(-bound, bound), logp, mask)


def baseline_up_to(rows):
    """Leave-one-out in groups of up to so many rows; in larger ones the median, the row itself included."""

    def loss(logp, ref_logp, mask):
        total = ((logp - ref_logp) * mask).sum(-1)
        n = len(total)
        baseline = (total.sum() - total) / (n - 1) if n <= rows else total.median()
        return scored((total - baseline)[:, None], logp, mask)

    return loss


FAULTS = {
    "credit of 3 tokens": (credit_of(3), "reverse-kl-sequence", [f"completions of {LONG} tokens"]),
    "credit of 4 tokens": (credit_of(4), "reverse-kl-sequence", [f"completions of {LONG} tokens"]),
    "a sign that flips below -6": (flips_below(-6.0), "reverse-kl-token", ["log-ratios of -12"]),
    "a sign that flips below -11": (flips_below(-11.0), "reverse-kl-token", ["log-ratios of -12"]),
    "bounded by 6": (bounded_by(6.0), "reverse-kl-token", ["log-ratios of +12", "log-ratios of -12"]),
    "bounded by 8": (bounded_by(8.0), "reverse-kl-token", ["log-ratios of +12", "log-ratios of -12"]),
    "bounded by 11": (bounded_by(11.0), "reverse-kl-token", ["log-ratios of +12", "log-ratios of -12"]),
    "a baseline for 3 rows": (baseline_up_to(3), "reverse-kl-sequence", [f"groups of {MANY}"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_the_standard_problems_let_pass_is_found(fault):
    loss, seems, wider = FAULTS[fault]
    result = audited(loss)
    assert result.verdict_standard == seems
    assert (result.verdict, result.off_with) == ("unknown", wider)
    assert result.bias[result.nearest] > MATCH
    assert not result.length_sensitive
    assert f"but not with {wider[0]}" in str(result.advice)
    assert in_words(result).endswith(f"but not with {listed(wider)}")


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["all", "equal"])
@pytest.mark.parametrize("bound", [LONG, WIDE + 1, MANY])
def test_the_same_without_its_fault_is_sound(bound, lengths):
    """The faults above, moved to where the problems do not reach."""
    made, verdict = {
        LONG: (credit_of(LONG), "reverse-kl-sequence"),
        WIDE + 1: (bounded_by(WIDE + 1), "reverse-kl-token"),
        MANY: (baseline_up_to(MANY), "reverse-kl-sequence"),
    }[bound]
    result = audited(made, lengths=lengths)
    assert (result.verdict, result.off_with) == (verdict, [])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["credit of 4 tokens", "bounded by 8", "a baseline for 3 rows"])
def test_at_equal_lengths_alone_it_is_found_too(fault):
    loss, seems, wider = FAULTS[fault]
    result = audited(loss, lengths="equal")
    assert (result.verdict, result.verdict_standard, result.off_with) == ("unknown", seems, wider)


def test_a_bound_and_a_mean_over_tokens_are_two_faults():
    """Neither hides the other: at equal lengths there is no verdict, since the bound is still there."""

    def loss(logp, ref_logp, mask):
        return scored((logp - ref_logp).clamp(-8, 8), logp, mask) * len(logp) / mask.sum()

    result = audited(loss)
    assert (result.verdict, result.verdict_fixed_lengths) == ("unknown", "unknown")
    assert result.length_sensitive
    assert result.off_with == ["log-ratios of +12", "log-ratios of -12"]


def test_large_log_ratios_are_reached_on_both_sides():
    for on_policy in (True, False):
        reached = [c.problem.logp - c.problem.ref_logp for c in cases(on_policy) if "log-ratios" in c.wider]
        assert len(reached) == 2
        assert float(reached[0].max()) > WIDE
        assert float(reached[1].min()) < -WIDE


def test_off_policy_the_large_log_ratios_come_without_large_importance_ratios():
    for case in cases(on_policy=False):
        if case.wider.startswith("log-ratios"):
            ratio = (case.problem.logp - case.problem.behavior_logp).sum(-1).exp()
            assert float(ratio.min()) > 0.05
            assert float(ratio.max()) < 20


@pytest.mark.parametrize("lengths", ["all", "equal"])
def test_the_lengths_and_group_sizes_are_reached(lengths):
    problems = cases(on_policy=True, lengths=lengths)
    assert max(int(c.problem.space.mask.sum(-1).max()) for c in problems) == LONG
    assert max(c.group_size for c in problems) == MANY
    assert lengths == "all" or not any(c.varying for c in problems)


@pytest.mark.slow
def test_a_loss_that_computes_in_float32_keeps_its_verdict_with_room_to_spare():
    """Its error must stay well below the bias that counts as none, on every problem by itself."""

    def loss(logp, ref_logp, mask):
        away = ref_logp.float() - logp.float()
        return (away.exp() - 1 - away) * mask

    for target in (loss, lambda logp, ref_logp, mask: 0.5 * (logp.float() - ref_logp.float()) ** 2 * mask):
        for lengths in ("all", "equal"):
            subject = replace(as_subject(target, "float32"), exchangeable=True)
            found = _compare(subject, "zero", lengths, on_policy=True).small
            assert found.verdict != "unknown"
            assert found.worst[found.nearest] < MATCH / 10


def test_numbers_are_averages_over_the_standard_problems():
    """They stay what they are when a wider problem is added; the scale is known for every shape."""
    result = audit(KLTerm(baseline="leave_one_out"))
    found = _compare(as_subject(KLTerm(baseline="leave_one_out")), "zero", "all", on_policy=True).small
    standard = [m for m in found.measured if not m.case.wider]
    assert len(standard) == 8
    EXACT.check(result.variance, sum(m.gradient.deviation**2 for m in standard) / 8)
    assert {"2 x 5, varying", "4 x 2, varying"} < set(result.scale_by_shape)


def test_rows_that_may_change_places_give_the_same_in_any_order():
    """What is declared of this package's own losses that are called group by group, held to all orders."""
    exchangeable = [s for s in catalogue().values() if s.exchangeable]
    assert len(exchangeable) >= 4
    case = next(c for c in cases(on_policy=False) if c.group_size == MANY)
    none = torch.zeros(len(case.problem.space)).double()
    for subject in exchangeable:
        ordered = Subject(subject.name, subject.kind, subject.loss)
        a, b = (expected_gradient(s, case.problem, MANY, none) for s in (subject, ordered))
        EXACT.check(a.mean, b.mean)
        EXACT.check(a.deviation, b.deviation)

"""Every sentence of a report is the gradient that it names, by sums over all outcomes (`statements`)."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import statements

from klgrad.audit import audit, catalogue
from klgrad.audit.advice import rows as report
from klgrad.audit.batch import DISTANCES, Case, advantage_of, from_problem
from klgrad.audit.sentences import summary
from klgrad.audit.subject import COMMON, as_subject, of_reference, sum_over_rows
from klgrad.enumeration import autoregressive, population, with_rational_sampler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "hunt"))

import compositions  # pyright: ignore[reportMissingImports]

SHAPES = ((3, 2, True, 4, 11), (2, 3, True, 2, 12), (3, 2, False, 4, 13))
"""Vocabulary, length, ends, parts and seed of problems that the audit does not have."""


@cache
def problems(fresh):
    found = []
    for (vocab, length, ends, parts, seed), distance in ((s, d) for s in SHAPES for d in DISTANCES):
        from_ref, off_policy = DISTANCES[distance]
        drawn = autoregressive(vocab, length, ends=ends, seed=seed, away_from_ref=from_ref, off_policy=off_policy)
        sampler = with_rational_sampler(drawn.on_policy(), parts, on_policy=True)
        logits = sampler.logits if fresh else sampler.logits + drawn.logits - drawn.behavior_logits
        moved = replace(sampler, logits=logits, ref_logits=logits + drawn.ref_logits - drawn.logits)
        found.append(Case(distance, moved, 2, ends, parts=parts))
    return found


@cache
def measured(subject, fresh):
    found = []
    for case in problems(fresh):
        assert case.parts is not None
        rows = case.parts ** (2 * case.problem.space.length) * 2
        members = population(case.problem, case.group_size, case.parts)
        batch = from_problem(case.problem, members, advantage_of(case.problem, "zero"))
        gradient = sum_over_rows(case.problem, members, of_reference(subject.large(), batch))
        found.append((statements.World(case.problem), rows, gradient))
    return found


def false_statements(subject, rows, stale, *, allowed=1e-6):
    """The sentences of a report that a problem contradicts."""
    words, found = statements.Report(rows), []
    for fresh, sentence in ((True, rows[0][1]), (False, stale)):
        for world, size, gradient in measured(subject, fresh):
            words.columns = world.mask.shape[1]
            claim = (
                statements.fresh_claim(words, world, size)
                if fresh
                else statements.stale_claim(words, stale, world, size)
            )
            why = statements.contradiction(words, claim, gradient.mean, gradient.typical, allowed)
            if why is not None:
                found.append(f"{sentence}: {why}")
    return found


def check(subject):
    result = audit(subject)
    a = result.anatomy
    if not a.proved:
        return
    stale = summary(a, on_policy=False)
    assert false_statements(subject, report(result), stale, allowed=max(1e-6, a.allowed / 10)) == []


@pytest.mark.parametrize("name", COMMON)
def test_the_words_about_a_common_loss(name):
    check(catalogue()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in catalogue() if name not in COMMON])
def test_the_words_about_a_loss_of_the_catalogue(name):
    check(catalogue()[name])


@pytest.mark.parametrize(
    ("name", "row", "text"),
    [
        ("k3-loss", "divergence", "reverse KL, KL(π‖ref)"),
        ("k3-loss", "divergence", "climbs the forward KL, KL(ref‖π); the sign is wrong"),
        ("k2-loss", "looks ahead", "to the end of the completion, by k1"),
        ("k1-reward", "looks ahead", "discounted by 0.9 a token, by k1"),
        ("k2-loss-length-mean", "unit", "summed over the completion, averaged over completions"),
        ("k2-loss", "scale", "0.5 x the pull of KL(π‖ref) near ref"),
        ("k3-loss-clamped", "divergence", "forward KL, KL(ref‖π)"),
    ],
)
def test_a_false_word_is_recognised(name, row, text):
    subject = catalogue()[name]
    result = audit(subject)
    a = result.anatomy
    rows = [(label, text if label == row else words) for label, words in report(result)]
    assert false_statements(subject, rows, summary(a, on_policy=False))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # The future of k3 in reward and loss is none of the mean of a square.
        ("k3-both", "the mean of L²/2 under the sampler, L = log π/ref of the completion"),
        ("k3-loss-clamped", "the mean of k3 under the sampler"),
        ("k1-loss", "nothing"),
        ("k2-loss", "the same on the sampler's prefixes"),
        ("ratio-k3-loss", "the same"),
        ("k1-reward-leave-one-out", "the mean of L²/2 under the sampler, L = log π/ref of the completion"),
    ],
)
def test_a_false_word_about_stale_samples_is_recognised(name, text):
    subject = catalogue()[name]
    assert false_statements(subject, report(audit(subject)), text)


@pytest.mark.many
@pytest.mark.parametrize("number", range(300))
def test_the_words_about_a_composed_loss(number):
    check(as_subject(compositions.composed(compositions.draw(12, number)), f"loss {number}"))

"""95% intervals contain the true KL about as often as they claim, also with few prompts; and where they do not."""

import math

import pytest
from interval_coverage import BATCHES, GROUPS, TERMS, UNITS, shares_covered
from some import first

AT_LEAST = 0.93
"""What 95% intervals must cover with a dozen prompts or more."""

SKEWED = 0.92
"""The same where prompts differ much in their KL and in their number of completions: a sum of few skewed terms."""

HEAVY_TAIL = 0.80
"""Above the coverage of k3's intervals where ref prefers tokens that the policy rarely draws: no batch has them."""

Z = 3.0
"""Standard errors of a simulated share that it may be off: one in 700."""


def deviation(share, threshold):
    """By how many standard errors a share of the batches is above a threshold."""
    return (share - threshold) / math.sqrt(threshold * (1 - threshold) / BATCHES)


def threshold(name, groups):
    return SKEWED if "1 to 8" in groups and "k1" not in name else AT_LEAST


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("groups", ["16 prompts x 8", "16 prompts, 1 to 8 each"])
@pytest.mark.parametrize("name", first(TERMS, 1))
def test_intervals_of_16_prompts_cover_what_they_claim(name, groups, unit):
    student, _ = shares_covered(TERMS[name], GROUPS[groups], unit)
    assert deviation(student, threshold(name, groups)) > -Z, f"{student:.3f}"
    assert deviation(student, 0.95) < Z, f"{student:.3f}: wider than necessary"


@pytest.mark.parametrize("unit", UNITS)
def test_with_4_prompts_only_student_covers_what_it_claims(unit):
    student, normal = shares_covered(TERMS["k1"], GROUPS["4 prompts x 8"], unit)
    assert deviation(student, AT_LEAST) > -Z, f"{student:.3f}"
    assert deviation(normal, AT_LEAST) < -Z, f"{normal:.3f}: the test could not distinguish the two"


@pytest.mark.slow
@pytest.mark.parametrize("unit", first(UNITS, 1))
def test_a_heavy_tail_of_k3_is_not_covered_and_k1_and_exact_are(unit):
    """As the documentation says: with a sharp policy use k1 or the exact KL."""
    covered = {
        name: shares_covered(TERMS[name], GROUPS["16 prompts x 8"], unit, "sharp")[0] for name in ("k1", "k3", "exact")
    }
    assert deviation(covered["k3"], HEAVY_TAIL) < -Z, covered
    assert deviation(covered["k1"], AT_LEAST) > -Z, covered
    assert deviation(covered["exact"], AT_LEAST) > -Z, covered

"""Sums that batches add up to, against the formulas written out over all completions at once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from tolerances import EXACT, SINGLE

from klgrad.statistics import Kept, RatioSums, ratio_of_means


def written_out(total, count):
    """Σ total / Σ count and its standard error, completion by completion."""
    n, mean = len(total), sum(total) / sum(count)
    residuals = [x - mean * c for x, c in zip(total, count, strict=True)]
    return mean, (sum(r * r for r in residuals) * n / (n - 1)) ** 0.5 / sum(count)


def columns(n, seed, offset=0.0):
    g = torch.Generator().manual_seed(seed)
    count = torch.randint(0, 9, (n,), generator=g).double()
    return torch.randn(2, n, generator=g, dtype=torch.float64) * count.sqrt() + offset * count, count


@given(st.integers(2, 40), st.lists(st.integers(0, 40), max_size=4), st.sampled_from([0.0, 1.0, 1e6]))
def test_any_parts_add_up_to_the_whole(n, cuts, offset):
    total, count = columns(n, 0, offset)
    count[0] = 3.0
    edges = [0, *sorted(min(c, n) for c in cuts), n]
    parts = [RatioSums.of(total[:, a:b], count[a:b]) for a, b in pairwise(edges)]
    whole = sum(parts[1:], parts[0])
    assert whole.n == n
    for found, values in zip(whole.estimates(), total.tolist(), strict=True):
        mean, error = written_out(values, count.tolist())
        EXACT.check(found.mean, mean)
        # Written out about 0, the residuals of values near a million lose ten digits of sixteen.
        (EXACT if offset < 10 else SINGLE).check(found.standard_error, error)


def test_a_batch_without_live_tokens_changes_nothing_but_the_number_of_completions():
    total, count = columns(20, 1)
    empty = RatioSums.of(torch.zeros(2, 3), torch.zeros(3))
    with_zeros = RatioSums.of(torch.cat([torch.zeros(2, 3), total], 1), torch.cat([torch.zeros(3), count]))
    for sums in (empty + RatioSums.of(total, count), RatioSums.of(total, count) + empty):
        for found, expected in zip(sums.estimates(), with_zeros.estimates(), strict=True):
            EXACT.check(found.mean, expected.mean)
            EXACT.check(found.standard_error, expected.standard_error)


def test_alike_completions_have_no_error_however_large_they_are():
    alike = RatioSums.of(torch.full((1, 50), 1e9), torch.ones(50))
    (found,) = (alike + alike + alike).estimates()
    assert float(found.standard_error) == 0


def test_the_error_is_clustered_by_group_and_the_dtype_stays():
    total, count = columns(30, 2)
    group = torch.arange(30) // 5 * 7 - 3  # any integers
    found = ratio_of_means(total[0].float(), count.float(), group)
    assert found.mean.dtype == found.standard_error.dtype == torch.float32
    by_group = [x.reshape(6, 5).sum(-1).tolist() for x in (total[0], count)]
    for value, expected in zip(found, written_out(*by_group), strict=True):
        SINGLE.check(value, expected)


def test_everything_is_kept_until_the_limit():
    kept, stream = Kept(1000), torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    for part in stream.split(37, -1):
        kept.add(part)
    assert torch.equal(kept.values(), stream)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 13, 64, 100, 1024])
def test_a_longer_stream_is_thinned_without_favouring_a_position(tokens):
    """Every 2nd, 4th, 8th value of completions of 8 tokens would be their first alone."""
    kept, n = Kept(4096), 2**17 // tokens * tokens
    for part in torch.arange(n).split(999):
        kept.add(part)
    values = kept.values()
    assert 2000 <= len(values) <= 4096
    assert torch.equal(values, values.sort().values)
    bins = min(tokens, 32)
    seen = torch.bincount(values % tokens * bins // tokens, minlength=bins).double()
    expected = torch.bincount(torch.arange(tokens) * bins // tokens).double() * len(values) / tokens
    assert float((seen / expected - 1).abs().max()) < 0.25
    halves = torch.bincount(values * 8 // n, minlength=8).double() / (len(values) / 8)
    assert float((halves - 1).abs().max()) < 0.05

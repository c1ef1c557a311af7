"""The bias and the variance of gradients that `benchmarks/exp_gradient.py` reports, on vectors with known moments."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
VECTORS = 4_000
ERROR = 5 / VECTORS**0.5
"""Means over so many vectors of unit variance are within five of their standard errors."""


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return importlib.import_module("exp_gradient")


@pytest.fixture
def moments(module):
    """The expected vectors are (1, 0) for `true` and (1, 2) for `biased`; the variances are 0 and 1 + 4."""
    draw, found = torch.Generator().manual_seed(0), module.Moments()
    for _ in range(VECTORS):
        noise = torch.randn(2, generator=draw, dtype=torch.float64) * torch.tensor([1.0, 2.0], dtype=torch.float64)
        found.add("true", torch.tensor([1.0, 0.0], dtype=torch.float64))
        found.add("biased", torch.tensor([1.0, 2.0], dtype=torch.float64) + noise)
    return found


def test_variance_is_that_of_one_vector(moments):
    assert moments.variance("true") == pytest.approx(0.0, abs=1e-9)
    assert moments.variance("biased") == pytest.approx(5.0, rel=2 * ERROR)


def test_squared_bias_and_products_have_no_part_of_the_variance(module):
    """With two vectors only, the variance would dominate a squared mean: its average over many trials has none."""
    draw, squared, norm = torch.Generator().manual_seed(0), [], []
    for _ in range(1000):
        found = module.Moments()
        for _ in range(2):
            found.add("true", torch.zeros(1, dtype=torch.float64))
            found.add("noisy", 0.5 + torch.randn(1, generator=draw, dtype=torch.float64))
        squared.append(found.squared_bias("noisy", "true"))
        norm.append(found.product("noisy", "noisy"))
    # Each product has a standard deviation of 1.23 (that of x y with means 0.5 and variances 1).
    tolerance = 5 * 1.23 / 1000**0.5
    assert sum(squared) / 1000 == pytest.approx(0.25, abs=tolerance)
    assert sum(norm) / 1000 == pytest.approx(0.25, abs=tolerance)


def test_summary_is_relative_to_the_true_gradient(module, moments):
    rows = {row["arm"]: row for row in module.summary(moments, "true")}
    assert float(rows["biased"]["relative_squared_bias"]) == pytest.approx(4.0, abs=20 * ERROR)
    assert float(rows["biased"]["relative_variance"]) == pytest.approx(5.0, rel=2 * ERROR)
    assert float(rows["biased"]["cosine"]) == pytest.approx(5**-0.5, abs=2 * ERROR)
    assert float(rows["true"]["cosine"]) == 1.0
    assert rows["biased"]["batches"] == VECTORS


def test_the_arms_are_those_of_the_training_runs(module):
    assert set(module.TERMS) == set(importlib.import_module("exp_discount").ARMS)

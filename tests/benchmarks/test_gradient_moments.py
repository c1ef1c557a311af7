"""The bias and the variance of gradients that `benchmarks/exp_gradient.py` reports, on vectors with known moments."""

import argparse
import math
from contextlib import nullcontext
from statistics import fmean, stdev

import pytest
import torch
from overwriting import Overwriting
from training.small import write_model

pytest.importorskip("trl")

import exp_discount
import exp_gradient
import gradient_moments as module

VECTORS = 4_000
ERROR = 5 / VECTORS**0.5
"""Means over so many vectors of unit variance are within five of their standard errors."""
TRIALS = 300


def vectors(count, draw, *, mean=(1.0, 2.0), spread=(1.0, 2.0)):
    """The expected vector of `true` is (1, 0) and has no noise; that of `biased` is `mean`."""
    found = module.Moments()
    for _ in range(count):
        noise = torch.randn(2, generator=draw, dtype=torch.float64) * torch.tensor(spread, dtype=torch.float64)
        found.add("true", torch.tensor([1.0, 0.0], dtype=torch.float64))
        found.add("biased", torch.tensor(mean, dtype=torch.float64) + noise)
    return found


def test_moments_are_relative_to_the_true_arm():
    moments = vectors(VECTORS, torch.Generator().manual_seed(0))
    found = module.relative_moments(moments.products("biased", "true"))
    assert found["relative_squared_norm"] == pytest.approx(5.0, abs=20 * ERROR)
    assert found["relative_squared_bias"] == pytest.approx(4.0, abs=20 * ERROR)
    assert found["relative_variance"] == pytest.approx(5.0, rel=2 * ERROR)
    assert found["cosine"] == pytest.approx(5**-0.5, abs=2 * ERROR)


def test_the_true_arm_has_no_bias_and_no_error_of_it():
    moments = vectors(30, torch.Generator().manual_seed(0))
    found = module.with_errors(moments.products("biased", "biased"))
    assert (found["relative_squared_bias"], found["relative_squared_bias_se"]) == (0.0, 0.0)
    assert (found["cosine"], found["cosine_se"]) == (1.0, 0.0)


@pytest.mark.parametrize("count", [2, 3, 9, 20])
def test_squares_have_no_part_of_the_variance(count):
    """With few vectors the variance would dominate a squared mean: the average over many trials has none."""
    draw, norm, bias, variance = torch.Generator().manual_seed(0), [], [], []
    for _ in range(TRIALS):
        made = vectors(count, draw, mean=(0.5, 0.0), spread=(1.0, 0.0)).products("biased", "true")
        norm.append(made.between(made.own))
        bias.append(module.relative_moments(made)["relative_squared_bias"])
        variance.append(made.variance())
    for values, expected in ((norm, 0.25), (bias, 0.25), (variance, 1.0)):
        assert fmean(values) == pytest.approx(expected, abs=5 * stdev(values) / TRIALS**0.5)


def test_blocks_of_unequal_size_count_by_their_vectors():
    """Constant vectors have the same square in every weighting, and no variance."""
    for count in (9, 11, 17):
        made = vectors(count, torch.Generator(), spread=(0.0, 0.0)).products("biased", "true")
        assert made.between(made.own) == pytest.approx(5.0, rel=1e-12)
        assert made.variance() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.slow
def test_standard_errors_are_the_spread_over_repetitions():
    """Their mean square over trials estimates the variance over trials; for 300 trials that is within a quarter."""
    draw = torch.Generator().manual_seed(0)
    trials = [module.with_errors(vectors(64, draw).products("biased", "true")) for _ in range(TRIALS)]
    for name in ("relative_squared_norm", "relative_squared_bias", "relative_variance", "cosine"):
        spread = stdev([each[name] for each in trials])
        claimed = fmean([each[f"{name}_se"] ** 2 for each in trials]) ** 0.5
        assert claimed == pytest.approx(spread, rel=0.25), name


def test_two_blocks_have_no_standard_error():
    made = module.with_errors(vectors(2, torch.Generator().manual_seed(0)).products("biased", "true"))
    assert math.isnan(made["relative_variance_se"])


def test_the_arms_are_those_of_the_training_runs():
    assert set(exp_gradient.TERMS) == set(exp_discount.ARMS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::klgrad.trl.MeaningWarning")
def test_a_tiny_model_is_measured_on_a_cpu(tmp_path, monkeypatch):
    write_model(tmp_path / "teacher-fixed-length", layers=3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for script in (exp_gradient, exp_discount):
        monkeypatch.setattr(script, "LAYERS", 2)
    few = {"per_device_train_batch_size": 16, "max_completion_length": 4, "bf16": "false", "use_cpu": "true"}
    monkeypatch.setattr(exp_gradient, "COMMON", {**exp_gradient.COMMON, **few})
    monkeypatch.setattr(exp_gradient, "ROWS", 16)
    given = argparse.Namespace(runs=tmp_path, batches=4)
    found = [row for updates in (0, 1) for row in exp_gradient.at_weights(given, updates)]
    rows = {(row["update"], row["arm"]): row for row in found}
    assert len(rows) == 2 * len(exp_gradient.TERMS)
    assert all(row["batches"] == 4 and float(row["relative_variance_se"]) > 0 for row in rows.values())
    # Without a future, nothing of the exact gradient is sampled but the prefixes.
    assert float(rows[0, "exact-0"]["relative_variance"]) < float(rows[0, "k1-0-leave-one-out"]["relative_variance"])


@pytest.mark.parametrize(("layer", "same"), [(torch.square, True), (Overwriting.apply, False)])
def test_a_layer_that_overwrites_what_it_saved_is_found(layer, same):
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = layer(x).sum()
    passes = [torch.autograd.grad(loss, x, retain_graph=True)[0].clone() for _ in range(2)]
    refused = pytest.raises(RuntimeError, match=r"Expected the same gradient.* 1 of its length away")
    with nullcontext() if same else refused:
        exp_gradient._check_same(*passes)


def test_rounding_to_sixteen_bits_is_no_difference():
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    exp_gradient._check_same(vector, vector.bfloat16().float())

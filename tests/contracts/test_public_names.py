"""The public surface: a change here is a change for users."""

import inspect

import klgrad

NAMES = {
    "Clip", "KLResult", "KLTerm", "KlgradError", "Mask", "OffPolicy", "Rollout", "Truncate",
    "consistency_loss", "forward_optimum", "kl_report", "mismatch_report", "reverse_optimum", "squared_sequence",
    "audit", "cells", "credit", "estimators", "exact", "importance",
}  # fmt: skip


def test_the_public_names():
    public = {
        name
        for name, x in vars(klgrad).items()
        if not name.startswith("_") and (not inspect.ismodule(x) or name in NAMES)
    }
    assert public == NAMES


def test_everything_public_is_documented():
    for name in NAMES:
        assert inspect.getdoc(getattr(klgrad, name)), name


def test_the_fields_of_a_term():
    assert list(inspect.signature(klgrad.KLTerm).parameters) == [
        "divergence",
        "level",
        "estimator",
        "discount",
        "baseline",
        "sampler",
        "influence_bound",
        "reduction",
    ]

"""The JSON of an audit has the fields, names and values that its page promises, for every loss of the goldens."""

import json
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parent.parent / "goldens"
RESULTS = [
    r for file in ("catalogue", "trl") for r in json.loads((GOLDENS / f"{file}.json").read_text("utf-8"))["results"]
]
NUMBER = (int, float)
NUMBER_OR_NONE = (int, float, type(None))

DIVERGENCE = {
    "name": str, "scale": NUMBER_OR_NONE, "level": str, "flat_below": NUMBER_OR_NONE, "flat_above": NUMBER_OR_NONE,
    "pull_below": NUMBER_OR_NONE, "pull_above": NUMBER_OR_NONE, "convex": bool,
}  # fmt: skip
BESIDE = {"sum": {"parts"}, "alpha": {"alpha"}, "other": {"curve"}}
"""What a divergence of these names has besides; of Jensen-Shannon a β that is not 1/2 is told."""

NAMES = {
    "reverse-kl", "forward-kl", "jensen-shannon", "alpha", "chi-square", "hellinger", "total-variation", "sum",
    "nothing", "other",
}  # fmt: skip
ANATOMY = {
    "divergence": dict, "horizon": dict, "samples": dict, "unit": str, "baseline": str, "constant": NUMBER,
    "entropy": NUMBER, "proved": bool, "divided_by_spread": bool, "additive": bool, "masked_tokens_leak": bool,
    "unexplained": NUMBER, "past_credit": bool, "mean_over_rows": bool, "anchor": str, "reference_late_by": int,
    "end_token_has_gradient": bool, "cut_off_completions_count": bool, "top_k": (int, type(None)),
    "deterministic": bool, "probability_power": NUMBER, "temperature": NUMBER, "depends_also_on": list,
    "unexplained_by_probe": (dict, list),
}  # fmt: skip
HORIZONS = {"none", "all", "discount", "window", "other"}
ESTIMATES = {"k1", "k2", "k3", "excess", "exact", "other", None}
RATIOS = {"none", "token", "prefix", "before", "sequence", "mean", "other"}
BOUNDS = {"truncate", "clip", "mask", "gate", "ppo", "value", "other"}
UNITS = {"sum", "completion-mean", "token-mean", "fixed-length", "other"}
BASELINES = {
    "none", "leave-one-out", "group-mean", "batch-mean", "batch-leave-one-out", "token-mean", "return-mean", "other",
}  # fmt: skip


def has(data, fields, others=()):
    """Whether data has these fields of these types, and no others."""
    assert set(data) == {*fields, *others}
    assert all(isinstance(data[name], kind) for name, kind in fields.items()), data


@pytest.mark.parametrize("result", RESULTS, ids=[r["name"] for r in RESULTS])
def test_the_anatomy_as_json(result):
    parts = result["anatomy"]
    has(parts, ANATOMY)
    d = parts["divergence"]
    has(d, DIVERGENCE, BESIDE.get(d["name"], {"beta"} & set(d)))
    assert d["name"] in NAMES
    assert d["level"] in ("token", "completion", "mean")
    assert all(part["name"] in NAMES - {"sum", "nothing"} for part in d.get("parts", ()))
    has(parts["horizon"], {"kind": str, "discount": NUMBER_OR_NONE, "weights": list, "estimate": (str, type(None))})
    assert parts["horizon"]["kind"] in HORIZONS
    assert parts["horizon"]["estimate"] in ESTIMATES
    assert (parts["horizon"]["discount"] is None) == (parts["horizon"]["kind"] != "discount")
    has(parts["samples"], {"ratio": str, "per_decision": bool, "frozen_log_ratio": bool}, ["bound"])
    assert parts["samples"]["ratio"] in RATIOS
    bound = parts["samples"]["bound"]
    if bound is not None:
        has(
            bound,
            {"kind": str, "low": NUMBER_OR_NONE, "high": NUMBER_OR_NONE},
            {"dual", "estimate", "differentiated"} & set(bound),
        )
        assert bound["kind"] in BOUNDS
    assert parts["unit"] in UNITS
    assert parts["baseline"] in BASELINES
    assert parts["unexplained"] >= 0

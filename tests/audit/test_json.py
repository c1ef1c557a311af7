"""The JSON of an audit, and docs/audit.md, which states its fields and the numbers of the probes."""

import json
import re
from pathlib import Path

import pytest

from klgrad import KLTerm
from klgrad.audit import audit
from klgrad.audit.probes import REACH
from klgrad.audit.procedure import proof_cases
from klgrad.audit.subject import VOCABULARY
from klgrad.targets import TARGETS

# The fields, names and values, for every loss of the goldens.


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
    "end_token_has_gradient": bool, "cut_off_completions_count": bool,
    "top_k": (int, type(None)), "top_k_of": (str, type(None)), "top_k_tail": (str, type(None)),
    "top_k_constant": NUMBER,
    "deterministic": bool, "depends_also_on": list, "temperature": NUMBER, "micro_batches": (bool, type(None)),
    "unexplained_by_probe": (dict, list),
}  # fmt: skip
HORIZONS = {"none", "all", "discount", "window", "other"}
ESTIMATES = {"k1", "k2", "k3", "excess", "exact", "other", None}
RATIOS = {"none", "token", "prefix", "sequence", "mean", "other"}
BOUNDS = {"truncate", "clip", "mask", "ppo", "value", "probability", "other"}
UNITS = {"sum", "completion-mean", "token-mean", "fixed-length", "other"}
BASELINES = {
    "none", "leave-one-out", "group-mean", "batch-mean", "token-mean", "return-mean", "other",
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
    assert d["level"] in ("token", "completion")
    assert all(part["name"] in NAMES - {"sum", "nothing"} for part in d.get("parts", ()))
    has(parts["horizon"], {"kind": str, "discount": NUMBER_OR_NONE, "weights": list, "estimate": (str, type(None))})
    assert parts["horizon"]["kind"] in HORIZONS
    assert parts["horizon"]["estimate"] in ESTIMATES
    assert (parts["horizon"]["discount"] is None) == (parts["horizon"]["kind"] != "discount")
    has(
        parts["samples"],
        {"ratio": str, "per_decision": bool, "frozen_log_ratio": bool, "pull_to_sampler": NUMBER},
        ["bound"],
    )
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


# What docs/audit.md states.


PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def test_the_numbers_in_the_text_are_theirs():
    problems = proof_cases(False)
    assert f"every outcome of {len(problems)} small problems" in TEXT
    assert f"log-ratios from -{REACH:g} to {REACH:g}" in TEXT
    assert f"a vocabulary of {VOCABULARY}" in TEXT


def test_the_table_of_targets_is_theirs():
    for name, target in TARGETS.items():
        in_text = name in ("unknown", "sum-of-targets") or target.climbed
        assert in_text or f"| `{name}` | {target.formula} |" in PAGE, name


def test_every_field_of_a_result_is_explained():
    explained = set(re.findall(r"`(\w+)`", PAGE.split("## What it reports")[1].split("## Your own loss")[0]))
    result = audit(KLTerm())
    fields = {field.removesuffix("_off_policy") for field in result.to_dict()}
    assert fields - explained == set()

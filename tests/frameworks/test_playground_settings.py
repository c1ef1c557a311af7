"""The settings that the playground shows are what it says they are, by the audit of the framework itself."""

from functools import cache

import playground
import pytest
from docs.choices import DEFAULTS, compared, loss_of
from some import first

from klgrad.audit import audit
from klgrad.frameworks import FRAMEWORKS

SETTINGS = {entry["subject"]: entry for entry in playground.settings()}


@cache
def subjects(framework):
    return {subject.name: subject for subject in FRAMEWORKS[framework].subjects()}


@pytest.mark.slow
@pytest.mark.parametrize("name", first(SETTINGS, 3))
def test_a_setting_is_its_choice(name):
    framework = name.split(" ")[0]
    if FRAMEWORKS[framework].version is None:
        pytest.skip(f"{framework} is not installed")
    choice = DEFAULTS | SETTINGS[name]["choice"]
    found, expected = (compared(audit(loss).anatomy.to_dict()) for loss in (subjects(framework)[name], loss_of(choice)))
    if choice["place"] == "reward":  # the policy loss multiplies it by a ratio of its own
        found["samples"] = expected["samples"]
    if framework == "openrlhf" and choice["ratio"] == "token":  # in float32 the edge is read to 1%
        (ratio, (kind, low, high)), (_, (_, _, bound)) = found["samples"], expected["samples"]
        assert high == pytest.approx(bound, rel=0.01)
        found["samples"] = (ratio, (kind, low, bound))
    assert rounded(found) == rounded(expected)


def rounded(parts):
    """With edges to two digits: frameworks compute in float32."""
    low, high, below, above = (x if x is None else round(x, 2) for x in parts["flat"])
    return parts | {"flat": (low, high, below, above)}

"""Every framework has a recorded audit in the package, of the settings that its adapter has."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from framework_verdicts import ALL

from klgrad.audit.policy_page import COLUMNS
from klgrad.frameworks import DEFAULTS, FRAMEWORKS, Recorded, recorded


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_is_recorded_at_its_tested_version(name):
    known = recorded(name)
    assert (known.framework, known.version) == (name, FRAMEWORKS[name].tested)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", known.date)
    assert {row[0] for row in known.rows} == set(known.verdicts) == set(ALL[name])
    for setting, (verdict, off_policy, _) in known.verdicts.items():
        assert (verdict, off_policy) == ALL[name][setting][:2], setting
    assert {len(row) for row in known.rows} == {len(known.columns)}
    assert set(known.words) == set(known.verdicts)
    assert DEFAULTS[name].subject in ALL[name]


@pytest.mark.parametrize("name", [name for name, framework in FRAMEWORKS.items() if framework.whole_losses])
def test_every_recorded_policy_loss_has_its_parts(name):
    rows = recorded(name).policy_losses
    assert len(rows) >= 6
    assert {len(row) for row in rows} == {len(COLUMNS)}


def test_there_is_no_record_of_anything_else():
    names = {path.name for path in (files("klgrad.frameworks") / "records").iterdir() if path.name.endswith(".json")}
    assert names == {f"{name}.json" for name in FRAMEWORKS}
    assert recorded("no-such-trainer") is None


def test_what_is_written_is_read_again(tmp_path, monkeypatch):
    verdicts = {"mine π": ("nothing", "unknown", "always")}
    words = {"mine π": ("nothing", "not told")}
    known = Recorded("mine", "1.2", "2026-01-02", ["loss", "notes"], [["mine π", "none"]], verdicts, words)
    (tmp_path / "records").mkdir()
    known.write(tmp_path / "records")
    monkeypatch.setattr("klgrad.frameworks.framework.files", lambda _: tmp_path)
    assert recorded("mine") == known


# What was said before by the match with a list of targets, and the parts that imply it.

BEFORE = json.loads((Path(__file__).parent / "verdicts_before.json").read_text())
"""By phrase, the settings of all frameworks of which it was recorded."""

ROWS = {row[0]: row for name in FRAMEWORKS for row in recorded(name).rows}


def is_implied(phrase, row):
    """Whether the parts of a row say what a phrase said, or why it could not be said."""
    _, divergence, ahead, samples, unit, scale, *rest = row
    notes = rest[0] if rest else ""
    bare, *edges = re.split(r" where |, constant ", divergence)
    bounded = bool(edges)
    batch = unit == "mean over tokens" or scale == "spread" or "centred" in notes or "mean per completion" in unit
    if phrase.startswith("no known divergence"):  # the parts have a name that the list had not
        by_length = unit == "mean per completion" or "cut" in notes or "end token" in notes
        other = bare not in ("reverse KL", "forward KL") or samples.startswith("mean") or bounded
        return other or by_length or scale == "spread" or "truncated" in row[0]
    if phrase.startswith(("nothing", "no KL")):
        is_far = "but not with" in phrase  # a coefficient that is 0 near ref only
        return divergence.startswith("nothing") or "to the sampler" in divergence or (is_far and bounded)
    kind, level, *conditions = phrase.split(", ")
    said = [bare == kind, ahead == {"token by token": "no", "whole completions": "all"}[level]]
    text = ", ".join(conditions)
    batch = batch or row[0].startswith("tinker-cookbook")  # which subtracts the mean of the batch's tokens
    said += [batch] if "in large batches" in text or "scale that depends" in text else []
    if "equal lengths" in text:
        said.append(unit == "mean per completion" or row[0].startswith("tinker-cookbook"))  # which centres tokens
    if ("near ref" in text and "equal lengths" not in text) or "but not with" in text:
        said.append(bounded)
    return all(said)


@pytest.mark.parametrize("phrase", BEFORE)
def test_what_was_said_before_is_implied_by_the_parts(phrase):
    assert [name for name in BEFORE[phrase] if not is_implied(phrase, ROWS[name])] == []


def test_a_phrase_is_not_implied_by_other_parts():
    row = ["x", "reverse KL", "no", "fresh", "sum", "1", ""]
    assert is_implied("reverse KL, token by token", row)
    for i, text in ((1, "forward KL"), (2, "all")):
        assert not is_implied("reverse KL, token by token", [*row[:i], text, *row[i + 1 :]])
    assert not is_implied("reverse KL, token by token, at equal lengths only", row)
    assert not is_implied("no known divergence", row)

"""Every framework has a recorded audit in the package, of the settings that its adapter has."""

import re
from importlib.resources import files

import pytest
from framework_verdicts import ALL

from klgrad.audit.render.policy import COLUMNS
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

"""Running, keeping and interrupting; worker processes: what they inherit, and that none outlives the command."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from some import first
from typer.testing import CliRunner

from klgrad.cli import app, reproduce as command
from klgrad.errors import MissingExtraError, UnknownNameError
from klgrad.papers import Check, Settings, Study, every_outcome, reproduce, study as runner
from klgrad.papers.study import MODULES, Outcome, below, load_study, within


def study():
    module: Any = ModuleType("made_up", "A claim that is made up for a test.\n\nIts source.")
    module.run = lambda settings: {"x": [1.0, 2.0]}
    module.check = lambda found: [Check("it holds", f"{found['x'][0]}", True)]
    module.draw = lambda found, figure: figure.subplots().plot(found["x"])
    return Study("paper/made-up", module)


def replace_studies(monkeypatch, *made):
    """These studies in place of all that there are."""
    by_name = {each.name: each for each in made}
    monkeypatch.setattr("klgrad.papers.study.MODULES", dict.fromkeys(by_name, ""))
    monkeypatch.setattr("klgrad.papers.study.load_study", by_name.__getitem__)


def test_numbers_figure_and_verdict_are_kept(tmp_path):
    made = study()
    assert reproduce(made, Settings(), tmp_path).verdict == "holds"
    saved = json.loads((tmp_path / "paper/made-up.json").read_text())
    assert saved["claim"] == "A claim that is made up for a test."
    assert saved["numbers"] == {"x": [1.0, 2.0]}
    fields = {"holds": True, "decided": True, "ours": False, "waits": False, "chance": None}
    assert saved["checks"] == [{"claim": "it holds", "measured": "1.0", **fields}]
    assert sorted(p.name for p in (tmp_path / "paper").iterdir()) == ["made-up.json", "made-up.png", "made-up.svg"]


@pytest.mark.slow
def test_numbers_of_other_settings_or_code_or_of_a_damaged_file_are_computed_again(tmp_path, monkeypatch):
    made, file = study(), tmp_path / "paper/made-up.json"
    computed = lambda how=None, **fresh: reproduce(made, how or Settings(), tmp_path, **fresh).seconds is not None
    assert (computed(), computed(), computed(fresh=True)) == (True, False, True)
    assert computed(Settings(seed=1))
    assert computed(Settings(quick=True))
    for junk in ("", "{", '{"settings": 3}', "[]"):
        file.write_text(junk)
        assert computed()
    assert not computed()
    monkeypatch.setattr(runner, "_code", lambda: "another")
    assert computed()


def test_the_digest_of_the_code_depends_on_every_source(tmp_path, monkeypatch):
    (tmp_path / "papers").mkdir()
    (tmp_path / "core").mkdir()
    monkeypatch.setattr(runner, "__file__", str(tmp_path / "papers" / "study.py"))
    digests = set()
    for text in ("k3 = 1", "k3 = 2", "k3 = 2"):
        (tmp_path / "core" / "estimators.py").write_text(text)
        digests.add(runner._code.__wrapped__())
    assert len(digests) == 2


@pytest.mark.parametrize(("holds", "decided", "status"), [(True, True, 0), (False, True, 1), (False, False, 0)])
def test_the_status_is_1_if_a_claim_is_contradicted(holds, decided, status, tmp_path, monkeypatch):
    made = study()
    monkeypatch.setattr(made.computation, "check", lambda found: [Check("it holds", "1", holds, decided)])
    replace_studies(monkeypatch, made)
    done = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path), "--jobs", "1"])
    assert done.exit_code == status, done.output


HOLDS, FAILS, OPEN = Check("a", "1", True), Check("b", "2", False), Check("c", "2 seeds", False, decided=False)
OURS = Check("b", "2", holds=False, ours=True)


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([HOLDS, FAILS, OPEN], "contradicted: b (2). undecided: c (2 seeds)"),
        ([HOLDS, OPEN], "undecided: c (2 seeds)"),
        ([HOLDS, OURS], "holds"),
        ([OURS], "contradicted: (ours) b (2)"),
    ],
)
def test_a_verdict_says_which_sentences_of_the_paper_do_not_hold(checks, verdict):
    """All sentences, if none is of a paper."""
    outcome = Outcome("name", checks, None)
    assert (outcome.verdict, outcome.holds) == (verdict, verdict == "holds")


@pytest.mark.slow
def test_interrupted_it_leaves_whole_files_and_goes_on_later(tmp_path, monkeypatch):
    first, second = study(), Study("paper/second", study().computation)
    vars(second.computation)["run"] = Mock(side_effect=KeyboardInterrupt)
    replace_studies(monkeypatch, first, second)
    stopped = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path), "--jobs", "1"])
    assert stopped.exit_code == 130
    assert "to compute the missing results" in stopped.output
    assert sorted(p.name for p in (tmp_path / "paper").iterdir()) == ["made-up.json", "made-up.png", "made-up.svg"]
    vars(second.computation)["run"] = lambda settings: {"x": [3.0]}
    vars(first.computation)["run"] = None  # its numbers are kept
    done = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path), "--jobs", "1"])
    assert done.exit_code == 0
    assert "kept" in done.output


@pytest.mark.slow
def test_one_study_imports_no_other(tmp_path):
    code = "import sys; from klgrad.cli import app; app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    command = [sys.executable, "-c", code, "reproduce", "schulman/table", "--quick", "--out", str(tmp_path)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    modules = {f"klgrad.papers.{path.partition(':')[0]}" for path in MODULES.values()}
    assert modules & set(loaded) == {"klgrad.papers.schulman"}
    assert "klgrad.papers.runs" not in loaded


def test_the_command_lists_results():
    assert "tang-munos/fig3" in CliRunner().invoke(app, ["reproduce", "--list"]).output


@pytest.mark.parametrize(
    ("name", "error", "remedy"),
    [
        ("tang-munos/fig33", UnknownNameError, "did you mean 'tang-munos/fig3'"),
        ("schulman/table", MissingExtraError, r"klgrad\[plot\]"),
    ],
)
def test_an_unknown_name_and_a_missing_matplotlib_have_a_remedy(name, error, remedy, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=remedy):
        CliRunner().invoke(app, ["reproduce", name], catch_exceptions=False)


def test_a_limit_and_a_tolerance_are_judged():
    assert [within("", x, 1.0, 0.05).holds for x in (1.04, 1.06)] == [True, False]
    assert [below("", x, 1.0).holds for x in (1.0, 1.1, float("nan"))] == [True, False, False]


def test_results_depend_on_the_seed_and_on_nothing_else():
    fig1 = load_study("tang-munos/fig1")
    a, b, c = (fig1.computation.run(Settings(quick=True, seed=seed)) for seed in (0, 0, 1))
    torch.rand(3)
    assert a == b != c


# Worker processes.

NAMES = ("schulman/table", "tang-munos/fig1")


@pytest.mark.slow
def test_workers_compute_what_this_process_does(tmp_path, recwarn):
    """With another thread alive, at which a fork could stand still for ever."""
    alive = threading.Event()
    threading.Thread(target=alive.wait, daemon=True).start()
    chosen = [load_study(name) for name in NAMES]
    before = torch.get_num_threads()
    try:
        apart = list(every_outcome(chosen, Settings(quick=True), tmp_path / "apart", jobs=2))
    finally:
        alive.set()
    here = list(every_outcome(chosen, Settings(quick=True), tmp_path / "here", jobs=1))
    assert {o.name: o.checks for o in apart} == {o.name: o.checks for o in here}
    assert [w for w in recwarn if "fork" in str(w.message)] == []
    assert torch.get_num_threads() == before
    for name in NAMES:
        files = [(tmp_path / where / f"{name}.json").read_text() for where in ("apart", "here")]
        assert files[0] == files[1]


def session(leader):
    """The processes of a session that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = path.read_text().rsplit(")", 1)
        except OSError:
            continue
        state, _, _, of = rest.split()[:4]
        if int(of) == leader and state != "Z" and "resource_tracker" not in Path(path.parent, "cmdline").read_text():
            found.append(name)
    return found


def wait_for(holds, seconds):
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
@pytest.mark.parametrize("moment", first(["workers compute", "workers start"], 1))
@pytest.mark.parametrize("case", first(["Ctrl-C", "Ctrl-C to the first alone", "a kill"], 1))
@pytest.mark.slow
def test_no_worker_outlives_the_command(case, moment, tmp_path):
    """Ctrl-C in a terminal goes to all of them at once, a kill to the first alone; files are whole."""
    run = [sys.executable, "-m", "klgrad", "reproduce", "--out", str(tmp_path), "--jobs", "2"]
    number = signal.SIGKILL if case == "a kill" else signal.SIGINT
    heeding = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
    process = subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heeding
    )
    try:
        if moment == "workers start":
            wait_for(lambda: len(session(process.pid)) == 3, 60)
            time.sleep(0.7)  # they import torch
        else:
            wait_for(lambda: list(tmp_path.rglob("*.json")), 120)
        (os.killpg if case == "Ctrl-C" else os.kill)(process.pid, number)
        shown, errors = process.communicate(timeout=60)
        wait_for(lambda: not session(process.pid), 30)
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "Traceback" not in errors
            assert "to compute the missing results" in shown
        for path in (p for p in tmp_path.rglob("*") if p.is_file() and number == signal.SIGINT):
            assert path.suffix in (".json", ".png", ".svg"), path
            if path.suffix == ".json":
                json.loads(path.read_text())
    finally:
        for name in session(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"left over: {name}")

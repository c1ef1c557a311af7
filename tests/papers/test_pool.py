"""Worker processes: what they inherit, and that none outlives the command."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from some import first

from klgrad.papers import Settings, every_outcome
from klgrad.papers.study import studies

pytestmark = pytest.mark.slow
NAMES = ("schulman/table", "tang-munos/fig1")


def test_workers_compute_what_this_process_does(tmp_path, recwarn):
    """With another thread alive, at which a fork could stand still for ever."""
    alive = threading.Event()
    threading.Thread(target=alive.wait, daemon=True).start()
    chosen = [studies()[name] for name in NAMES]
    before = torch.get_num_threads()
    other = tmp_path / "apart" / "schulman" / ".table.json.1.0123.partial"  # of another process, which may still run
    other.parent.mkdir(parents=True)
    other.write_text("half")
    try:
        apart = list(every_outcome(chosen, Settings(quick=True), tmp_path / "apart", jobs=2))
    finally:
        alive.set()
    assert other.read_text() == "half"
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
@pytest.mark.parametrize("number", first([signal.SIGINT, signal.SIGKILL], 1))
def test_no_worker_outlives_the_command(number, moment, tmp_path):
    """Ctrl-C in a terminal goes to all of them at once, a kill to the first alone."""
    run = [sys.executable, "-m", "klgrad", "reproduce", "--out", str(tmp_path), "--jobs", "2"]
    heeding = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heeding
    )
    try:
        if moment == "workers start":
            wait_for(lambda: len(session(process.pid)) == 3, 60)
            time.sleep(0.7)  # they import torch
        else:
            wait_for(lambda: list(tmp_path.rglob("*.json")), 120)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
        shown, errors = process.communicate(timeout=60)
        wait_for(lambda: not session(process.pid), 30)
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert errors == ""
            assert "to compute the missing results" in shown
        for path in (p for p in tmp_path.rglob("*") if p.is_file() and number == signal.SIGINT):
            assert path.suffix in (".json", ".png", ".svg"), path
            if path.suffix == ".json":
                json.loads(path.read_text())
    finally:
        for name in session(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"left over: {name}")

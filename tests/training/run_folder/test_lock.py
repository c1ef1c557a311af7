"""One run per output folder."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from training.conftest import contents
from training.small import SMALL, arguments

from klgrad.errors import RunError
from klgrad.training import run_folder

pytestmark = [pytest.mark.filterwarnings("ignore")]

HOLDER = """
import sys, time
from pathlib import Path
from klgrad.training.run_folder import owned
with owned(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(120)
"""


def test_a_second_owner_is_refused_with_the_first_ones_number(tmp_path):
    with (
        run_folder.owned(tmp_path / "run"),
        pytest.raises(RunError, match=f"process {os.getpid()} on {socket.gethostname()}"),
        run_folder.owned(tmp_path / "run"),
    ):
        pass
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("name", [run_folder.LOCK, "summary.json", "run.png", "model", "model/README.md"])
def test_links_out_of_the_folder_are_refused_and_their_targets_are_left(name, tmp_path):
    run, target = tmp_path / "run", tmp_path / "precious.txt"
    target.write_text("data")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(target)
    with pytest.raises(RunError, match="a link to "), run_folder.owned(run):
        pass
    assert target.read_text() == "data"
    (run / name).unlink()
    (run / "inside").symlink_to("other")  # it stays in the folder
    with run_folder.owned(run):
        pass


@pytest.mark.slow
def test_an_owner_that_was_killed_blocks_nobody(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"process {holder.pid} "), run_folder.owned(tmp_path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / run_folder.LOCK).exists()
    with run_folder.owned(tmp_path):
        pass


def test_a_lock_that_its_owner_removes_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """Between opening and locking the file it may be removed: the lock of a file without a name protects nothing."""
    assert run_folder.fcntl is not None
    real, removed = run_folder.fcntl.flock, []

    def flock(file, how):
        if not removed:
            removed.append((tmp_path / run_folder.LOCK).unlink())
        real(file, how)

    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    with run_folder.owned(tmp_path):
        assert json.loads((tmp_path / run_folder.LOCK).read_text())["pid"] == os.getpid()


@pytest.fixture
def without_locks(monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    monkeypatch.setattr(run_folder, "SETTLED", 0.0)


@pytest.mark.usefixtures("without_locks")
def test_without_locks_the_recorded_owner_counts_while_it_runs(tmp_path):
    with (
        run_folder.owned(tmp_path),
        pytest.raises(RunError, match=f"process {os.getpid()} "),
        run_folder.owned(tmp_path),
    ):
        pass


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize(
    ("owner", "blocks"),
    [
        ({"pid": 2**22 + 1, "started": None}, False),
        ({"pid": 2**22 + 1, "started": 5}, False),
        ({"pid": os.getpid(), "started": 5}, False),  # a later process with the number of the owner
        ({"pid": os.getpid(), "started": None}, True),
        ({"pid": 2**22 + 1, "started": 5, "host": "elsewhere"}, True),
        ("damaged", False),
    ],
)
def test_without_locks_an_owner_that_ended_does_not_count(owner, blocks, tmp_path):
    record = owner if isinstance(owner, str) else json.dumps({"host": socket.gethostname(), **owner})
    (tmp_path / run_folder.LOCK).write_text(record)
    if blocks:
        with pytest.raises(RunError, match="no other run is using"), run_folder.owned(tmp_path):
            pass
    else:
        with run_folder.owned(tmp_path):
            pass


# Runs


@pytest.mark.parametrize("how", [{"resume": True, "max_steps": 5}, {"overwrite": True}, {}])
def test_a_run_beside_a_live_one_changes_nothing(how, run, parts):
    with run_folder.owned(parts):
        before = contents(parts)
        with pytest.raises(RunError, match=f"process {os.getpid()} "):
            run("train", parts, **how)
        assert contents(parts) == before


@pytest.mark.slow
def test_a_lock_file_is_not_a_run(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_folder.LOCK).write_text("")
    assert run("train", tmp_path / "run", max_steps=1, eval_size=0)[0] == 0
    assert not (tmp_path / "run" / run_folder.LOCK).exists()


@pytest.mark.many
@pytest.mark.slow
def test_of_two_runs_at_once_one_trains(model, tmp_path):
    given = arguments(**{**SMALL, "model": model, "output_dir": tmp_path / "run", "eval_size": 0})
    command = [sys.executable, "-m", "klgrad", "train", *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [each.communicate(timeout=170)[1] for each in both]
    assert sorted(each.returncode for each in both) == [0, 2]
    refused = said[both.index(next(each for each in both if each.returncode == 2))].strip().splitlines()[-1]
    assert refused.startswith("RunError: expected an output folder")
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_a_lock_of_another_host_can_be_removed_by_hand(tmp_path):
    path = tmp_path / ".klgrad.lock"
    here = {"pid": 1, "host": run_folder.socket.gethostname()}
    assert f"remove {path}" in str(run_folder._in_use(path, {"pid": 1, "host": "elsewhere"}))
    assert "remove" not in str(run_folder._in_use(path, here))

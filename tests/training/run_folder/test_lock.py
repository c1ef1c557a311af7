"""One run per output folder."""

import json
import os
import signal
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


def test_a_second_owner_is_refused(tmp_path):
    with (
        run_folder.owned(tmp_path / "run"),
        pytest.raises(RunError, match="no other run is using"),
        run_folder.owned(tmp_path / "run"),
    ):
        pass
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    "name", [run_folder.LOCK, "summary.json", "run.png", "model", "model/README.md", "model/a/b/weights"]
)
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
        with pytest.raises(RunError, match="no other run is using"), run_folder.owned(tmp_path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / run_folder.LOCK).exists()
    with run_folder.owned(tmp_path):
        pass


# Runs


@pytest.mark.parametrize("how", [{"resume": True, "max_steps": 5}, {"overwrite": True}, {}])
def test_a_run_beside_a_live_one_changes_nothing(how, run, parts):
    with run_folder.owned(parts):
        before = contents(parts)
        with pytest.raises(RunError, match="no other run is using"):
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

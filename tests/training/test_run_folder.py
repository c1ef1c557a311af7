"""The files of a run: history, record, lock, and the run that is replaced."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from training.conftest import contents, invoke, read, same_weights

from klgrad.errors import RunError
from klgrad.training import run_folder
from klgrad.training.checkpoint import SEAL
from klgrad.training.figures import load, table
from klgrad.training.report import summarise, table_of
from klgrad.training.run_folder import History
from klgrad.training.settings import parse

pytestmark = [pytest.mark.filterwarnings("ignore")]

# A history that is damaged or lost.


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"step": "a"}'])
def test_damage_is_named_by_its_line(line, tmp_path):
    (tmp_path / "run.json").write_text('{"objective": null}')
    (tmp_path / "history.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 2 is not a row of a history"):
        History(tmp_path).rows()
    assert isinstance(invoke("compare", tmp_path, "--out", tmp_path / "x.png").exception, RunError)


@pytest.mark.parametrize("end", [b'{"st', b"\xff\n", b"\0\0\0"])
def test_a_last_line_that_was_cut_off_is_left_out(end, tmp_path):
    (tmp_path / "history.jsonl").write_bytes(b'{"step": 1}\n' + end)
    assert History(tmp_path).rows() == [{"step": 1}]


def evaluation(step, reward):
    score = {"reward": reward, "standard_error": 0.125, "count": 8}
    kl = {unit: {"mean": 0.5, "standard_error": None} for unit in ("per_token", "per_sequence")}
    found = {"sets": {"addition": {"domain": "in", **score}}, "domains": {"in": score}, "kl": kl, "length": 3.0}
    return {"step": step, "evaluation": found}


def text_of(renderable):
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_later_evaluation_is_not_called_before(tmp_path):
    """If the first rows are lost, only the known values are shown."""
    (tmp_path / "run.json").write_text('{"objective": null}')
    rows = [{"step": 3, "kl/reverse/k3/per_sequence": 0.5}, evaluation(4, 0.25), evaluation(6, 0.75)]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarise(History(tmp_path).rows())
    assert summary["before"] is None
    assert summary["after_updates"] == 6
    for shown in (table_of(summary), table(load([tmp_path]))):
        text = text_of(shown)
        assert "0.750 ± 0.125" in text
        assert "0.250" not in text
        assert "->" not in text


# A run that is replaced is kept until the new one has made an update; what that starts from is never deleted.


QUIET = {"eval_size": 0, "max_steps": 1}


@pytest.mark.slow
def test_an_overwrite_that_cannot_start_leaves_the_old_run_as_it_was(run, tmp_path):
    folder = tmp_path / "run"
    run("train", folder, eval_size=0, max_steps=2)
    before = contents(folder)
    (tmp_path / "reward.py").write_text("def fail(completions, **_):\n    raise ValueError('out of order')\n")
    with pytest.raises(ValueError, match="out of order"):
        run("train", folder, overwrite=True, reward=f"{tmp_path / 'reward.py'}:fail", **QUIET)
    assert contents(folder) == before
    (folder / "notes.txt").write_text("mine")
    run("train", folder, overwrite=True, seed=5, **QUIET)
    assert contents(folder)["run.json"] != before["run.json"]
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert {row["step"] for row in History(folder).rows()} == {1}
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_model_inside_the_run_is_not_overwritten(run, tmp_path):
    folder = tmp_path / "run"
    run("train", folder, **QUIET)
    before = contents(folder)
    for name in (folder / "model", f"{folder / 'model'}:2"):
        with pytest.raises(RunError, match="which is a part of it"):
            run("train", folder, model=name, overwrite=True, **QUIET)
    assert contents(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("flag", [True, False])
def test_a_run_of_epochs_can_be_made_longer(flag, run, tmp_path):
    folder = tmp_path / "run"
    epochs = {"eval_size": 0, "max_steps": None, "train_size": 8}
    run("train", folder, num_train_epochs=1, **epochs)
    summary = read(folder / "summary.json")
    assert summary["num_train_epochs"] == 1
    if not flag:  # as after a kill between the first update of `--resume --num_train_epochs 3` and its first checkpoint
        recorded = read(folder / "run.json")
        recorded["settings"]["num_train_epochs"] = 3
        (folder / "run.json").write_text(json.dumps(recorded))
    run("train", folder, resume=True, **({"num_train_epochs": 3} if flag else {}))
    assert read(folder / "summary.json")["updates"] == 3 * summary["updates"]


# One run per output folder.


HOLDER = """
import sys, time
from pathlib import Path
from klgrad.training.run_folder import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize(
    "name", [run_folder.LOCK, "summary.json", "run.png", "model", "model/README.md", "model/a/b/weights"]
)
def test_links_out_of_the_folder_are_refused_and_their_targets_are_left(name, tmp_path):
    run, target = tmp_path / "run", tmp_path / "precious.txt"
    target.write_text("data")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(target)
    with pytest.raises(RunError, match="a link to "), run_folder.lock_folder(run):
        pass
    assert target.read_text() == "data"
    (run / name).unlink()
    (run / "inside").symlink_to("other")  # it stays in the folder
    with run_folder.lock_folder(run):
        pass


@pytest.mark.slow
def test_an_owner_that_was_killed_blocks_nobody(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="no other run is using"), run_folder.lock_folder(tmp_path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (tmp_path / run_folder.LOCK).exists()
    with run_folder.lock_folder(tmp_path):
        pass


# Runs
@pytest.mark.parametrize("how", [{"resume": True, "max_steps": 5}, {"overwrite": True}, {}])
def test_a_run_beside_a_live_one_changes_nothing(how, run, parts):
    with run_folder.lock_folder(parts):
        before = contents(parts)
        with pytest.raises(RunError, match="no other run is using"):
            run("train", parts, **how)
        assert contents(parts) == before


@pytest.mark.slow
def test_a_lock_file_is_not_a_run(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_folder.LOCK).write_text("")
    run("train", tmp_path / "run", **QUIET)
    assert not (tmp_path / "run" / run_folder.LOCK).exists()


# `--resume` deletes nothing that took training to make.


def damage(folder, what):
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path) if what == "no checkpoints" else (path / SEAL).unlink()


@pytest.mark.parametrize("what", ["no checkpoints", "incomplete checkpoints", None])
@pytest.mark.parametrize("more", [{}, {"max_steps": 2}])
def test_a_finished_run_is_left_as_it_is(what, more, run, parts):
    if what is not None:
        damage(parts, what)
    before = contents(parts)
    text = run("train", parts, resume=True, **more)
    assert "is finished, after 4 updates." in text
    assert ("To make it longer, give a larger --max_steps" in text) == (what is None)  # else it would be refused
    assert contents(parts) == before


@pytest.mark.slow
def test_a_finished_run_without_checkpoints_of_epochs(run, tmp_path):
    """Its length is not in its settings, but a longer one is not the one that is finished."""
    folder = tmp_path / "run"
    epochs = {"max_steps": None, "num_train_epochs": 1, "train_size": 4, "save_strategy": "no", "eval_size": 0}
    run("train", folder, **epochs)
    before = contents(folder)
    run("train", folder, resume=True)
    with pytest.raises(RunError, match=r"which has history\.jsonl, summary\.json, model"):
        run("train", folder, resume=True, num_train_epochs=2)
    assert contents(folder) == before


LEFT = {
    "history.jsonl": lambda parts: shutil.rmtree(parts / "model"),
    "model": lambda parts: (parts / "history.jsonl").unlink() or (parts / "summary.json").unlink(),
}


@pytest.mark.parametrize("left", LEFT)
def test_what_would_be_lost_is_named_and_kept(left, run, parts):
    LEFT[left](parts)
    damage(parts, "no checkpoints")
    before = contents(parts)
    with pytest.raises(RunError, match=left) as refused:
        run("train", parts, resume=True, max_steps=6)
    assert f"klgrad train --output_dir {parts} --resume --overwrite" in str(refused.value)
    assert contents(parts) == before


@pytest.mark.slow
def test_it_begins_again_where_that_is_asked_for(run, parts, finished):
    shutil.rmtree(parts / "model")
    damage(parts, "incomplete checkpoints")
    assert "starts again" in run("train", parts, resume=True, overwrite=True)
    assert same_weights(finished, parts)


@pytest.mark.slow
def test_a_lost_summary_is_made_up_for_from_the_last_checkpoint(run, parts, finished):
    (parts / "summary.json").unlink()
    (parts / "history.jsonl").unlink()
    assert "All updates had been made before." in run("train", parts, resume=True)
    summary = read(parts / "summary.json")
    assert summary["updates"] == summary["after_updates"] == 4
    assert summary["before"] is None  # nobody knows any more
    assert same_weights(finished, parts)


@pytest.mark.parametrize("settings", [None, [1], 5])
def test_settings_that_are_none(settings, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"command": "train", "settings": settings}))
    with pytest.raises(RunError, match="the settings of a run, by name"):
        parse("train", ["--output_dir", str(tmp_path), "--resume", "--use_cpu"])


def test_secrets_are_not_written_down(tmp_path):
    run_folder.write_run(tmp_path, "train", {"hub_token": "abc", "seed": 1}, {})
    assert run_folder.recorded_settings(tmp_path, "train") == {"seed": 1}

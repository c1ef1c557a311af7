"""A disk that is full: one sentence that says what is safe, and a run that goes on when there is room."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from training.conftest import contents
from training.small import SMALL, arguments

from klgrad.cli import main
from klgrad.errors import OutputError, RewardError, RunError
from klgrad.training.checkpoint import checkpoints, is_complete, last_complete
from klgrad.training.libraries import write_failure

pytestmark = [pytest.mark.filterwarnings("ignore")]

ROOM = 700
"""KiB: enough for two checkpoints of the small model, of about 200 KiB each, and not for four."""
QUIET = {"eval_size": 0, "max_steps": 4}


def size_of(folder, kilobytes, *how):
    return subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"{','.join([*how, f'size={kilobytes}k'])}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own that fills up; `grow` makes room on it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or size_of(folder, ROOM).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder, lambda: size_of(folder, 100 * ROOM, "remount").check_returncode()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_disk_that_fills_up_keeps_the_checkpoints_that_are_whole(small_disk, run, weights, tmp_path):
    disk_folder, grow = small_disk
    whole, parts = tmp_path / "whole", disk_folder / "parts"
    assert run("train", whole, **QUIET)[0] == 0
    with pytest.raises(RunError) as raised:
        run("train", parts, **QUIET)
    found = last_complete(parts)
    assert found == checkpoints(parts)[0]  # half of a checkpoint was removed, which makes room
    said = str(raised.value)
    assert f"after {found.name.rpartition('-')[2]} updates in {found}" in said
    assert f"klgrad train --output_dir {parts} --resume" in said
    grow()
    assert run("train", parts, resume=True)[0] == 0
    assert same(weights(whole), weights(parts))
    rows = [[json.loads(x)["step"] for x in (f / "history.jsonl").read_text().splitlines()] for f in (whole, parts)]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line_and_status_2(small_disk, model, monkeypatch, capsys):
    given = arguments(**{**SMALL, **QUIET, "model": model, "output_dir": small_disk[0] / "run"})
    monkeypatch.setattr(sys, "argv", ["klgrad", "train", *given])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("RunError: expected a disk")


# Every writer that a run has, where no file system can be mounted


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


def full_of_torch(*_, **__):
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


def full_of_safetensors(*_, **__):
    from safetensors import SafetensorError

    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


WRITERS = {
    "optimizer": ("torch.save", full_of_torch),
    "weights": ("transformers.modeling_utils.safe_save_file", full_of_safetensors),
    "our state": ("klgrad.trl.state_files.write_whole", full),
    "manifest": ("klgrad.training.checkpoint.seal", full),
    "history": ("klgrad.training.run_folder.History.append", full),
}


@pytest.mark.parametrize("what", WRITERS)
def test_each_writer_that_fails_is_explained(what, run, parts, monkeypatch):
    """The checkpoints that were there stay, and the half-written one does not pass for sound."""
    before = contents(parts / "checkpoint-4")
    monkeypatch.setattr(*WRITERS[what])
    with pytest.raises(RunError, match="--resume") as raised:
        run("train", parts, resume=True, max_steps=6)
    monkeypatch.undo()
    safe = 5 if what == "history" else 4  # a checkpoint could be written where only the history cannot
    assert f"after {safe} updates in {parts / f'checkpoint-{safe}'}" in str(raised.value)
    assert contents(parts / "checkpoint-4") == before
    assert last_complete(parts) == parts / f"checkpoint-{safe}"
    assert (parts / "model" / "config.json").is_file()


def test_a_model_that_cannot_be_written_leaves_the_one_that_is_there(run, parts, monkeypatch):
    from klgrad.training.checkpoint import RunTrainer

    before, real = contents(parts / "model"), RunTrainer.save_model

    def save_model(self, folder=None, _internal_call=False):
        real(self, folder, _internal_call)
        if not _internal_call:
            full()

    monkeypatch.setattr(RunTrainer, "save_model", save_model)
    with pytest.raises(RunError, match=f"after 5 updates in {parts}/checkpoint-5"):
        run("train", parts, resume=True, max_steps=5)
    assert contents(parts / "model") == before
    assert not (parts / ".model.partial").exists()
    assert is_complete(parts / "checkpoint-5")


def test_a_step_that_fails_on_a_full_disk_names_both(run, tmp_path, monkeypatch):
    """The error is that of the step; that it could not be saved is said beside it."""
    import klgrad.training.callbacks

    def fails(self):
        raise RewardError("a", "b", "c")

    monkeypatch.setattr("klgrad.training.checkpoint.seal", full)
    monkeypatch.setattr(klgrad.training.callbacks.Recorder, "evaluate_on_schedule", fails)
    said = []
    monkeypatch.setattr("klgrad.training.run.Text", lambda text, **_: said.append(text) or text)
    with pytest.raises(RewardError):
        run("train", tmp_path / "run", save_steps=50, eval_size=0)
    (line,) = [text for text in said if "could not be saved" in text]
    assert os.strerror(errno.ENOSPC) in line
    assert "Start again with: klgrad train" in line
    assert line.endswith("--resume --overwrite")  # there is a history by now


def test_torch_names_no_cause():
    for text in ("basic_ios::clear: iostream error", "[enforce fail at inline_container.cc] . unexpected pos 64 vs 0"):
        assert "could not be written whole" in str(write_failure(RuntimeError(text)))


def test_other_errors_are_not_taken_for_a_full_disk():
    assert write_failure(ValueError("out of order")) is None
    assert write_failure(FileNotFoundError(errno.ENOENT, "No such file")) is None
    caused = RewardError("a", "b", "c")
    caused.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert write_failure(caused) is None  # a reward function's own file
    written = OutputError("a", "b", "c")
    written.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert write_failure(written) == "No space left on device"

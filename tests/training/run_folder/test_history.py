"""A history that is damaged or lost."""

import json

import pytest
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import RunError
from klgrad.training.figures import load, table
from klgrad.training.report import summarise, table_of
from klgrad.training.run_folder import History


def invoke(*given):
    return CliRunner().invoke(app, [str(x) for x in given])


@pytest.mark.parametrize("line", [b"\xff\xfe", b"{", b"[1]", b'{"step": "a"}', b'{"step": 1, "evaluation": 5}'])
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


def test_rows_are_held_until_they_are_released(tmp_path):
    history = History(tmp_path)
    for step in range(4):
        history.append({"step": step})
    history.hold()
    history.append({"step": 2, "again": True})
    assert [row["step"] for row in history.rows()] == [0, 1, 2, 3]
    history.release(1)
    assert history.rows() == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]
    history.append({"step": 3})
    assert [row["step"] for row in history.rows()] == [0, 1, 2, 3]


def evaluation(step, reward):
    score = {"reward": reward, "standard_error": 0.125, "count": 8}
    found = {"sets": {"addition": {"domain": "in", **score}}, "domains": {"in": score}, "kl": None, "length": 3.0}
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
    summary = summarise(tmp_path)
    assert summary["before"] is None
    assert summary["after_updates"] == 6
    assert "0.250" not in text_of(table_of(summary))
    assert "0.750 ± 0.125" in text_of(table_of(summary))
    compared = text_of(table(load([tmp_path])))
    assert "0.750 ± 0.125" in compared
    assert "->" not in compared

"""The file of docs/terms.md that a reader plugs in: in a figure of a paper, and in training."""

import pytest
from docs.pages import ROOT, fences
from typer.testing import CliRunner

from klgrad.cli import app

PAGE = ROOT / "docs" / "terms.md"
(FILE,) = (fence.code for fence in fences(PAGE) if fence.mark == "own")


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "my.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_the_table_of_the_page_is_printed():
    arms = ["--with", "my.py:bounded", "--with", "my.py:huber"]
    done = CliRunner().invoke(app, ["reproduce", "tang-munos/fig2", *arms, "--out", "out"])
    assert done.exit_code == 0, done.output
    (shown,) = (fence.code for fence in fences(PAGE) if "klgrad reproduce" in fence.code)
    lines = [line.split() for line in done.output.splitlines()]
    for line in shown.split("...\n")[1].splitlines():
        assert line.split() in lines
    again = CliRunner().invoke(app, ["reproduce", "tang-munos/fig2", "--with", "my.py:loss", "--out", "out"])
    numbers = next(line.split()[1:] for line in again.output.splitlines() if line.startswith("my.py:loss"))
    assert ["my.py:bounded", *numbers] in lines


@pytest.mark.slow
def test_the_term_of_the_page_is_trained():
    from klgrad.training.report import formula
    from klgrad.training.settings import parse

    for command in ("train", "distill"):
        assert formula(parse(command, ["--kl", "my.py:term", "--use_cpu"])).startswith("∇ cubic, token level")

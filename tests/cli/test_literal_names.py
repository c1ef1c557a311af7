"""Names of files, folders, columns and losses are printed unchanged, even if they look like markup."""

import ast
import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from logs.synthetic import sampled, write
from typer.testing import CliRunner

import klgrad
from klgrad.audit import audit
from klgrad.audit.render import terminal as tables
from klgrad.audit.render.terminal import to_markdown
from klgrad.cli import app
from klgrad.cli.console import stdout

LONG = "Ж" * 100
HOSTILE = ["x[y]z", "[a]", "a[/]b", "[bold]", "[/]", "a:smile:b", "a|b`c``d", r"$\bad$", "_hidden", LONG]
LOSS = "def loss(logp, ref_logp):\n    return 0.5 * (logp - ref_logp) ** 2\n"
STEP = {"step": 1, "task_reward": 0.5, "kl/reverse/k3/per_sequence": 0.1, "length/mean": 3.0}


def run(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code in (0, 1), result.output
    return result


def joined(shown):
    """The text without the line breaks of its column."""
    return "".join(shown.split()).replace("│", "")


def times(name, shown):
    """How often a name was shown. The long name spans lines with other columns, so its letters are counted."""
    return shown.count(LONG[0]) // len(LONG) if LONG in name else joined(shown).count(name)


def run_folder(folder):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"objective": {"objective": "E[reward] [b]"}}))
    (folder / "history.jsonl").write_text(json.dumps(STEP) + "\n")
    return folder


@pytest.fixture(scope="module")
def audited():
    return audit(lambda logp, ref_logp: 0.5 * (logp - ref_logp) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_audit(name, tmp_path, monkeypatch, audited):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("klgrad.audit.audit", lambda subject, **_: replace(audited, name=subject.name))
    path = Path(f"{name}.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(LOSS)
    result = run("audit", f"{path}:loss", "--expect", "nothing")
    assert times(f"{path}:loss", result.stdout) == 2  # the title, and what was expected of it


@pytest.mark.parametrize("name", HOSTILE)
def test_the_overview_of_an_audit(name, capsys, audited):
    for width in (80, 160):
        stdout().print(tables.overview([replace(audited, name=name)], width))
        assert times(name, capsys.readouterr().out) == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_logs(name, tmp_path):
    data = sampled(rows=8, tokens=5)
    path = tmp_path / name / f"{name}.jsonl"
    path.parent.mkdir(parents=True)
    write(path, {name: data["logp"], "ref_logp": data["ref_logp"]})
    result = run("logs", path, "--column", f"logp={name}", "--json", tmp_path / name / "r.json")
    assert times(name, result.stdout) >= 2
    assert str(tmp_path / name / "r.json") in result.stderr


@pytest.mark.parametrize("name", HOSTILE)
def test_compare(name, tmp_path, monkeypatch):
    monkeypatch.setattr("klgrad.training.figures.drawn", lambda *_: [b""])  # takes seconds; the legend is tested below
    result = run("compare", run_folder(tmp_path / name), run_folder(tmp_path / "b"), "--out", tmp_path / name / "f.png")
    assert times(Path(name).name, result.stdout) >= 1
    assert "E[reward][b]" in joined(result.stdout)
    assert str(tmp_path / name / "f.png") in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_the_legend_of_a_figure(name):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from klgrad.training.figures import RunHistory, _legend

    figure = Figure()
    _legend(figure, [RunHistory(name, []), RunHistory("b", [])])
    figure.canvas.draw()
    texts = figure.legends[0].get_texts()
    assert [text.get_text() for text in texts] == [name, "b"]
    assert not any(text.get_parse_math() for text in texts)


@pytest.mark.slow
def test_reproduce(tmp_path):
    out = tmp_path / "a[/]b[c]" / ("x" * 200)
    assert f"Numbers and figures are in {out}/\n" in run("reproduce", "schulman/table", "--quick", "--out", out).stdout


@pytest.mark.many
@pytest.mark.slow
def test_train(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from training.small import SMALL, arguments, write_model

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = write_model(tmp_path / "[m]odel[/]")
    folder = tmp_path / "x[y]z" / "a[/]$b_"
    settings = arguments(**{**SMALL, "model": model, "output_dir": folder, "max_steps": 1, "eval_size": 2})
    planned = run("train", *settings, "--dry_run")
    assert "[m]odel[/]" in joined(planned.stdout)
    done = run("train", *settings)
    assert f"{folder}/" in joined(done.stdout)
    assert "after 0 updates  in-domain" in done.stderr
    assert (folder / "run.png").exists()


@pytest.mark.parametrize("name", [*HOSTILE, "`a`", "a\nb", "a\\|b", "|"])
def test_markdown(name, audited):
    header, _, row = to_markdown([replace(audited, name=name)]).splitlines()
    assert row.count("|") == header.count("|")  # and none of them in the name
    cell = row.split("|")[1].strip()
    assert html.unescape(re.fullmatch("(`|<code>)(.*?)(`|</code>)", cell)[2]) == name.replace("\n", " ")


SOURCES = [p for p in Path(klgrad.__file__).parent.rglob("*.py") if "rich" in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_markup_is_off_wherever_rich_prints(path):
    """Consoles are created in one place; columns of a progress bar have a separate switch, which is off."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    for call in calls:
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        assert name != "Console" or path.parts[-2:] == ("cli", "console.py"), ast.unparse(call)
        assert name != "TextColumn" or "markup=False" in ast.unparse(call)
        assert name != "from_markup"

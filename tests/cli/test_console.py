"""What is printed and written: files, pipes and standard output; names unchanged, even if they look like markup."""

import ast
import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from logs.synthetic import sampled, write
from typer.testing import CliRunner

import klgrad
from klgrad.audit import audit, terminal as tables
from klgrad.audit.terminal import to_markdown
from klgrad.cli import app
from klgrad.cli.console import stdout
from klgrad.errors import LossCallError, OutputError
from klgrad.support import text_table

# The commands write to the files, pipes and devices that a user names, and to standard output.


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--markdown", "--html"])
def test_a_link_stays_a_link_and_the_command_prints_where_it_wrote(option, tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    result = run("audit", "k1-loss", option, tmp_path / "link")
    assert result.exit_code == 0
    assert result.stderr == f"Wrote {tmp_path / 'link'}\n"
    assert (tmp_path / "link").is_symlink()
    assert "k1-loss" in (tmp_path / "target").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_standard_output_has_only_the_file(path, tmp_path):
    log = write(tmp_path / "log.npz", sampled(rows=8, tokens=5))
    assert run("logs", log, "--json", tmp_path / "r.json").stderr.endswith(f"Wrote {tmp_path / 'r.json'}\n")
    audited = run("audit", "k1-loss", "--json", path)
    assert json.loads(audited.stdout)["results"][0]["name"] == "k1-loss"
    assert "regularises nothing" in audited.stderr
    assert "Wrote" not in audited.stderr
    logs = run("logs", log, "--json", path)
    assert json.loads(logs.stdout)["rows"] == 8
    assert "What to change" in logs.stderr


def test_standard_output_takes_one_file(tmp_path):
    result = run("audit", "k1-loss", "--json", "-", "--html", "-")
    assert isinstance(result.exception, OutputError)
    assert "standard output for one file" in str(result.exception)
    assert result.stdout == ""


def test_a_failed_expectation_is_printed_on_standard_error():
    result = run("audit", "k1-loss", "--json", "-", "--expect", "reverse-kl-token")
    assert result.exit_code == 1
    assert "expected reverse-kl-token on-policy, found nothing" in result.stderr
    json.loads(result.stdout)


def test_the_report_is_shown_even_if_a_path_cannot_be_written(tmp_path):
    log = write(tmp_path / "log.npz", sampled(rows=8, tokens=5))
    for arguments, path, reason, shown in (
        (("audit", "k1-loss"), tmp_path, "Is a directory", "regularises nothing"),
        (("logs", log), log / "report.json", "", "What to change"),
    ):
        result = run(*arguments, "--json", path)
        assert isinstance(result.exception, OutputError)
        assert reason in str(result.exception)
        assert shown in result.stdout


@pytest.mark.many
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_process_substitution_receives_the_file(tmp_path):
    """The shell's own pipe, and an open file behind a descriptor."""
    command = f"{sys.executable} -m klgrad audit k1-loss"
    script = f"{command} --json >(cat > piped.json) --markdown /dev/fd/5 5> table.md > /dev/null; wait $!"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "piped.json").read_text())["results"]
    assert "`k1-loss`" in (tmp_path / "table.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["piped.json", "table.md"]


def test_what_a_loss_prints_is_shown_when_it_fails(tmp_path):
    (tmp_path / "printing.py").write_text("def fails(logp):\n    print('before the failure')\n    raise ValueError\n")
    result = run("audit", f"{tmp_path}/printing.py:fails")
    assert isinstance(result.exception, LossCallError)
    assert "before the failure" in result.stderr


# Names of files, folders, columns and losses are printed unchanged, even if they look like markup.


HOSTILE = ["x[y]z", "[a]", "a[/]b", "[bold]", "[/]", "a:smile:b", "a|b`c``d", r"$\bad$", "_hidden", "Ж" * 100]


@pytest.fixture(scope="module")
def audited():
    return audit(lambda logp, ref_logp: 0.5 * (logp - ref_logp) ** 2)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_on_a_console_and_in_a_table(name, capsys, audited):
    stdout().print(name, text_table([[name, ""]], fold=True), tables.overview([replace(audited, name=name)]))
    shown = "".join(capsys.readouterr().out.split())
    assert shown.count("Ж") == 300 if "Ж" in name else shown.count(name) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_the_legend_of_a_figure(name):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from klgrad.training.figures import RunHistory, _legend

    figure = Figure()
    _legend(figure, [RunHistory(name, []), RunHistory("b", [])], ["red", "blue"])
    figure.canvas.draw()
    texts = figure.legends[0].get_texts()
    assert [text.get_text() for text in texts] == [name, "b"]
    assert not any(text.get_parse_math() for text in texts)


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

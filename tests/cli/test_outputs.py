"""The commands write to the files, pipes and devices that a user names, and to standard output."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from logs.synthetic import sampled, write
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import LossCallError, OutputError


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "log.npz", sampled(rows=8, tokens=5))


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


def test_logs_print_where_they_wrote(log, tmp_path):
    assert run("logs", log, "--json", tmp_path / "r.json").stderr.endswith(f"Wrote {tmp_path / 'r.json'}\n")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_standard_output_has_only_the_file(path, log):
    audited = run("audit", "k1-loss", "--json", path)
    assert json.loads(audited.stdout)["results"][0]["name"] == "k1-loss"
    assert "Regularises nothing" in audited.stderr
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
    result = run("audit", "k1-loss", "--json", tmp_path)
    assert isinstance(result.exception, OutputError)
    assert "which is a folder" in str(result.exception)
    assert "Regularises nothing" in result.stdout


@pytest.mark.slow
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


PRINTING = """
import sys
print("imported")

def loss(logp, ref_logp):
    print("[b]shape", tuple(logp.shape))
    sys.stdout.buffer.write(b"")
    return 0.5 * (logp - ref_logp) ** 2

def fails(logp, ref_logp):
    print("before the failure")
    raise ValueError
"""


@pytest.fixture
def printing(tmp_path):
    (tmp_path / "printing.py").write_text(PRINTING)
    return tmp_path / "printing.py"


@pytest.mark.slow
def test_what_a_loss_prints_is_shown_in_part_and_once(printing, tmp_path):
    result = run("audit", f"{printing}:loss", "--json", "-", "--html", tmp_path / "page.html")
    assert json.loads(result.stdout)["results"][0]["verdict"] == "reverse-kl-token"
    assert re.search(rf"{printing}:loss printed [\d,]+ lines; the first 5:", result.stderr)
    assert result.stderr.count("[b]shape") == 5
    assert result.stderr.count("imported") == 1


def test_what_a_loss_prints_is_shown_when_it_fails(printing):
    result = run("audit", f"{printing}:fails")
    assert isinstance(result.exception, LossCallError)
    assert "before the failure" in result.stderr

"""`klgrad audit`, as a user runs it."""

import json
import sys

import pytest
from typer.testing import CliRunner

from klgrad.audit import catalogue
from klgrad.audit.advice import STANDINGS
from klgrad.audit.subject import COMMON
from klgrad.cli import app, main
from klgrad.errors import KlgradError

LOSS = '''
"""A user's file."""
from klgrad import KLTerm

def mine(logp, ref_logp, mask):
    """My penalty."""
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum() / len(logp)

class Losses:
    @staticmethod
    def other(logp, ref_logp):
        return logp - ref_logp

declared = KLTerm(level="token")
'''


@pytest.fixture
def loss_file(tmp_path):
    path = tmp_path / "losses.py"
    path.write_text(LOSS)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_chosen_cells_in_full():
    result = run("k3-loss", "k1-reward", "--full")
    assert result.exit_code == 0
    assert "forward KL, KL(ref‖π), of each token" in result.output
    assert "descends the reverse KL of whole completions" in result.output


@pytest.mark.parametrize("width", [80, 140])
def test_cells_that_are_not_as_expected_are_marked(width, monkeypatch):
    monkeypatch.setattr("klgrad.cli.console.PIPED_WIDTH", width)
    result = run("k3-loss", "reverse-token-k1", "--expect", "divergence=reverse-kl,unit=token-mean")
    assert result.exit_code == 1
    table = result.stdout.partition("Read from")[0]
    assert table.count("≠ forward KL") == 1
    assert table.count("≠ sum") == 2
    assert table.count("≠") == 3


@pytest.mark.slow
def test_a_users_function_class_member_and_term(loss_file):
    result = run(f"{loss_file}:mine", f"{loss_file}:Losses.other", f"{loss_file}:declared", "--full")
    assert result.exit_code == 0, result.output
    assert "My penalty." in result.output
    assert result.output.count("--expect reverse-kl-token ") >= 2
    assert "regularises nothing" in result.output


@pytest.mark.slow
def test_a_function_of_a_module(loss_file, monkeypatch):
    monkeypatch.delitem(sys.modules, "losses", raising=False)  # another test may have imported a file of this name
    monkeypatch.syspath_prepend(str(loss_file.parent))
    assert run("losses:mine", "--expect", "reverse-kl-token").exit_code == 0


@pytest.mark.slow
def test_expectations_are_the_exit_status(loss_file):
    assert run(f"{loss_file}:mine", "--expect", "reverse-kl-token").exit_code == 0
    failed = run(f"{loss_file}:mine", "--expect", "reverse-kl-sequence")
    assert failed.exit_code == 1
    assert "expected reverse-kl-sequence on-policy, found reverse-kl-token" in failed.output
    assert run("ratio-k3-loss", "--expect-off-policy", "reverse-kl-token-sampler").exit_code == 0
    assert run("ratio-k3-loss", "--expect-off-policy", "reverse-kl-token").exit_code == 1
    assert run("squared-sequence", "--expect", "squared-sequence").exit_code == 0  # on-policy they are one
    assert run("k2-loss-length-mean", "--expect", "reverse-kl-token").exit_code == 1
    assert run("k2-loss-length-mean", "--expect", "divergence=reverse-kl,unit=completion-mean").exit_code == 0
    assert run("k1-loss", "--expect-off-policy", "climbs forward-kl-sampler-sequence").exit_code == 0
    strict = run("ratio-k3-loss", "--expect", "reverse-kl-token", "--strict")
    assert strict.exit_code == 1
    wanted = "ratio-k3-loss: expected a finite gradient without a dead zone, right in float32, found float32"
    assert wanted in strict.output


def test_a_verdict_of_large_batches_is_expected_and_not_strict():
    assert run("k2-loss-token-mean", "--expect", "reverse-kl-token").exit_code == 0
    strict = run("k2-loss-token-mean", "--expect", "reverse-kl-token", "--strict")
    assert strict.exit_code == 1
    assert "reverse-kl-token in large batches only" in strict.output


def test_json_has_the_documented_fields(tmp_path):
    file = tmp_path / "deep" / "audit.json"
    assert run("k1-loss", "ratio-k3-loss", "--json", file).exit_code == 0
    data = json.loads(file.read_text())
    promised = {
        "name",
        "verdict",
        "verdict_off_policy",
        "holds",
        "anatomy",
        "call",
        "scale",
        "variance",
        "finite",
        "advice",
    }
    for row in data["results"]:
        assert promised <= set(row)
        assert all(set(remedy) == {"do", "use", "why"} for remedy in row["remedies"])
    first, second = data["results"]
    (remedy,) = first["remedies"]
    assert (remedy["do"], remedy["use"]) == ("", ["k2-loss", "KLTerm(level='token')"])
    assert (first["verdict"], first["scale"]) == ("nothing", None)
    assert second["verdict_off_policy"] == "reverse-kl-token-sampler"
    assert list(file.parent.iterdir()) == [file]


def test_markdown_is_a_table(tmp_path):
    file = tmp_path / "audit.md"
    assert run("k3-loss-clamped", "--markdown", file).exit_code == 0
    header, rule, row = file.read_text().splitlines()
    assert header.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| `k3-loss-clamped` | forward KL where l > -2.61 and l < 11")
    assert "dead for l below -2.61 or above 11" in row


@pytest.mark.slow
@pytest.mark.many
def test_the_whole_catalogue_is_one_table():
    result = run("--catalogue")
    assert result.exit_code == 0
    for name in catalogue():
        assert name[:24] in result.output  # a longer name may continue on the next line


def test_without_a_name_the_common_losses_are_grouped_by_what_they_are():
    result = run()
    assert result.exit_code == 0
    for name in COMMON:
        assert name in result.output
    titles = [line for line in result.output.splitlines() if line.strip() in STANDINGS.values()]
    assert titles == list(STANDINGS.values())
    assert f"{len(COMMON)} of {len(catalogue())} losses" in result.output


BAD = {
    "k3-los": "did you mean 'k3-loss'",
    "missing.py:loss": "expected an existing Python file; received missing.py",
    "nosuchpackage.module:loss": "ModuleNotFoundError",
    "missing.py": "expected an existing Python file; received missing.py",
    "{file}:min": "did you mean 'mine'",
    "{file}:": "add the part after ':'",
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments_are_refused(argument, loss_file):
    result = run(argument.format(file=loss_file))
    assert isinstance(result.exception, KlgradError)
    assert BAD[argument] in str(result.exception)


def test_a_file_that_does_not_import_is_refused(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import nonexistent_thing\n")
    result = run(f"{file}:loss")
    assert "No module named 'nonexistent_thing'" in str(result.exception)


def test_a_file_that_parses_arguments_or_exits_is_refused(tmp_path):
    file = tmp_path / "script.py"
    file.write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('needed')\np.parse_args()\n")
    assert "SystemExit" in str(run(f"{file}:loss").exception)


@pytest.mark.slow
def test_a_loss_can_import_modules_from_its_folder_when_it_is_called(tmp_path):
    (tmp_path / "beside_the_loss.py").write_text("half = 0.5\n")
    file = tmp_path / "lazy.py"
    file.write_text(
        "def loss(logp, ref_logp):\n    from beside_the_loss import half\n    return half * (logp - ref_logp) ** 2\n"
    )
    assert run(f"{file}:loss", "--expect", "reverse-kl-token").exit_code == 0


def test_a_report_that_cannot_be_written_is_an_error(tmp_path):
    result = run("k1-loss", "--json", tmp_path)
    assert isinstance(result.exception, KlgradError)
    assert "Is a directory; remedy: give another path" in str(result.exception)


@pytest.mark.parametrize("wrong", ["reverse-kl-sequences", "reverse_kl_sequence"])
def test_an_unknown_verdict_is_refused(wrong):
    result = run("k3-loss", "--expect", wrong)
    assert result.exit_code != 0
    assert "did you mean 'reverse-kl-sequence'" in " ".join((result.output + str(result.exception)).split())


def test_errors_end_with_status_2_and_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["klgrad", "audit", "k3-los"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("UnknownNameError: expected a known loss")
    assert "Traceback" not in shown

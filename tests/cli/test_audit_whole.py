"""`klgrad audit --whole`, as a user runs it."""

import json

import pytest
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import NotAuditableError
from klgrad.frameworks import FRAMEWORKS
from klgrad.policy_losses import POLICY_LOSSES

LOSS = '''
def mine(logp, ref_logp, mask, advantages):
    """My whole loss."""
    return ((-advantages * logp + 0.05 * (logp - ref_logp) ** 2) * mask).sum(-1).mean()
'''


@pytest.fixture
def loss_file(tmp_path):
    path = tmp_path / "losses.py"
    path.write_text(LOSS)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["audit", "--whole", *map(str, arguments)])


def test_a_users_loss_beside_a_published_one(loss_file, tmp_path):
    result = run(
        f"{loss_file}:mine", "rloo", "--json", tmp_path / "whole.json", "--markdown", tmp_path / "whole.md", "--full"
    )
    assert result.exit_code == 0, result.output
    assert "My whole loss." in result.output
    assert "descends KL(μ‖π)" in " ".join(result.output.split())
    assert "Source: arXiv 2402.14740" in result.output
    mine, rloo = json.loads((tmp_path / "whole.json").read_text())["results"]
    assert (mine["kl"]["verdict"], mine["policy"]["ratio"]) == ("reverse-kl-token", "none")
    assert (rloo["policy"]["baseline"], rloo["policy"]["drift"]["positive"]["size"]) == ("leave-one-out", 0)
    assert "`rloo`" in (tmp_path / "whole.md").read_text()


def test_the_page_has_the_curves(loss_file, tmp_path):
    result = run(f"{loss_file}:mine", "gspo", "--html", tmp_path / "whole.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "whole.html").read_text().count('<article class="card"') == 2


def test_an_expected_kl(loss_file):
    assert run(f"{loss_file}:mine", "--expect", "reverse-kl-token").exit_code == 0
    result = run(f"{loss_file}:mine", "--expect", "forward-kl-token")
    assert result.exit_code == 1
    assert "expected forward-kl-token on-policy, found reverse-kl-token" in result.output


@pytest.mark.parametrize("option", [["--strict"], ["--all"], ["--catalogue"]])
def test_an_option_that_does_not_apply_is_refused(loss_file, option):
    result = run(f"{loss_file}:mine", *option)
    assert f"received --whole {option[0]}" in str(result.exception)


@pytest.mark.skipif(FRAMEWORKS["verl"].version is not None, reason="verl is installed")
def test_a_framework_that_is_not_installed_shows_its_record():
    result = run("verl")
    assert result.exit_code == 0, result.output
    assert "verl is not installed here: audited on 20" in result.output
    assert "loss_mode=vanilla" in result.output
    assert "loss_mode=vanilla" not in run("verl loss_mode=gspo").output
    for more in (["--json", "-"], ["--expect", "nothing"], ["--set", "beta=1"]):
        assert isinstance(run("verl", *more).exception, NotAuditableError), more


def test_an_unknown_name():
    result = run("rlooo")
    assert result.exit_code != 0


@pytest.mark.many
def test_without_a_loss_it_is_the_published_ones_in_80_columns(monkeypatch):
    monkeypatch.setattr("klgrad.cli.console.PIPED_WIDTH", 80)
    result = run()
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    for name in POLICY_LOSSES:
        assert f"{name} " in result.output

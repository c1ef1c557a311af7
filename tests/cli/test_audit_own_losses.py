"""`klgrad audit` on files of losses: settings, failures, and what losses print."""

import json
import subprocess
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import LossCallError

LOSSES = '''
from torch import nn

def k2(log_prob, ref_log_prob, response_mask, beta):
    """My penalty."""
    return beta * (0.5 * (log_prob - ref_log_prob) ** 2 * response_mask).sum() / len(log_prob)

class K3(nn.Module):
    def forward(self, logp, ref_logp):
        return (ref_logp - logp).exp() - (ref_logp - logp) - 1

def helper(x, dim): return x.sum(dim)

def broken(logp, ref_logp): return logp.nosuch
'''

NOISY = """
import sys, warnings
print("imported")
warnings.warn("deprecated on import")

def noisy(logp, ref_logp):
    print("loss of", logp.shape)
    print("in progress", file=sys.stderr)
    warnings.warn("deprecated")
    return (logp - ref_logp) ** 2 / 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "several.py"
    path.write_text(LOSSES)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.mark.slow
def test_a_file_means_every_loss_in_it(file, tmp_path):
    result = run(file, "--set", "beta=0.5", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert {r["name"].rpartition(":")[2]: r["verdict"] for r in found} == {
        "k2": "reverse-kl-token",
        "K3": "forward-kl-token",
    }
    assert found[0]["scale"] == pytest.approx(0.5)
    assert f"{file}:helper is not audited: parameters x, dim, of which x, dim" in result.stderr
    assert f"{file}:broken: LossCallError: expected" in result.stderr
    assert "has no attribute 'nosuch'" in result.stderr
    assert result.exit_code == 2
    assert "forward KL" in result.stdout
    assert "My penalty." not in result.stdout  # a whole file is shown as one table


PARTLY = """
def k2(logp, ref_logp): return (logp - ref_logp) ** 2 / 2
def other(x, y): return x - y
class Penalty:
    def compute(self, logp, ref_logp): return logp - ref_logp
    def save(self, path): ...
class Config: ...
"""


@pytest.mark.slow
def test_where_something_is_expected_nothing_of_a_file_may_be_skipped(tmp_path):
    file, page = tmp_path / "partly.py", tmp_path / "page.html"
    file.write_text(PARTLY)
    data, table = tmp_path / "found.json", tmp_path / "table.md"
    for options, status in (([], 0), (["--expect", "reverse-kl-token"], 2), (["--strict"], 2)):
        outputs = ("--html", page, "--json", data, "--markdown", table)
        result = run(file, *options, *outputs)
        assert result.exit_code == status
        *_, last = result.stderr.strip().splitlines()
        assert last.startswith("1 of 3 audited")
        assert ("name the losses" in last) == bool(options)
    assert f"{file}:Penalty is not audited: a class that cannot be called; name a method, {file}:Penalty.compute\n" in (
        result.stderr
    )
    assert "Config" not in result.stderr
    shown = page.read_text().partition("Not audited")[2]
    assert "Penalty" in shown
    assert "parameters x, y" in shown
    reasons = json.loads(data.read_text())["not_audited"]
    assert list(reasons) == [f"{file}:other", f"{file}:Penalty"]
    assert reasons[f"{file}:Penalty"] == f"a class that cannot be called; name a method, {file}:Penalty.compute"
    assert f"- `{file}:other`: parameters x, y, of which" in table.read_text().partition("Not audited:\n\n")[2]
    differs = run(file, "--expect", "nothing")
    assert differs.exit_code == 2
    assert "found reverse-kl-token" in differs.stdout
    assert f"remedy: name a method, {file}:Penalty.compute" in str(run(f"{file}:Penalty").exception)


@pytest.mark.slow
def test_one_failure_does_not_stop_the_others(file):
    result = run(f"{file}:broken", "nosuch.py:loss", f"{file}:K3", "k3-los")
    assert result.exit_code == 2
    assert "forward KL" in result.stdout
    assert result.stderr.count("Error: expected") == 3
    failed = run(f"{file}:broken", "k3-los")
    assert failed.exit_code == 2
    assert failed.stdout == ""


def test_progress_is_told_where_there_is_no_bar(monkeypatch):
    monkeypatch.setattr("klgrad.cli.console.SILENCE", 0.01)
    result = run("k1-loss", "k2-loss")
    assert "Auditing k2-loss (2 of 2)" in result.stderr
    assert "Auditing" not in result.stdout


def test_names_that_are_not_known_get_near_ones(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    for name, remedy in {
        "several.py:nosuch": "known: K3, broken, helper, k2",
        "several.py:k22": "did you mean 'k2'",
        "several": "write several.py",
        "k3": "names that contain it: k3-both, k3-both-half,",
    }.items():
        error = str(run(name).exception)
        assert remedy in error
        assert len(error) < 400


def test_a_single_failure_is_the_error(file):
    assert isinstance(run(f"{file}:broken").exception, LossCallError)
    lacks = run(f"{file}:k2").exception
    assert "if beta is a tensor, give its role by --name beta=ROLE" in str(lacks)
    assert "give it by --set beta=VALUE" in str(lacks)


@pytest.mark.slow
def test_several_losses_end_in_one_table(file):
    losses = (f"{file}:K3", f"{file}:k2", "--set", "beta=2")
    table, result = run(*losses).stdout, run(*losses, "--full")
    assert result.exit_code == 0, result.output
    assert "My penalty." in result.stdout
    last = result.stdout.rpartition("╯")[2]
    assert table.strip() == last.strip()
    assert "K3" in last
    assert "k2" in last


WRONG = {
    ("bta=1",): "settings that are parameters of",
    ("beta",): "expected NAME=VALUE",
    ("beta=1", "gamma=2"): "received gamma",
    ("beta=ref_log_probs",): "remedy: write --name beta=ref_logp",
}


@pytest.mark.parametrize("settings", WRONG)
def test_wrong_settings_are_refused(settings, file):
    result = run(f"{file}:k2", *(x for s in settings for x in ("--set", s)))
    assert WRONG[settings] in str(result.exception)


def test_a_setting_that_no_loss_has_is_refused(file):
    for names in ([file], [f"{file}:k2", f"{file}:K3"], ["k3-loss"]):
        result = run(*names, "--set", "beta=1", "--set", "gamma=2")
        assert "parameters of one of the losses; received" in str(result.exception)
        assert "gamma; remedy: check the spelling" in str(result.exception)


NAMELESS = """
def mine(x, y, values):
    return (x - y) ** 2 / 2 + values
class Penalty:
    def __init__(self, beta): self.beta = beta
    def compute(self, logp, ref_logp): return self.beta * (logp - ref_logp) ** 2 / 2
def dpo(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps): ...
"""


def test_names_and_settings_of_a_constructor(tmp_path):
    file, found = tmp_path / "nameless.py", tmp_path / "found.json"
    file.write_text(NAMELESS)
    options = ("--set", "values=0.0", "--set", "beta=0.5", "--name", "x=logp", "--name", "y=ref_logp")
    result = run(f"{file}:mine", f"{file}:Penalty.compute", *options, "--json", found)
    assert result.exit_code == 0, result.output
    results = json.loads(found.read_text())
    assert "not_audited" not in results
    assert [r["verdict"] for r in results["results"]] == ["reverse-kl-token", "reverse-kl-token"]
    assert results["results"][1]["scale"] == pytest.approx(0.5)
    assert "received z" in str(run(f"{file}:mine", *options[:2], *options[4:], "--name", "z=mask").exception)
    assert "a role for x: logp," in str(run(f"{file}:mine", "--name", "x=other").exception)
    assert "a preference loss, of chosen_logps" in str(run(f"{file}:dpo").exception)
    assert "a constructor that needs beta" in str(run(f"{file}:Penalty.compute").exception)


@pytest.mark.slow
def test_what_a_loss_prints_is_shown_once(tmp_path):
    """In a process of its own: pytest would catch the warnings first."""
    file = tmp_path / "noisy.py"
    file.write_text(NOISY)
    command = [sys.executable, "-m", "klgrad", "audit", f"{file}:noisy", "--html", str(tmp_path / "page.html")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr.count("imported") == 1
    assert result.stderr.count("UserWarning: deprecated on import") == 1
    assert 1 <= result.stderr.count("loss of torch.Size") <= 5
    assert 1 <= result.stderr.count("in progress") <= 5
    assert result.stderr.count("UserWarning: deprecated\n") == 1
    assert "lines; the first 5:" in result.stderr
    assert "loss of" not in result.stdout
    assert len(result.stderr.splitlines()) < 15


HELPED = {
    "at the start": "from helpers import kl\ndef loss(logp, ref_logp): return kl(logp - ref_logp)\n",
    "when it is called": "def loss(logp, ref_logp):\n    from helpers import kl\n    return kl(logp - ref_logp)\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", HELPED.values(), ids=HELPED)
def test_each_file_has_its_own_helpers(code, tmp_path, monkeypatch):
    """Also where a test session has imported a third module of that name, which it keeps."""
    of_session = ModuleType("helpers")
    of_session.__file__ = str(tmp_path / "helpers.py")
    monkeypatch.setitem(sys.modules, "helpers", of_session)
    for folder, kl in {"a": "l ** 2 / 2", "b": "(-l).exp() - 1 + l"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helpers.py").write_text(f"def kl(l): return {kl}\n")
        (tmp_path / folder / "losses.py").write_text(code)
    file = tmp_path / "found.json"
    names = [f"{tmp_path}/{folder}/losses.py:loss" for folder in "aba"]
    assert run(*names, "--json", file).exit_code == 0
    verdicts = [r["verdict"] for r in json.loads(file.read_text())["results"]]
    assert verdicts == ["reverse-kl-token", "forward-kl-token", "reverse-kl-token"]
    assert sys.modules["helpers"] is of_session

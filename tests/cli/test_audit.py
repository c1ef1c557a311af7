"""`klgrad audit`, as a user runs it: the catalogue, files of losses, frameworks, and whole policy losses."""

import importlib.metadata
import json
import re
import subprocess
import sys
from io import StringIO
from types import ModuleType

import pytest
from rich.console import Console
from typer.testing import CliRunner

from klgrad.audit import catalogue
from klgrad.audit.subject import COMMON
from klgrad.cli import app
from klgrad.cli.audit import matching, recorded_table
from klgrad.errors import KlgradError, LossCallError, NotAuditableError, UnknownNameError
from klgrad.frameworks import FRAMEWORKS, recorded
from klgrad.policy_losses import POLICY_LOSSES
from klgrad.zoo import K2_OR_TOKEN


def run(*arguments, status=None):
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    assert status in (None, result.exit_code), result.output
    return result


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

def whole(logp, ref_logp, mask, advantages):
    """My whole loss."""
    return ((-advantages * logp + 0.05 * (logp - ref_logp) ** 2) * mask).sum(-1).mean()
'''


def written(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def loss_file(tmp_path):
    return written(tmp_path / "losses.py", LOSS)


def test_chosen_cells_in_full():
    result = run("k3-loss", "k1-reward", "--full", status=0)
    assert "no: it descends the forward KL, token by token" in result.output
    assert "yes, on fresh samples only: it descends the reverse KL, whole completions" in result.output


@pytest.mark.parametrize("width", [80, 140])
def test_cells_that_are_not_as_expected_are_marked(width, monkeypatch):
    monkeypatch.setattr("klgrad.cli.console.PIPED_WIDTH", width)
    result = run("k3-loss", "reverse-token-k1", "--expect", "divergence=reverse-kl,unit=token-mean", status=1)
    table = result.stdout.partition("l is log")[0]
    assert table.count("≠ forward KL") == 1
    assert table.count("≠ sum") == 2
    assert table.count("≠") == 3


@pytest.mark.slow
def test_a_users_function_class_member_and_term(loss_file):
    result = run(f"{loss_file}:mine", f"{loss_file}:Losses.other", f"{loss_file}:declared", "--full", status=0)
    assert "My penalty." in result.output
    assert result.output.count("--expect reverse-kl-token ") >= 2
    assert "regularises nothing" in result.output


@pytest.mark.slow
def test_a_function_of_a_module(loss_file, monkeypatch):
    monkeypatch.delitem(sys.modules, "losses", raising=False)  # another test may have imported a file of this name
    monkeypatch.syspath_prepend(str(loss_file.parent))
    run("losses:mine", "--expect", "reverse-kl-token", status=0)


NOT_FINITE = "expected a finite gradient without a dead zone, right in float32, found more than 1% off in float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "failure"),
    [
        ("{file}:mine", ("--expect", "reverse-kl-token"), ""),
        ("{file}:mine", ("--expect", "reverse-kl-sequence"), "reverse-kl-sequence on-policy, found reverse-kl-token"),
        ("ratio-k3-loss", ("--expect-off-policy", "reverse-kl-token-sampler"), ""),
        ("ratio-k3-loss", ("--expect-off-policy", "reverse-kl-token"), "expected reverse-kl-token off-policy"),
        ("ratio-k3-loss", ("--expect", "reverse-kl-token", "--strict"), f"ratio-k3-loss: {NOT_FINITE}"),
        ("squared-sequence", ("--expect", "squared-sequence"), ""),  # on-policy they are one
        ("k2-loss-length-mean", ("--expect", "reverse-kl-token"), "expected reverse-kl-token on-policy"),
        ("k2-loss-length-mean", ("--expect", "divergence=reverse-kl,unit=completion-mean"), ""),
        ("k1-loss", ("--expect-off-policy", "climbs forward-kl-sampler-sequence"), ""),
        ("k2-loss-token-mean", ("--expect", "reverse-kl-token"), ""),
        ("k2-loss-token-mean", ("--expect", "reverse-kl-token", "--strict"), "reverse-kl-token in large batches only"),
        ("{file}:whole", ("--whole", "--expect", "reverse-kl-token"), ""),
        ("{file}:whole", ("--whole", "--expect", "forward-kl-token"), "expected forward-kl-token on-policy, found rev"),
    ],
)
def test_expectations_are_the_exit_status(name, options, failure, loss_file):
    result = run(name.format(file=loss_file), *options, status=bool(failure))
    assert failure in result.output


def test_json_has_the_documented_fields(tmp_path):
    file = tmp_path / "deep" / "audit.json"
    run("k1-loss", "ratio-k3-loss", "--json", file, status=0)
    data = json.loads(file.read_text())
    promised = {"name", "verdict", "verdict_off_policy", "holds", "anatomy", "call", "scale", "variance", "finite"}
    promised.add("advice")
    for row in data["results"]:
        assert promised <= set(row)
        assert all(set(remedy) == {"do", "use", "why"} for remedy in row["remedies"])
    first, second = data["results"]
    remedy, if_stale = first["remedies"]
    assert if_stale["do"] == "for samples of an older policy too"
    assert (remedy["do"], remedy["use"]) == (K2_OR_TOKEN.do, ["k2-loss", "KLTerm(level='token')"])
    assert (first["verdict"], first["scale"]) == ("nothing", None)
    assert second["verdict_off_policy"] == "reverse-kl-token-sampler"
    assert list(file.parent.iterdir()) == [file]


def test_markdown_is_a_table(tmp_path):
    file = tmp_path / "audit.md"
    run("k3-loss-clamped", "--markdown", file, status=0)
    header, rule, row = file.read_text().splitlines()
    assert header.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| `k3-loss-clamped` | no | forward KL where -2.61 < l < 11 |")


@pytest.mark.slow
@pytest.mark.many
def test_the_whole_catalogue_is_one_table():
    result = run("--catalogue", status=0)
    for name in catalogue():
        assert name[:24] in result.output  # a longer name may continue on the next line


def test_without_a_name_it_is_the_common_losses():
    result = run(status=0)
    for name in COMMON:
        assert name in result.output
    assert f"{len(COMMON)} of {len(catalogue())} losses" in result.output


# Files of losses: settings, failures, and what losses print.

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
    print("[b]loss of", logp.shape)
    print("in progress", file=sys.stderr)
    warnings.warn("deprecated")
    return (logp - ref_logp) ** 2 / 2
"""


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "several.py", LOSSES)


@pytest.mark.slow
def test_a_file_means_every_loss_in_it(file, tmp_path):
    result = run(file, "--set", "beta=0.5", "--json", tmp_path / "found.json", status=2)
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    verdicts = {r["name"].rpartition(":")[2]: r["verdict"] for r in found}
    assert verdicts == {"k2": "reverse-kl-token", "K3": "forward-kl-token"}
    assert found[0]["scale"] == pytest.approx(0.5)
    assert f"{file}:helper is not audited: parameters x, dim, of which x, dim" in result.stderr
    assert f"{file}:broken: LossCallError: expected" in result.stderr
    assert "has no attribute 'nosuch'" in result.stderr
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
    file, page = written(tmp_path / "partly.py", PARTLY), tmp_path / "page.html"
    data, table = tmp_path / "found.json", tmp_path / "table.md"
    for options, status in (([], 0), (["--expect", "reverse-kl-token"], 2), (["--strict"], 2)):
        outputs = ("--html", page, "--json", data, "--markdown", table)
        result = run(file, *options, *outputs, status=status)
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
    differs = run(file, "--expect", "nothing", status=2)
    assert "found reverse-kl-token" in differs.stdout
    assert f"remedy: name a method, {file}:Penalty.compute" in str(run(f"{file}:Penalty").exception)


@pytest.mark.slow
def test_one_failure_does_not_stop_the_others(file):
    result = run(f"{file}:broken", "nosuch.py:loss", f"{file}:K3", "k3-los", status=2)
    assert "forward KL" in result.stdout
    assert result.stderr.count("Error: expected") == 3
    failed = run(f"{file}:broken", "k3-los", status=2)
    assert failed.stdout == ""


def test_progress_is_told_where_there_is_no_bar(monkeypatch):
    monkeypatch.setattr("klgrad.cli.console.SILENCE", 0.01)
    result = run("k1-loss", "k2-loss")
    assert "Auditing k2-loss (2 of 2)" in result.stderr
    assert "Auditing" not in result.stdout


def test_a_single_failure_is_the_error(file):
    assert isinstance(run(f"{file}:broken").exception, LossCallError)


@pytest.mark.slow
def test_several_losses_end_in_one_table(file):
    losses = (f"{file}:K3", f"{file}:k2", "--set", "beta=2")
    table, result = run(*losses).stdout, run(*losses, "--full", status=0)
    assert "My penalty." in result.stdout
    last = result.stdout.rpartition("╯")[2]
    assert table.strip() == last.strip()
    assert "K3" in last
    assert "k2" in last


NAMELESS = """
def mine(x, y, values):
    return (x - y) ** 2 / 2 + values
class Penalty:
    def __init__(self, beta): self.beta = beta
    def compute(self, logp, ref_logp): return self.beta * (logp - ref_logp) ** 2 / 2
def dpo(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps): ...
"""


def test_names_and_settings_of_a_constructor(tmp_path):
    file, found = written(tmp_path / "nameless.py", NAMELESS), tmp_path / "found.json"
    options = ("--set", "values=0.0", "--set", "beta=0.5", "--name", "x=logp", "--name", "y=ref_logp")
    run(f"{file}:mine", f"{file}:Penalty.compute", *options, "--json", found, status=0)
    results = json.loads(found.read_text())
    assert "not_audited" not in results
    assert [r["verdict"] for r in results["results"]] == ["reverse-kl-token", "reverse-kl-token"]
    assert results["results"][1]["scale"] == pytest.approx(0.5)


REFUSED = {
    "k3-los": "did you mean 'k3-loss'",
    "k3": "names that contain it: k3-both, k3-both-half,",
    "missing.py:loss": "expected an existing Python file; received missing.py",
    "nosuchpackage.module:loss": "ModuleNotFoundError",
    "missing.py": "expected an existing Python file; received missing.py",
    "losses.py:min": "did you mean 'mine'",
    "losses.py:": "add the part after ':'",
    "broken.py:loss": "No module named 'nonexistent_thing'",
    "script.py:loss": "SystemExit",
    "several.py:nosuch": "known: K3, broken, helper, k2",
    "several.py:k22": "did you mean 'k2'",
    "several": "write several.py",
    "several.py:k2": "if beta is a tensor, give its role by --name beta=ROLE.*give it by --set beta=VALUE",
    "k3-loss --expect reverse-kl-sequences": "did you mean 'reverse-kl-sequence'",
    "k3-loss --expect reverse_kl_sequence": "did you mean 'reverse-kl-sequence'",
    "several.py:k2 --set bta=1": "settings that are parameters of",
    "several.py:k2 --set beta": "expected NAME=VALUE",
    "several.py:k2 --set beta=1 --set gamma=2": "received gamma",
    "several.py:k2 --set beta=ref_log_probs": "remedy: write --name beta=ref_logp",
    # settings that no loss has
    "several.py --set beta=1 --set gamma=2": "one of the losses; received gamma; remedy: check the spelling",
    "several.py:k2 several.py:K3 --set beta=1 --set gamma=2": "one of the losses; received gamma; remedy: check",
    "k3-loss --set beta=1 --set gamma=2": "parameters of one of the losses; received beta, gamma; remedy: check",
    "nameless.py:mine --set values=0.0 --name x=logp --name y=ref_logp --name z=mask": "received z",
    "nameless.py:mine --name x=other": "a role for x: logp,",
    "nameless.py:dpo": "a preference loss, of chosen_logps",
    "nameless.py:Penalty.compute": "a constructor that needs beta",
    "nemo-rll": "did you mean 'nemo-rl'",
    "--whole losses.py:whole --strict": "received --whole --strict",
    "--whole losses.py:whole --all": "received --whole --all",
    "--whole losses.py:whole --catalogue": "received --whole --catalogue",
    "--whole rlooo": "did you mean 'rloo'",
}
PARSER = "import argparse\np = argparse.ArgumentParser()\np.add_argument('needed')\np.parse_args()\n"


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_audited_is_refused(line, file, loss_file, monkeypatch):
    monkeypatch.chdir(file.parent)
    for name, text in {"broken": "import nonexistent_thing\n", "script": PARSER, "nameless": NAMELESS}.items():
        written(file.with_name(f"{name}.py"), text)
    result = run(*line.split())
    assert isinstance(result.exception, KlgradError)
    assert re.search(REFUSED[line], str(result.exception))
    assert len(str(result.exception)) < 400 or "several.py:k2" in line


@pytest.mark.slow
def test_what_a_loss_prints_is_shown_once(tmp_path):
    """In a process of its own: pytest would catch the warnings first."""
    file = written(tmp_path / "noisy.py", NOISY)
    outputs = ["--json", "-", "--html", str(tmp_path / "page.html")]
    command = [sys.executable, "-m", "klgrad", "audit", f"{file}:noisy", *outputs]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["results"][0]["verdict"] == "reverse-kl-token"
    assert result.stderr.count("imported") == 1
    assert result.stderr.count("UserWarning: deprecated on import") == 1
    assert 1 <= result.stderr.count("[b]loss of torch.Size") <= 5
    assert 1 <= result.stderr.count("in progress") <= 5
    assert result.stderr.count("UserWarning: deprecated\n") == 1
    assert "lines; the first 5:" in result.stderr


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
    run(*names, "--json", file, status=0)
    verdicts = [r["verdict"] for r in json.loads(file.read_text())["results"]]
    assert verdicts == ["reverse-kl-token", "forward-kl-token", "reverse-kl-token"]
    assert sys.modules["helpers"] is of_session


# Frameworks: single settings, versions, defaults, and what is recorded of those not installed.


def one_line(text):
    return " ".join(text.split())


@pytest.fixture
def nothing_installed(monkeypatch):
    """No framework is found; those with a transcription need none."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("klgrad.frameworks.framework.version", version)


def test_a_setting_by_its_name_is_shown_in_full():
    shown = run("open-instruct kl_estimator=1 loss_denominator=N", status=0)
    assert "looks ahead " in shown.output  # a line of the full report alone
    assert "kl_estimator=3" not in shown.output


def test_some_words_of_a_name_mean_every_setting_that_has_them(tmp_path):
    run("open-instruct   loss_denominator=N", "--markdown", str(tmp_path / "table.md"), status=0)
    names = [line.split("`")[1] for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    assert sorted(names) == [f"open-instruct kl_estimator={number} loss_denominator=N" for number in range(4)]


def test_a_whole_name_means_that_setting_alone():
    known = ["trl rloo a=1", "trl rloo a=1 b=2"]
    assert matching("trl rloo a=1", known) == ["trl rloo a=1"]
    assert matching("trl  a=1", known) == known
    with pytest.raises(UnknownNameError, match=r"setting of trl.*did you mean"):
        matching("trl rloo a=3", known)


def test_a_table_names_the_version_and_marks_the_default():
    shown = run("prime-rl").output
    assert "prime-rl 0.8.0: formulae transcribed from PrimeIntellect-ai/prime-rl, not its own code" in one_line(shown)
    assert shown.count("(default)") == 1
    names = one_line("\n".join(line[: line.find("  ")] for line in shown.splitlines()))  # the first column
    assert "kl_tau (default) prime-rl algorithm=opd" in names


@pytest.mark.parametrize("name", [name for name, framework in FRAMEWORKS.items() if not framework.transcribed])
def test_what_is_not_installed_shows_its_recorded_audit(name, nothing_installed):
    shown, known = run(name, status=0), recorded(name)
    head = f"{name} is not installed here: audited on {known.date} with version {known.version}."
    assert one_line(shown.output).startswith(head)
    assert "Install it to audit your own version: pip install" in shown.output
    assert shown.output.count("(default)") == 1


def test_a_recorded_table_is_not_cut_off_in_a_narrow_terminal(nothing_installed):
    console = Console(width=80, record=True, file=StringIO())
    console.print(recorded_table("ms-swift"))
    assert "…" not in console.export_text()


def test_one_setting_of_what_is_not_installed_and_a_record_beside_what_is_audited(nothing_installed):
    shown = run("trl rloo normalize_advantages=True", status=0)
    assert shown.output.count("normalize_advantages") == 1
    shown = run("verl", "k1-loss")
    assert "verl is not installed here" in shown.output
    assert "regularises nothing" in shown.output
    # A record is no answer to an expectation, or for a file.
    for options in (["--expect", "reverse-kl-token"], ["--strict"], ["--json", "-"]):
        assert isinstance(run("verl", *options).exception, NotAuditableError), options


# `--whole`.


def test_a_users_loss_beside_a_published_one(loss_file, tmp_path):
    outputs = ("--json", tmp_path / "whole.json", "--markdown", tmp_path / "whole.md")
    result = run("--whole", f"{loss_file}:whole", "rloo", *outputs, "--full", status=0)
    assert "My whole loss." in result.output
    assert "A > 0: to μ; A < 0: away from μ" in " ".join(result.output.split())
    assert "Source: arXiv 2402.14740" in result.output
    mine, rloo = json.loads((tmp_path / "whole.json").read_text())["results"]
    assert (mine["kl"]["verdict"], mine["policy"]["ratio"]) == ("reverse-kl-token", "none")
    assert (rloo["policy"]["baseline"], rloo["policy"]["drift"]["positive"]["size"]) == ("leave-one-out", 0)
    assert "`rloo`" in (tmp_path / "whole.md").read_text()


def test_the_page_has_the_curves(loss_file, tmp_path):
    run("--whole", f"{loss_file}:whole", "gspo", "--html", tmp_path / "whole.html", status=0)
    assert (tmp_path / "whole.html").read_text().count("<article ") == 2


@pytest.mark.skipif(FRAMEWORKS["verl"].version is not None, reason="verl is installed")
def test_a_framework_that_is_not_installed_shows_its_record():
    result = run("--whole", "verl", status=0)
    assert "verl is not installed here: audited on 20" in result.output
    assert "loss_mode=vanilla" in result.output
    assert "loss_mode=vanilla" not in run("--whole", "verl loss_mode=gspo").output
    for more in (["--json", "-"], ["--expect", "nothing"], ["--set", "beta=1"]):
        assert isinstance(run("--whole", "verl", *more).exception, NotAuditableError), more


@pytest.mark.many
def test_without_a_loss_it_is_the_published_ones_in_80_columns(monkeypatch):
    monkeypatch.setattr("klgrad.cli.console.PIPED_WIDTH", 80)
    result = run("--whole", status=0)
    assert max(map(len, result.output.splitlines())) <= 80
    for name in POLICY_LOSSES:
        assert f"{name} " in result.output

"""`klgrad logs` and `klgrad diagnose`, as a user runs them."""

import json
import math
import re
from pathlib import Path

import pytest
from logs.synthetic import sampled, write
from rich.console import Console
from typer.testing import CliRunner

from klgrad.cli import app


def run(*arguments, status=None):
    result = CliRunner().invoke(app, ["logs", *map(str, arguments)])
    assert status in (None, result.exit_code), result.output
    return result


@pytest.mark.slow
def test_two_hundred_thousand_tokens(tmp_path):
    path = write(tmp_path / "log.parquet", sampled("temperature", 0.8, rows=4000))
    out = tmp_path / "deep" / "report.json"
    result = run(path, "--cell", "k3-loss", "--json", out, status=0)
    for text in (
        "4,000 completions, 200,000 tokens",
        "KL(π‖ref) by k1",
        "tokens beyond a clamp of k3 at 10",
        "effective sample size",
        "Coefficients of k3-loss, compared with the sound terms",
        "KLTerm(level='token', weighting=ImportanceWeighting('token', bound=None))",
        "It descends forward-kl-token on-policy",
        "Likely cause: temperature. The sampler's temperature is about 0.80 times the trainer's",
        "What to change",
    ):
        assert text in result.stdout
    data = json.loads(out.read_text())
    of_report = {"report", "intervals", "cell", "mismatch", "notes", "advice"}
    assert set(data) == {"file", "columns", "rows", "tokens"} | of_report
    low, high = data["intervals"]["kl/reverse/k3/per_token"]
    assert low < data["report"]["kl/reverse/k3/per_token"] < high
    assert data["report"]["kl/clusters"] > 1
    assert set(data["mismatch"]["intervals"]) < set(data["mismatch"]["metrics"])
    assert data["tokens"] == 200_000
    assert data["mismatch"]["cause"]["name"] == "temperature"
    assert set(data["cell"]["against"]) == {"token", "sequence"}
    assert data["report"]["kl/reverse/k3/per_token/standard_error"] > 0
    assert list(out.parent.iterdir()) == [out]


def test_columns_can_be_named_and_the_cell_chosen(tmp_path):
    data = sampled(rows=8, tokens=5)
    path = write(tmp_path / "log.jsonl", {"mine": data["logp"], "theirs": data["ref_logp"]})
    assert "did you mean" in str(run(path).exception) or "--column logp=NAME" in str(run(path).exception)
    result = run(path, "--column", "logp=mine", "--column", "ref_logp=theirs", "--cell", "k1-loss", status=0)
    assert "Read logp from `mine`, ref_logp from `theirs`." in result.output
    assert "It descends nothing on-policy" in result.output
    assert "Unknown: the file has no log-probs of the sampler" in result.output


def test_what_is_not_finite_is_null(tmp_path):
    path = write(tmp_path / "log.npz", sampled(rows=1, tokens=5))
    run(path, "--cell", "k1-loss", "--json", tmp_path / "r.json", status=0)
    found = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert found["report"]["kl/reverse/k1/per_sequence/standard_error"] is None
    assert found["cell"]["against"]["token"]["correlation"] is None


def test_long_labels_and_terminal_escapes_are_shown_as_text(tmp_path):
    labels = ["\x1b]0;title\x07\x1b[31mred\u202e", "long " * 40, "long " * 40 + "other"]
    rows = [{"logp": [-1.0], "ref_logp": [-1.1], "task": label} for label in labels]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    result = run(path, "--by", "task", "--json", tmp_path / "r.json", "--html", tmp_path / "r.html", status=0)
    assert [part["value"] for part in json.loads((tmp_path / "r.json").read_text())["by"]] == labels
    assert "\x1b" not in result.output
    assert r"\x1b]0;title\x1b[31mred" in result.stdout  # rich leaves out the bell
    assert r"\u202e" in result.stdout
    assert f"{labels[1][:63]}…" in result.stdout


def test_there_is_nothing_to_change_where_the_verdict_is_the_target(tmp_path):
    result = run(write(tmp_path / "log.npz", sampled(rows=8, tokens=5)), "--cell", "ratio-k3-loss")
    assert "Nothing to change" in result.stdout.partition("What to change")[2]


def test_a_report_fits_a_narrow_terminal(tmp_path, monkeypatch):
    from klgrad.cli import logs

    monkeypatch.setattr(logs, "beside", lambda *_: Console(width=80))
    result = run(
        write(tmp_path / "log.npz", sampled("dropout", 0.3, rows=40, tokens=10)), "--cell", "k3-loss", status=0
    )
    assert "…" not in result.stdout
    assert re.search(r"relative difference +\d", result.stdout)


# `klgrad diagnose`: the report, the configuration that settles a cause, JSON, and the status.

FILES = Path(__file__).parents[1] / "frameworks" / "run_files"


def write_scalars(folder, name, values):
    path = folder / name
    path.write_text("".join(json.dumps({"step": i, "kl": x}) + "\n" for i, x in enumerate(values)))
    return path


def diagnosed(*arguments, status=0):
    shown = CliRunner().invoke(app, ["diagnose", *map(str, arguments)])
    assert shown.exit_code == status, shown.output
    return shown.stdout


def settled(i):
    return 0.05 * (1 - math.exp(-i / 9)) * (1 + 0.01 * (i % 3))


def test_a_symptom_comes_with_causes_and_what_decides(tmp_path):
    calm = write_scalars(tmp_path, "calm.jsonl", [settled(i) for i in range(60)])
    assert "No symptom was seen." in diagnosed(calm, "--check")
    path = write_scalars(tmp_path, "run.jsonl", [0.0] * 30)
    shown = diagnosed(path, "--check", status=1)
    for text in (
        "kl is 0 to the last bit in 29 of 29 values",
        "1. The KL is off",
        "decided by: klgrad advise --config FILE",
        "Seen in THUDM/slime#397",
    ):
        assert text in shown
    assert "The configuration of this run says so" not in shown


@pytest.mark.slow
def test_the_configuration_settles_a_cause(tmp_path):
    path, config = write_scalars(tmp_path, "zero.jsonl", [0.0] * 30), tmp_path / "run.yaml"
    config.write_text("beta: 0.0\nloss_type: dapo\n")
    shown = diagnosed(path, "--config", config)
    assert "This run has no KL to a reference." in shown
    assert "1. The KL is off" in shown.split("The configuration of this run says so.")[0]
    # k1 as a loss
    path, config = write_scalars(tmp_path, "run.jsonl", [0.001 * i**1.8 for i in range(60)]), tmp_path / "run.sh"
    actor = "actor_rollout_ref.actor"
    settings = ("use_kl_loss=True", "kl_loss_type=kl", "loss_agg_mode=seq-mean-token-sum")
    config.write_text("python -m verl.trainer.main_ppo " + " ".join(f"{actor}.{setting}" for setting in settings))
    data = json.loads(diagnosed(path, "--config", config, "--json", "-"))
    (run,) = data["runs"]
    rising, wiring = run["symptoms"]
    assert (rising["symptom"], wiring["symptom"]) == ("rising", "wiring")
    assert rising["causes"][0]["settled_by_configuration"] is True
    assert rising["causes"][0]["cause"].startswith("The gradient has no reference in it")
    assert run["beta"] == 0.001


def test_runs_are_compared_by_their_coefficients(tmp_path):
    paths = [write_scalars(tmp_path, f"{i}.jsonl", [(1 + i) * settled(j) for j in range(60)]) for i in range(3)]
    shown = diagnosed(*paths, "--beta", 0.01, "--beta", 0.1, "--beta", 1)
    assert "A larger β gives a larger KL" in shown
    assert "give their coefficients" in diagnosed(*paths)
    failed = CliRunner().invoke(app, ["diagnose", str(paths[0]), "--beta", "1", "--config", str(FILES / "grpo.yaml")])
    assert "leave --beta out" in str(failed.exception)

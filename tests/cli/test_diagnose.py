"""`klgrad diagnose`: the report, the configuration that settles a cause, JSON, and the status."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from klgrad.cli import app

FILES = Path(__file__).parents[1] / "frameworks" / "run_files"


def write(folder, name, values, **metrics):
    path = folder / name
    rows = [{"step": i, "kl": x, **{k: v[i] for k, v in metrics.items()}} for i, x in enumerate(values)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def diagnosed(*arguments, status=0):
    shown = CliRunner().invoke(app, ["diagnose", *map(str, arguments)])
    assert shown.exit_code == status, shown.output
    return shown.stdout


def settled(i):
    return 0.05 * (1 - math.exp(-i / 9)) * (1 + 0.01 * (i % 3))


def test_a_calm_run(tmp_path):
    path = write(tmp_path, "run.jsonl", [settled(i) for i in range(60)])
    assert "No symptom was seen." in diagnosed(path, "--check")


def test_a_symptom_comes_with_causes_and_what_decides(tmp_path):
    path = write(tmp_path, "run.jsonl", [0.0] * 30)
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
    path = write(tmp_path, "run.jsonl", [0.0] * 30)
    config = tmp_path / "run.yaml"
    config.write_text("beta: 0.0\nloss_type: dapo\n")
    shown = diagnosed(path, "--config", config)
    assert "This run has no KL to a reference." in shown
    assert "1. The KL is off" in shown.split("The configuration of this run says so.")[0]


@pytest.mark.slow
def test_k1_as_a_loss_is_told_from_the_configuration(tmp_path):
    path = write(tmp_path, "run.jsonl", [0.001 * i**1.8 for i in range(60)])
    config = tmp_path / "run.sh"
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
    paths = [write(tmp_path, f"{i}.jsonl", [(1 + i) * settled(j) for j in range(60)]) for i in range(3)]
    shown = diagnosed(*paths, "--beta", 0.01, "--beta", 0.1, "--beta", 1)
    assert "A larger β gives a larger KL" in shown
    assert "give their coefficients" in diagnosed(*paths)
    failed = CliRunner().invoke(app, ["diagnose", str(paths[0]), "--beta", "1", "--config", str(FILES / "grpo.yaml")])
    assert "leave --beta out" in str(failed.exception)

"""`klgrad logs`, as a user runs it."""

import json
import subprocess
import sys

import pytest
from logs.synthetic import sampled, write
from typer.testing import CliRunner

from klgrad.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["logs", *map(str, arguments)])


@pytest.mark.slow
def test_two_hundred_thousand_tokens(tmp_path):
    path = write(tmp_path / "log.parquet", sampled("temperature", 0.8, rows=4000))
    out = tmp_path / "deep" / "report.json"
    result = run(path, "--json", out)
    assert result.exit_code == 0, result.output
    for text in (
        "4,000 completions, 200,000 tokens",
        "KL(π‖ref) by k1",
        "tokens beyond a clamp of k3 at 10",
        "effective sample size",
        "What k3-loss puts on the tokens, against the sound terms",
        "KLTerm(level='token', sampler=OffPolicy('token', bound=None))",
        "It descends forward-kl-token on-policy",
        "Likely cause: temperature. The sampler's temperature is about 0.80 times the trainer's",
        "What to change",
    ):
        assert text in result.stdout
    data = json.loads(out.read_text())
    assert set(data) == {"file", "columns", "rows", "tokens", "report", "cell", "mismatch", "notes", "advice"}
    assert data["tokens"] == 200_000
    assert data["mismatch"]["cause"]["name"] == "temperature"
    assert set(data["cell"]["against"]) == {"token", "sequence"}
    assert data["report"]["kl/reverse/k3/per_token/standard_error"] > 0
    assert list(out.parent.iterdir()) == [out]


def test_columns_can_be_named_and_the_cell_chosen(tmp_path):
    data = sampled(rows=8, tokens=5)
    path = write(tmp_path / "log.jsonl", {"mine": data["logp"], "theirs": data["ref_logp"]})
    assert "did you mean" in str(run(path).exception) or "--column logp=NAME" in str(run(path).exception)
    result = run(path, "--column", "logp=mine", "--column", "ref_logp=theirs", "--cell", "k1-loss")
    assert result.exit_code == 0, result.output
    assert "Read logp from `mine`, ref_logp from `theirs`." in result.output
    assert "It descends nothing on-policy" in result.output
    assert "Not told: the file has no log-probs of what sampled the tokens" in result.output


def test_what_is_not_finite_is_null(tmp_path):
    data = sampled(rows=1, tokens=5)
    assert run(write(tmp_path / "log.npz", data), "--cell", "k1-loss", "--json", tmp_path / "r.json").exit_code == 0
    found = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert found["report"]["kl/reverse/k1/per_sequence/standard_error"] is None
    assert found["cell"]["against"]["token"]["correlation"] is None


def test_reading_the_commands_needs_no_pyarrow():
    """Importing pyarrow takes a while; only a log needs it."""
    code = "import sys; import klgrad.cli, klgrad.logs.read; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "False\n", done.stderr

"""Losses of JAX and MLX: what the audit, the command and the helper of pytest say of them, and their gradients."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import PROBLEMS
from tolerances import EXACT, SINGLE
from typer.testing import CliRunner

from klgrad.audit import audit, load, load_every
from klgrad.audit.call import library_of
from klgrad.audit.probes import from_problem
from klgrad.audit.subject import as_subject, evaluate, expected_gradient, find
from klgrad.cli import app
from klgrad.errors import LossCallError, VerdictError
from klgrad.testing import assert_descends

pytest.importorskip("jax")
pytest.importorskip("mlx.core")
DATA = Path(__file__).parent / "data"
JAX, MLX = DATA / "jax_losses.py", DATA / "mlx_losses.py"
VERDICTS = {
    f"{JAX}:k1": ("nothing", "climbs forward-kl-sampler-sequence"),
    f"{JAX}:k2": ("reverse-kl-token", "squared-token"),
    f"{JAX}:k3": ("forward-kl-token", "k3-token"),
    f"{JAX}:k3_in_float32": ("forward-kl-token", "k3-token"),
    f"{JAX}:in_reward": ("reverse-kl-sequence", "unknown"),
    f"{JAX}:distilled": ("forward-kl-token", "forward-kl-token-sampler"),
    f"{JAX}:Penalty": ("reverse-kl-token", "squared-token"),
    f"{MLX}:k1": ("nothing", "climbs forward-kl-sampler-sequence"),
    f"{MLX}:k2": ("reverse-kl-token", "squared-token"),
    f"{MLX}:k3": ("forward-kl-token", "k3-token"),
    f"{MLX}:in_reward": ("reverse-kl-sequence", "unknown"),
    f"{MLX}:distilled": ("forward-kl-token", "forward-kl-token-sampler"),
}
TOLERANCES = {JAX: EXACT, MLX: SINGLE}


@pytest.mark.slow
@pytest.mark.parametrize("spec", VERDICTS)
def test_verdicts(spec):
    result = audit(load(spec))
    assert (result.verdict, result.verdict_off_policy) == VERDICTS[spec], str(result.advice)
    assert result.holds == "always"
    assert result.anatomy.proved


@pytest.mark.slow
def test_an_exponential_of_mlx_beside_a_difference():
    """Its exponentials have seven digits, also where the log-ratio beside them has sixteen."""
    parts = audit(load(f"{MLX}:k3_in_reward")).anatomy
    assert parts.proved
    assert {name: round(share, 4) for name, share in parts.shares.items()} == {"reverse-kl": 1.0, "forward-kl": -1.0}


def k1(logp, ref_logp):
    return logp - ref_logp


def k2(logp, ref_logp):
    return (logp - ref_logp).square() / 2


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - (ref_logp - logp) - 1


def distilled(logits, ref_logits):
    student, teacher = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("file", TOLERANCES, ids=["jax", "mlx"])
@pytest.mark.parametrize("same", [k1, k2, k3, distilled], ids=lambda same: same.__name__)
def test_the_expected_gradient_is_that_of_the_same_loss_in_pytorch(file, same, problem):
    """Summed over every completion."""
    problem = PROBLEMS[problem]
    none = torch.zeros(len(problem.space), dtype=torch.float64)
    other = load(f"{file}:{same.__name__}")
    found, wanted = (expected_gradient(subject, problem, 1, none).mean for subject in (other, as_subject(same)))
    TOLERANCES[file].check_vector(found, wanted)


@pytest.mark.parametrize(("file", "name"), [(JAX, "k3"), (MLX, "k3"), (JAX, "in_reward"), (MLX, "in_reward")])
def test_the_precision_is_that_of_the_tensors(file, name):
    problem = PROBLEMS["varying"]
    none = torch.zeros(len(problem.space), dtype=torch.float64)
    batch = from_problem(problem, torch.tensor([[0, 1, 2]]), none)
    for dtype in (torch.float64, torch.float32):
        cast = {n: x.to(dtype) if x.is_floating_point() else x for n, x in vars(batch).items()}
        loss, parts = evaluate(load(f"{file}:{name}"), type(batch)(**cast).fresh())
        assert loss.dtype == parts.logp.dtype == dtype


@pytest.mark.parametrize("file", TOLERANCES, ids=["jax", "mlx"])
@pytest.mark.parametrize("name", ["k2", "k3"])
def test_a_gradient_goes_on_backwards(file, name):
    """Through a scalar, and through one number per completion."""
    problem = PROBLEMS["varying"]
    batch = from_problem(problem, torch.tensor([[0, 5, 9]]), torch.zeros(len(problem.space), dtype=torch.float64))
    function: Any = load(f"{file}:{name}").loss
    weights = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    slopes = []
    for loss in (lambda: (weights * out_of(function(batch))).sum(), lambda: (weights * each(batch, name)).sum()):
        slopes.append(torch.autograd.grad(loss(), batch.logp)[0])
    TOLERANCES[file].check_vector(*slopes)


def out_of(returned):
    return returned[0] if isinstance(returned, tuple) else returned


def each(batch, name):
    """What k2 returns for the batch, and k3 for every completion."""
    per_completion = ({"k2": k2, "k3": k3}[name](batch.logp, batch.ref_logp) * batch.mask).sum(-1)
    return per_completion.mean() if name == "k2" else per_completion


def test_the_library_is_the_one_that_the_code_names():
    for name in ("k1", "k2", "k3", "in_reward", "halved", "by_value"):
        assert library_of(find(f"{JAX}:{name}")) == "jax", name
    penalty: Any = find(f"{JAX}:Penalty")
    assert library_of(penalty()) == "jax"
    for name in ("k1", "k2", "k3", "in_reward"):
        assert library_of(find(f"{MLX}:{name}")) == "mlx", name
    assert library_of(find(f"{JAX}:torch_bridge")) == library_of(k2) == "torch"


def test_every_loss_of_a_file():
    subjects, skipped = load_every(str(JAX))
    assert len(subjects) == 10
    assert skipped == {}


def test_an_error_names_the_place_in_the_file():
    with pytest.raises(LossCallError, match="TracerBoolConversionError") as error:
        audit(load(f"{JAX}:by_value"))
    assert "jax_losses.py, line 52" in error.value.remedy


@pytest.mark.parametrize("file", [JAX, MLX])
def test_the_assertion(file):
    assert assert_descends(f"{file}:k2", "reverse-kl-token").scale == pytest.approx(1)
    with pytest.raises(VerdictError, match="forward KL"):
        assert_descends(f"{file}:k3", "reverse-kl-token", settings={"beta": 0.1})


@pytest.mark.parametrize("file", [JAX, MLX])
def test_the_command_and_its_page(file, tmp_path):
    page, data = tmp_path / "audit.html", tmp_path / "audit.json"
    arguments = [f"{file}:k3", "--set", "beta=0.5", "--html", str(page), "--json", str(data)]
    result = CliRunner().invoke(app, ["audit", *arguments])
    assert result.exit_code == 0, result.output
    assert "forward KL" in page.read_text()
    (loss,) = json.loads(data.read_text())["results"]
    assert loss["scale"] == pytest.approx(0.5, rel=SINGLE.rtol)


@pytest.mark.parametrize(("file", "imported"), [(None, set()), (JAX, {"jax"}), (MLX, {"mlx"})], ids=str)
def test_nothing_else_is_imported(file, imported):
    loss = f"load({str(file) + ':k2'!r})" if file else "catalogue()['k2-loss']"
    code = f"""import sys
from klgrad.audit import audit, catalogue, load
audit({loss})
print({{name for name in ("jax", "mlx", "flax") if name in sys.modules}})"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eval(run.stdout) == imported

"""The batched tabular engine against the sample-by-sample definition, also for an arm of a user; and figure 3 by it."""

import json

import pytest
import torch
from some import first
from tolerances import EXACT, SINGLE
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.core.credit import leave_one_out
from klgrad.core.estimators import k1, k2, k3
from klgrad.errors import KlgradError
from klgrad.papers import Settings
from klgrad.papers.study import load_study, studies
from klgrad.papers.tang_munos import bandits, estimates, fig3_minimise as fig3, optima

SAMPLES = 6


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    problems = bandits.draw(3, generator)
    counts = bandits.count(problems.logp.exp(), SAMPLES, generator)
    return problems, counts


def test_counts_are_of_that_many_samples_and_follow_the_policy():
    generator = torch.Generator().manual_seed(1)
    p = torch.softmax(torch.randn(2, bandits.ARMS, generator=generator).double(), -1)
    counts = bandits.count(p, 200_000, generator)
    assert counts.sum(-1).tolist() == [200_000, 200_000]
    error = (p * (1 - p) / 200_000).sqrt()
    assert float(((counts / 200_000 - p) / error).abs().max()) < 5


def test_methods_share_their_luck_and_repeats_do_not():
    generator = torch.Generator().manual_seed(1)
    p = torch.full((2, 3, bandits.ARMS), 1 / bandits.ARMS).double()
    counts = bandits.count(p, 50, generator)
    assert torch.equal(counts[0], counts[1])
    assert not torch.equal(counts[0, 0], counts[0, 1])


LOSSES = {
    "k1-reward": lambda l, logp: l.detach() * logp,
    "k1-reward-leave-one-out": lambda l, logp: (
        (l.detach() - leave_one_out(l.detach(), torch.zeros(len(l), dtype=torch.long))) * logp
    ),
    "k2-loss": lambda l, logp: k2(l),
    "k1-loss": lambda l, logp: k1(l),
    "k3-loss": lambda l, logp: k3(l),
}


@pytest.mark.parametrize("method", LOSSES)
def test_a_gradient_from_counts_is_the_gradient_by_autograd(method, problem):
    problems, counts = problem
    p = problems.logp.exp()
    found = bandits.estimated_gradients([method], (problems.logp - problems.ref_logp)[None], counts[None], p[None])[0]
    for r in range(3):
        arms = torch.repeat_interleave(torch.arange(bandits.ARMS), counts[r].long())
        logits = problems.logits[r].clone().requires_grad_()
        logp = torch.log_softmax(logits, -1)[arms]
        loss = LOSSES[method](logp - problems.ref_logp[r, arms], logp).mean()
        EXACT.check(found[r], torch.autograd.grad(loss, logits)[0])


def test_the_exact_gradient_is_that_of_the_kl(problem):
    problems, counts = problem
    logits = problems.logits.clone().requires_grad_()
    kl = bandits.divergence(torch.log_softmax(logits, -1), problems.ref_logp).sum()
    (target,) = torch.autograd.grad(kl, logits)
    log_ratio, p = problems.logp - problems.ref_logp, problems.logp.exp()
    EXACT.check(bandits.exact_gradient(log_ratio, p), target)
    EXACT.check(bandits.estimated_gradients(["exact"], log_ratio[None], counts[None], p[None])[0], target)


@pytest.mark.parametrize("samples", [2, 4])
def test_the_exact_error_with_leave_one_out_is_that_over_every_group(samples):
    generator = torch.Generator().manual_seed(3)
    logp, ref_logp = torch.log_softmax(torch.randn(2, 1, 3, generator=generator).double(), -1)
    p, log_ratio = logp.exp(), logp - ref_logp
    target = bandits.exact_gradient(log_ratio, p)
    groups = torch.cartesian_prod(*[torch.arange(3)] * samples)
    counts = torch.nn.functional.one_hot(groups, 3).sum(1).double()
    many = lambda x: x.expand(1, len(groups), 3)
    method = "k1-reward-leave-one-out"
    found = bandits.estimated_gradients([method], many(log_ratio), counts[None], many(p))[0]
    error = (p[0][groups].prod(-1) * (found - target).square().sum(-1)).sum().sqrt()
    exact = estimates._root_errors([method], log_ratio, p, target)[method][estimates.SAMPLES.index(samples)]
    EXACT.check(exact[0], error)


def test_where_k3_as_a_loss_is_going_by_the_definition():
    """KL(π*_rev‖π*) over KL(ref‖π*) of the first problem, from the formulae of the two optima."""
    beta, problems = 0.7, bandits.draw(optima.ENOUGH, torch.Generator().manual_seed(1))
    ref, reward = problems.ref_logp[0].exp(), problems.reward[0]
    optimum = ref * (reward / beta).exp()
    optimum = optimum / optimum.sum()
    low, high = reward.max(), reward.max() + beta
    for _ in range(200):  # the multiplier at which β ref / (λ - r) sums to 1
        middle = (low + high) / 2
        low, high = (middle, high) if (beta * ref / (middle - reward)).sum() > 1 else (low, middle)
    forward = beta * ref / (high - reward)
    kl = lambda a, b: (a * (a / b).log()).sum()
    found = optima.optima_apart(Settings(seed=1), beta)
    EXACT.check(found[0], kl(forward, optimum) / kl(ref, optimum))


# Figure 3: its steps are those of the engine, and its shares are probabilities.


@pytest.mark.parametrize("samples", [1, 5])
def test_a_step_descends_the_gradient_of_the_engine(samples):
    generator = torch.Generator().manual_seed(0)
    problems = bandits.draw(4, generator, scale=1.5)
    logits = problems.logits.expand(2, -1, -1).clone()
    logits[fig3.K3] += torch.randn(logits[fig3.K3].shape, generator=generator, dtype=logits.dtype)
    logp, ref_logp = torch.log_softmax(logits, -1), problems.ref_logp.expand(2, -1, -1)
    arms = bandits.sample(logp.exp(), samples, generator)
    counts = torch.zeros_like(logits).scatter_add_(-1, arms, torch.ones(arms.shape, dtype=logits.dtype))
    gradient = bandits.estimated_gradients(["k1-reward", "k3-loss"], logp - ref_logp, counts, logp.exp())
    moved = logits.clone()
    fig3.descend(moved, logp.exp(), arms, ref_logp)
    EXACT.check(moved, logits - bandits.RATE * gradient)


def test_without_noise_k3_descends_the_forward_kl_and_vanilla_the_reverse(monkeypatch):
    monkeypatch.setattr(fig3, "STEPS", (1,))
    found = fig3.exact_descent(1.5, 3, 1, torch.Generator().manual_seed(0))
    problems = bandits.draw(3, torch.Generator().manual_seed(0), torch.float32, scale=1.5)
    forward = lambda logp: bandits.divergence(problems.ref_logp, logp)
    reverse = lambda logp: bandits.divergence(logp, problems.ref_logp)
    for method, objective in ((fig3.VANILLA, reverse), (fig3.K3, forward)):
        logits = problems.logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(torch.log_softmax(logits, -1)).sum(), logits)
        after = torch.log_softmax(problems.logits - bandits.RATE * gradient, -1)
        SINGLE.check(found[method, 0], reverse(problems.logp))
        SINGLE.check(found[method, 1], reverse(after))


def test_the_start_is_scaled_away_from_ref():
    near, far = (bandits.draw(5, torch.Generator().manual_seed(0), scale=scale) for scale in (1.0, 2.0))
    EXACT.check(near.ref_logp, far.ref_logp)
    away = lambda x: (x.logp - x.ref_logp) - (x.logp - x.ref_logp).mean(-1, keepdim=True)
    EXACT.check(away(far), 2 * away(near))


def test_the_share_of_experiments_with_a_heavy_tail():
    """One problem in a hundred far above, the others below: an experiment shows it if it has at least one of them."""
    difference = torch.full((2, 1000), -1.0, dtype=torch.float64)
    difference[0, :10] = 1e4
    share = fig3.share_of_experiments(difference, torch.Generator().manual_seed(0))
    expected = 1 - 0.99**fig3.PROBLEMS_AT_A_TIME
    error = (expected * (1 - expected) / fig3.EXPERIMENTS) ** 0.5
    assert abs(share[0].item() - expected) < 4 * error
    assert share[1].item() == 0


def test_runs_that_end_above_their_start_are_counted_and_left_out():
    start = torch.ones(100)
    vanilla, k3 = torch.full((100,), 0.5), torch.full((100,), 0.25)
    k3[:3] = 90.0
    found = fig3.compared(
        torch.stack([torch.stack([start, vanilla]), torch.stack([start, k3])]), torch.Generator().manual_seed(0)
    )
    assert found["thrown"] == pytest.approx(0.03)
    assert found["above on problems"] == pytest.approx(0.03)
    assert found["mean"][fig3.K3][0] > found["mean"][fig3.VANILLA][0]
    assert found["median"][fig3.K3][0] == 0.25
    assert found["difference without thrown"]["mean"] == pytest.approx(-0.25)


# A user's own estimator beside the arms of the papers.

FILE = """
from klgrad import KLTerm, divergences
def bounded(log_ratio):
    return log_ratio.clamp(-1, 1)
huber = divergences.huber(1.0)
def k2(log_ratio):
    return log_ratio
def loss(logp, ref_logp, mask):
    return ((logp - ref_logp) ** 2 / 2 * mask).sum(-1).mean()
term = KLTerm()
def coupled(log_ratio):
    return log_ratio - log_ratio.mean()
def one_number(log_ratio):
    return log_ratio.sum()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(FILE)
    return path


def weigh(spec):
    generator = torch.Generator().manual_seed(0)
    problems = bandits.draw(3, generator)
    p, log_ratio = problems.logp.exp(), problems.logp - problems.ref_logp
    return bandits.weight_of(spec)(log_ratio, p, p), log_ratio


@pytest.mark.parametrize("name", ["bounded", "huber"])
def test_a_function_and_a_divergence_with_one_coefficient_are_one_arm(file, name):
    weight, log_ratio = weigh(f"{file}:{name}")
    EXACT.check(weight, log_ratio.clamp(-1, 1))


@pytest.mark.parametrize("name", ["coupled", "one_number", "loss", "term"])
def test_what_has_no_coefficient_of_its_own_for_each_completion_is_refused(file, name):
    with pytest.raises(KlgradError, match=f"my.py:{name} to "):
        weigh(f"{file}:{name}")


def test_the_papers_arms_keep_their_numbers(file):
    name = f"{file}:bounded"
    alone, beside = (estimates.Fig2().run(Settings(quick=True, arms=arms)) for arms in ((), (name,)))
    for kind in ("simulated", "exact"):
        mine = beside[kind].pop(name)
        assert mine not in beside[kind].values()
        assert beside[kind] == alone[kind]
    assert estimates.Fig2().check(beside) == estimates.Fig2().check(alone)


@pytest.mark.slow
@pytest.mark.parametrize("study", first([name for name, study in studies().items() if study.compare], 1))
def test_a_study_that_takes_arms_draws_and_tabulates_them(file, study, tmp_path):
    spec = f"{file}:k2"
    found = CliRunner().invoke(app, ["reproduce", study, "--quick", "--with", spec, "--out", str(tmp_path)])
    assert found.exit_code in (0, 1), found.output
    numbers = json.loads((tmp_path / f"{study}.json").read_text())["numbers"]
    comparison = load_study(study).compare(numbers)
    assert len(comparison.rows[spec]) == len(comparison.columns)
    if "k2-loss" in comparison.rows:
        SINGLE.check(torch.tensor(comparison.rows[spec]), torch.tensor(comparison.rows["k2-loss"]))
    assert "my.py:k2" in (tmp_path / f"{study}.svg").read_text()
    output = " ".join(found.output.split())
    assert comparison.caption in output
    assert "sentence measured verdict" in output


def test_other_studies_name_those_that_take_arms(file, tmp_path):
    asked = ["reproduce", "tang-munos/fig6", "--with", f"{file}:k2", "--out", str(tmp_path)]
    error = CliRunner().invoke(app, asked).exception
    assert "tang-munos/fig2, tang-munos/fig3" in str(error)

"""A stock `GRPOTrainer` and a `KLTrainer` that means the same take the same steps."""

import pytest
import tiny
import torch
from tolerances import SAME_STEPS

from klgrad.trl import KLConfig, KLTrainer
from klgrad.trl.kl_trainer import whole_groups

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

BETA = 0.3
CASES = {
    **{kind: {"loss_type": kind} for kind in ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo", "luspo")},
    "accumulated": {"gradient_accumulation_steps": 2},
    "used twice": {"num_iterations": 2, "kl_ratio": "token", "kl_ratio_bound": "none"},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_same_loss_gradient_norm_and_weights(case, tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    ours = CASES[case]
    theirs = {name: value for name, value in ours.items() if not name.startswith("kl_")}
    # A trainer sets the seed when it is made, so each is trained before the next is made.
    stock = tiny.trained(GRPOTrainer, GRPOConfig, tmp_path / "trl", beta=BETA, **theirs)
    declared = tiny.trained(KLTrainer, KLConfig, tmp_path / "ours", kl_coef=BETA, kl_level="token", **ours)
    assert tiny.logged(stock, "kl")[-1] > 1e-3
    # Of an update in several micro-batches TRL logs the mean of their means, and klgrad that of all tokens.
    for name in ("loss", "grad_norm") if case == "accumulated" else ("loss", "grad_norm", "kl"):
        SAME_STEPS.check(torch.tensor(tiny.logged(declared, name)), torch.tensor(tiny.logged(stock, name)))
    SAME_STEPS.check(tiny.weights(declared), tiny.weights(stock))


def test_without_a_kl_it_differs(tmp_path):
    """What the test above would miss if the KL were small beside the policy loss."""
    runs = [tiny.trained(KLTrainer, KLConfig, tmp_path / str(beta), kl_coef=beta) for beta in (0.0, BETA)]
    assert float((tiny.weights(runs[0]) - tiny.weights(runs[1])).abs().max()) > 1e-3


@pytest.mark.parametrize("each", [2, 4, 6, 8])
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("generations", [2, 4, 8])
def test_which_micro_batches_hold_whole_groups(each, processes, steps, generations):
    """Rows of a generation, cut as TRL cuts them: by process, and then by each process into its micro-batches."""
    if each * processes * steps % generations:
        return  # which TRL refuses
    group = torch.arange(processes * steps * each).div(generations, rounding_mode="floor").view(processes, steps, each)
    batches = [group[:, step].flatten() for step in range(steps)]
    whole = all(bool((batch.unique(return_counts=True)[1] == generations).all()) for batch in batches)
    assert whole_groups(each, processes * each, steps, generations) == whole


REDUCED = {**{name: CASES[name] for name in ("dr_grpo", "accumulated")}, "sequence": {"kl_reduction": "sequence"}}


@pytest.mark.parametrize("case", REDUCED)
def test_a_loss_of_the_zoo_is_reduced_like_a_term(case, tmp_path):
    """On-policy k2 as a loss has the gradient of the token-level term, so that β has one meaning for both."""
    term = tiny.trained(KLTrainer, KLConfig, tmp_path / "term", kl_coef=BETA, kl_level="token", **REDUCED[case])
    cell = tiny.trained(KLTrainer, KLConfig, tmp_path / "cell", kl_coef=BETA, kl_cell="k2-loss", **REDUCED[case])
    SAME_STEPS.check(torch.tensor(tiny.logged(cell, "grad_norm")), torch.tensor(tiny.logged(term, "grad_norm")))
    SAME_STEPS.check(tiny.weights(cell), tiny.weights(term))

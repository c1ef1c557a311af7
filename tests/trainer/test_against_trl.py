"""A stock `GRPOTrainer` and a `KLTrainer` that means the same take the same steps."""

import pytest
import tiny
import torch
from tolerances import SAME_STEPS

from klgrad.trl import KLConfig, KLTrainer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

BETA = 0.3
CASES = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo"},
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
    for name in ("loss", "grad_norm"):
        SAME_STEPS.check(torch.tensor(tiny.logged(declared, name)), torch.tensor(tiny.logged(stock, name)))
    SAME_STEPS.check(tiny.weights(declared), tiny.weights(stock))


def test_without_a_kl_it_differs(tmp_path):
    """What the test above would miss if the KL were small beside the policy loss."""
    runs = [tiny.trained(KLTrainer, KLConfig, tmp_path / str(beta), kl_coef=beta) for beta in (0.0, BETA)]
    assert float((tiny.weights(runs[0]) - tiny.weights(runs[1])).abs().max()) > 1e-3

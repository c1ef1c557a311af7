"""The same declaration on the same batch gives the same numbers on verl and on TRL.

The two frameworks cannot be installed together. So each is held against the same file of numbers, which
`python tests/on_verl/test_same_as_on_trl.py` writes from the TRL trainer's.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tolerances import SINGLE

from klgrad.audit.probes import from_problem
from klgrad.enumeration import autoregressive

HAS_VERL = find_spec("verl") is not None and find_spec("verl").origin is not None
NUMBERS = Path(__file__).parent / "data" / "declared_on_trl.json"
PROBLEM = autoregressive(3, 4, ends=True, seed=11, away_from_ref=1.0, off_policy=0.5)
GROUP = 6
CASES = {
    # settings under `klgrad`; of verl; of a `KLConfig`
    "sequence": ({}, "token-mean", {}),
    "sequence, summed": ({"reduction": "sequence"}, "token-mean", {"kl_reduction": "sequence"}),
    "token": ({"level": "token"}, "token-mean", {"kl_level": "token"}),
    "prefix ratio": (
        {"ratio": "prefix", "ratio_bound": "truncate:2"},
        "token-mean",
        {"kl_ratio": "prefix", "kl_ratio_bound": "truncate:2", "kl_reduction": "policy"},
    ),
    "token ratio": (
        {"level": "token", "ratio": "token", "ratio_bound": "clip:0.7:1.5", "reduction": "sequence"},
        "token-mean",
        {"kl_level": "token", "kl_ratio": "token", "kl_ratio_bound": "clip:0.7:1.5", "kl_reduction": "sequence"},
    ),
    "forward": (
        {"divergence": "forward", "level": "token", "estimator": "k3"},
        "token-mean",
        {"kl_divergence": "forward", "kl_level": "token", "kl_estimator": "k3"},
    ),
    "discount, per completion": ({"discount": 0.5}, "seq-mean-token-mean", {"kl_discount": 0.5, "loss_type": "grpo"}),
    "advantage": (
        {"placement": "advantage", "baseline": "leave_one_out"},
        "token-mean",
        {"kl_placement": "advantage", "kl_baseline": "leave_one_out"},
    ),
}
"""`loss_type=dapo`, TRL's default, is a mean over the tokens of the batch, like verl's `token-mean`."""

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def batch(on_policy):
    """A group of different completions of one prompt, on samples of π or of another policy."""
    rows = torch.arange(0, len(PROBLEM.space), len(PROBLEM.space) // GROUP)[:GROUP]
    problem = PROBLEM.on_policy() if on_policy else PROBLEM
    return from_problem(problem, rows[None], torch.zeros(len(PROBLEM.space)).double())


def numbers(subject, on_policy):
    """The loss, and its gradient towards the log-prob of each token."""
    given = batch(on_policy)
    loss = subject(given)
    (gradient,) = torch.autograd.grad(loss, given.logp)
    return {"loss": float(loss.detach()), "gradient": gradient.double().tolist()}


def on_trl(case):
    from klgrad.frameworks.trl import declared

    _, _, settings = CASES[case]
    weighted = "kl_ratio" in settings
    return numbers(declared(**settings), on_policy=not weighted)


def on_verl(case):
    from klgrad.frameworks.verl import declared

    node, reduction, settings = CASES[case]
    return numbers(declared(node, reduction), on_policy="kl_ratio" not in settings)


def check(found, case):
    expected = json.loads(NUMBERS.read_text())[case]
    SINGLE.check_vector(torch.tensor(found["gradient"]), torch.tensor(expected["gradient"]))
    if "advantage" not in case:  # where each framework's policy loss has a value of its own
        SINGLE.check(found["loss"], expected["loss"])
    assert float(torch.tensor(expected["gradient"]).norm()) > 0.01


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_on_trl(case):
    check(on_trl(case), case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(not HAS_VERL, reason="verl is not installed")
def test_on_verl(case):
    check(on_verl(case), case)


if __name__ == "__main__":
    NUMBERS.write_text(json.dumps({case: on_trl(case) for case in CASES}, indent=1) + "\n")

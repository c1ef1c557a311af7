"""The same declaration on the same batch gives the same numbers on verl and on TRL.

The two frameworks cannot be installed together. So each is held against the same file of numbers, which
`python tests/on_verl/test_same_as_on_trl.py` writes from the TRL trainer's.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from on_verl.configuration import HAS_VERL
from tolerances import SINGLE

from klgrad.audit.probes import from_problem
from klgrad.enumeration import autoregressive

NUMBERS = Path(__file__).parent / "data" / "declared_on_trl.json"
PROBLEM = autoregressive(3, 4, ends=True, seed=11, away_from_ref=1.0, off_policy=0.5)
GROUP = 6
TOKEN_MEAN = "token-mean"
"""TRL's default `loss_type`, dapo, is a mean over the tokens of the batch, like this."""
CASES = {
    "sequence": ({}, TOKEN_MEAN),
    "sequence, summed": ({"reduction": "sequence"}, TOKEN_MEAN),
    "token": ({"level": "token"}, TOKEN_MEAN),
    "prefix ratio": ({"ratio": "prefix", "ratio_bound": "truncate:2"}, TOKEN_MEAN),
    "token ratio": (
        {"level": "token", "ratio": "token", "ratio_bound": "clip:0.7:1.5", "reduction": "sequence"},
        TOKEN_MEAN,
    ),
    "forward": ({"divergence": "forward", "level": "token", "estimator": "k3"}, TOKEN_MEAN),
    "discount, per completion": ({"discount": 0.5}, "seq-mean-token-mean"),
    "advantage": ({"placement": "advantage", "baseline": "leave_one_out"}, TOKEN_MEAN),
}
"""Settings under `klgrad`, which a `KLConfig` has with `kl_` before their names; and verl's reduction."""

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def numbers(subject, on_policy):
    """The loss, and its gradient towards the log-prob of each token.

    The batch is a group of different completions of one prompt, samples of π or of another policy.
    """
    rows = torch.arange(0, len(PROBLEM.space), len(PROBLEM.space) // GROUP)[:GROUP]
    problem = PROBLEM.on_policy() if on_policy else PROBLEM
    given = from_problem(problem, rows[None], torch.zeros(len(PROBLEM.space)).double())
    loss = subject(given)
    (gradient,) = torch.autograd.grad(loss, given.logp)
    return {"loss": float(loss.detach()), "gradient": gradient.double().tolist()}


def on_trl(case):
    from klgrad.frameworks.trl import declared

    node, reduction = CASES[case]
    loss_type = "dapo" if reduction == TOKEN_MEAN else "grpo"
    settings = {f"kl_{name}": value for name, value in node.items()}
    return numbers(declared(**settings, loss_type=loss_type), on_policy="ratio" not in node)


def on_verl(case):
    from klgrad.frameworks.verl import declared

    node, reduction = CASES[case]
    return numbers(declared(node, reduction), on_policy="ratio" not in node)


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

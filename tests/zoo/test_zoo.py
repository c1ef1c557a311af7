"""Cells: their names, and the loss per token that they are the sum of."""

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from strategies import rollouts

from klgrad import Rollout, zoo
from klgrad.core.result import reduce
from klgrad.errors import RolloutError, UnknownNameError

OWN_REDUCTION = {"k2-loss-length-mean", "k2-loss-token-mean", "k3-sequence-loss"}
"""Cells that are no sum over tokens, or whose weights of the tokens are what they are about."""


def test_which_cells_have_a_loss_per_token():
    assert {name for name, cell in zoo.CELLS.items() if cell.per_token is None} == OWN_REDUCTION


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(zoo.CELLS.keys() - OWN_REDUCTION))
@given(rollout=rollouts())
@settings(max_examples=10)
def test_the_scalar_is_the_sum_of_the_losses_per_token_bit_for_bit(name, rollout):
    cell = zoo.get(name)
    per_token = cell.per_token(rollout)
    assert per_token.shape == rollout.logp.shape
    assert bool((per_token[~rollout.mask] == 0).all())
    pair = (cell(rollout), reduce(per_token, rollout, "sequence"))
    assert torch.equal(*pair)
    if pair[0].requires_grad:
        assert torch.equal(*(torch.autograd.grad(x, rollout.logp, retain_graph=True)[0] for x in pair))


@pytest.mark.parametrize("name", zoo.CELLS)
def test_which_cells_need_groups(name):
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -1.0]], requires_grad=True)
    rollout = Rollout(logp, logp.detach() - 0.3, torch.ones(2, 2), behavior_logp=logp.detach() + 0.1)
    if zoo.get(name).compares_completions:
        with pytest.raises(RolloutError, match="group"):
            zoo.get(name)(rollout)
    else:
        assert zoo.get(name)(rollout).isfinite()


def test_copies():
    known = zoo.get("k3-loss")
    assert copy.deepcopy(known) is known
    own = dataclasses.replace(known, name="mine", couples_groups=True)
    assert copy.deepcopy(own) == own


def test_a_cell_is_named_after_its_function_and_found_by_its_name():
    for name, cell in zoo.CELLS.items():
        assert zoo.get(name) is cell
        assert cell.name == name
        assert cell.summary
    with pytest.raises(UnknownNameError, match="did you mean 'k3-loss'"):
        zoo.get("k3-los")


@pytest.mark.parametrize("name", zoo.CELLS)
def test_a_cell_survives_pickling(name):
    """Trainers save their arguments with the objective in them."""
    assert pickle.loads(pickle.dumps(zoo.get(name))) is zoo.get(name)

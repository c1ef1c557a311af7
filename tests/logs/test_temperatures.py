"""Temperatures from 0.3 to 2 are named with a range that holds the true one; other faults are not reported as one."""

import pytest
import torch
from logs.confusion import OTHERS, TEMPERATURES, judge, judged, off, others, temperatures, width
from logs.synthetic import SHAPES, sampled

from klgrad.logs.mismatch import STEP, possible_temperatures

WRONG = 0.02
"""Largest share of logs for which a wrong cause may be named."""

NAMED = {True: 0.95, False: 0.8}
"""Share of logs with a temperature for which it must be named, with and without groups. Without groups the
limits do not restrict flat contexts, a quarter of the logs here."""

RANGE_OFF = 1e-4
"""How far a range of two standard errors after one prompt may be from the true temperature, as a share of it; the
errors are of float32, about 1e-7."""

ROWS = 104
SEEDS = [70]


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: more threads would only add overhead."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shares(found):
    """Shares of right and wrong causes, with and without groups, and all results."""
    total = {True: [], False: []}
    for grouped, one in found:
        total[grouped].append(one)
    kinds = {
        grouped: {kind: sum(x.kind == kind for x in ones) / len(ones) for kind in ("right", "wrong")}
        for grouped, ones in total.items()
    }
    return kinds, [*total[True], *total[False]]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_temperatures_are_named_with_their_range(shape):
    found, ones = shares(judged(temperatures(), ROWS, SEEDS, [shape]))
    named = [one for one in ones if one.kind == "right"]
    assert max(share["wrong"] for share in found.values()) <= WRONG
    assert found[True]["right"] >= NAMED[True]
    assert found[False]["right"] >= (NAMED[False] if shape != "flat" else 0)
    assert max(map(off, named)) <= RANGE_OFF


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_other_faults_keep_their_names(shape):
    found, ones = shares(judged(others(), ROWS, SEEDS, [shape]))
    assert max(share["wrong"] for share in found.values()) <= WRONG
    assert "temperature" not in {one.named for one in ones}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 24, 48])
def test_few_rows_are_no_reason_for_a_wrong_cause(rows):
    found, _ = shares(judged([*temperatures(TEMPERATURES[::3]), *others()], rows, [rows], ["mixed", "language"]))
    assert max(share["wrong"] for share in found.values()) <= WRONG


@pytest.mark.parametrize("temperature", [0.95, 0.97, 1.03, 1.05, 1.1])
def test_a_range_by_the_limits_has_a_true_temperature_between_two_that_are_tried(temperature):
    for seed in range(3):
        found = judge(sampled("temperature", temperature, rows=ROWS, seed=seed), grouped=False).statistics
        assert found["temperature_ratio/low"] <= temperature <= found["temperature_ratio/high"]
        assert abs(found["temperature_ratio"] / temperature - 1) < STEP - 1


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 0.6])
def test_a_hundred_rows_at_a_low_temperature(temperature):
    for seed in range(6):
        for grouped in (True, False):
            cause = judge(sampled("temperature", temperature, rows=ROWS, seed=seed), grouped)
            assert cause.name == "temperature"
            assert cause.statistics["temperature_ratio/low"] <= temperature * STEP
            assert cause.statistics["temperature_ratio/high"] >= temperature / STEP
            if grouped:
                assert cause.description.startswith(
                    f"The sampler's temperature is about {temperature:.2f} times the trainer's"
                )


def test_where_the_limits_leave_much_room_the_range_is_given_and_no_value():
    data = sampled("temperature", 0.3, rows=48, shape="language", seed=3)
    cause = judge(data, grouped=False)
    (_, one), *_ = judged([("temperature", 0.3, "temperature")], 48, [3], ["language"])
    assert width(one) > 0.25
    low, high = (cause.statistics[f"temperature_ratio/{end}"] for end in ("low", "high"))
    assert f"temperature is {low:.2f} to {high:.2f} times the trainer's" in cause.description
    assert "Divide" not in cause.remedy


def test_flat_contexts_without_groups_cannot_be_distinguished_from_other_weights():
    cause = judge(sampled("temperature", 0.4, rows=ROWS, shape="flat"), grouped=False)
    assert cause.name == "unexplained"
    assert (
        "could cause it, and so could other weights: these data cannot distinguish the two. A `group` column would show"
        in cause.description
    )


@pytest.mark.slow
def test_the_limits_hold_for_every_token_of_every_context():
    for t in TEMPERATURES:
        for shape in SHAPES:
            data = sampled("temperature", t, rows=16, shape=shape)
            found = possible_temperatures(data["logp"].double().flatten(), data["behavior_logp"].double().flatten())
            assert found.holds
            assert found.contains(t), (t, shape, found)


def test_a_token_of_probability_1_sets_no_limit():
    x, y = torch.tensor([0.0, -1.0]).double(), torch.tensor([0.0, -0.5]).double()
    assert possible_temperatures(x, y).beyond == 0


def test_every_cause_that_is_named_is_known():
    assert {right for right, _ in OTHERS.values()} < {
        *("none", "shift", "rounding", "filter", "temperature", "random trainer", "systematic", "unexplained")
    }

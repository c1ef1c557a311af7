"""Each symptom is found in a run that has it, and in none that has not."""

import math
import random

import pytest

from klgrad.errors import LogError
from klgrad.logs.diagnosis import RunConfiguration, diagnose
from klgrad.logs.scalars import ScalarLog, Series
from klgrad.logs.symptoms import SYMPTOMS, link, threads_of, topics

STEPS = tuple(map(float, range(1, 81)))


def series(values):
    return Series(STEPS[: len(values)], tuple(values))


def log_of(**metrics):
    return ScalarLog("run", "made here", {name.replace("__", "/"): series(x) for name, x in metrics.items()})


def healthy(level=0.05, seed=0, n=80):
    """It rises from the reference and settles, with noise."""
    r = random.Random(seed)
    return [level * (1 - math.exp(-i / 12)) * (1 + 0.1 * r.gauss(0, 1)) for i in range(n)]


def seen(log, **options):
    return [found.symptom.name for found in diagnose([log], **options).observations]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_has_no_symptom(seed):
    length = [100 + random.Random(seed).gauss(0, 5) for _ in STEPS]
    log = log_of(kl=healthy(seed=seed), completions__mean_length=length, grad_norm=[1.0 + 0.1 * x for x in length])
    assert seen(log) == []


@pytest.mark.parametrize("seed", range(20))
def test_negative_batches_of_an_unbiased_estimate_are_no_symptom(seed):
    r = random.Random(seed)
    values = [0.002 + 0.01 * r.gauss(0, 1) for _ in STEPS]
    assert min(values) < 0
    assert seen(log_of(kl=values)) == []


def test_exactly_zero():
    assert seen(log_of(kl=[0.0] * 80)) == ["zero"]
    assert seen(log_of(kl=[0.0, *healthy()[1:]])) == []  # the policy starts at the reference
    assert seen(log_of(kl=[1e-12] * 80)) == []


def test_negative_beyond_its_error():
    r = random.Random(1)
    values = [-0.01 + 0.01 * r.gauss(0, 1) for _ in STEPS]
    (found,) = diagnose([log_of(kl=values)]).observations
    assert found.symptom.name == "negative"
    assert "over the run" in found.evidence
    late = [*healthy(n=40), *values[:40]]
    assert seen(log_of(kl=late)) == ["negative"]


def test_one_negative_value_of_an_estimate_that_cannot_be():
    values = healthy()
    values[30] = -0.001
    assert seen(log_of(kl=values)) == []
    assert seen(log_of(kl=values), configurations=[RunConfiguration(never_negative=True)]) == ["negative"]


def test_a_value_that_is_not_finite_is_not_one_that_is_missing():
    values = healthy()
    gaps = ScalarLog("run", "made here", {"kl": Series(STEPS[::3], tuple(values[::3]))})
    assert seen(gaps) == []
    values[41] = math.inf
    (found,) = diagnose([log_of(kl=values)]).observations
    assert (found.symptom.name, found.evidence) == ("nan", "kl: 1 of 80 values, the first at step 42.")
    assert seen(log_of(kl=healthy(), grad_norm=[1.0] * 79 + [math.nan])) == ["nan"]


def test_a_spike_comes_back_and_a_jump_stays():
    spiked = healthy()
    spiked[50] = 2.0
    (found,) = diagnose([log_of(kl=spiked)]).observations
    assert found.symptom.name == "spike"
    assert "2 at step 51" in found.evidence
    jumped = [x + 1.5 * (i >= 50) for i, x in enumerate(healthy())]
    reward = [0.8 - 0.7 * (i >= 50) for i in range(80)]
    (found,) = diagnose([log_of(kl=jumped, reward=reward)]).observations
    assert found.symptom.name == "jump"
    assert "at step 51, and stays; reward goes from 0.8 to 0.1" in found.evidence


def test_twice_its_neighbours_is_no_spike():
    calm = [0.05 + 1e-6 * (i % 2) for i in range(80)]
    calm[40] = 0.1
    assert seen(log_of(kl=calm)) == []


def test_rising_to_the_end():
    assert seen(log_of(kl=[0.001 * i**1.8 for i in range(80)])) == ["rising"]
    assert seen(log_of(kl=[0.1 * i**0.5 for i in range(80)])) == []


def test_units():
    r = random.Random(2)
    length = [200 * math.exp(0.3 * r.gauss(0, 1)) for _ in STEPS]
    token = [x + 0.01 for x in healthy()]
    whole = [x * n for x, n in zip(token, length, strict=True)]
    log = log_of(actor__kl_loss=whole, response_length__mean=length)
    assert seen(log) == ["units"]
    assert seen(log_of(actor__kl_loss=token, response_length__mean=length)) == []
    names = {"kl/reverse/k1/per_token": token, "actor/kl_loss": whole, "length/mean": length}
    both = ScalarLog("run", "made here", {name: series(x) for name, x in names.items()})
    (found,) = diagnose([both]).observations
    assert "a sum per completion beside a mean per token" in found.evidence
    assert found.evidence.startswith("actor/kl_loss is ")


def test_a_common_trend_is_no_common_unit():
    length = [100 + 3 * i + random.Random(i).gauss(0, 5) for i in range(80)]
    r = random.Random(5)
    log = log_of(actor__kl_loss=[0.01 * (1 + i) ** 0.5 * math.exp(0.1 * r.gauss(0, 1)) for i in range(80)])
    log.series["response_length/mean"] = series(length)
    assert seen(log) == []


def test_a_log_with_another_kl_alone():
    assert seen(log_of(actor__ppo_kl=healthy())) == ["other-kl"]
    found = diagnose([log_of(reward=healthy())])
    assert not found.observations
    assert "No KL is in this log" in found.runs[0].lines[0]
    assert seen(log_of(actor__ppo_kl=[0.0] * 80), kl="actor/ppo_kl") == ["zero"]
    with pytest.raises(LogError, match="it has reward"):
        diagnose([log_of(reward=healthy())], kl="kl")


def test_flat_groups_and_gradients_of_zero():
    log = log_of(kl=healthy(), frac_reward_zero_std=[0.2] * 40 + [0.6] * 40, grad_norm=[0.0, 1.0, 1.0, 1.0] * 20)
    assert seen(log) == ["zero-gradient", "flat-groups"]


# Several runs


def compared(*levels, betas, n=80):
    logs = [log_of(kl=healthy(level, seed, n)) for seed, level in enumerate(levels)]
    return diagnose(logs, [RunConfiguration(beta=beta) for beta in betas])


def test_the_same_kl_at_every_beta():
    (found,) = compared(0.5, 0.5, 0.5, betas=(0.001, 0.01, 0.1)).compared
    assert found.symptom.name == "constant"
    assert "at β = 0.001" in found.evidence
    assert compared(0.5, 0.49, betas=(0.01, 0.011)).compared == ()  # one β, nearly


def test_a_kl_that_rises_with_beta():
    (found,) = compared(0.9, 0.2, 0.5, betas=(0.1, 0.001, 0.01)).compared
    assert found.symptom.name == "rising-with-beta"


def test_a_kl_that_falls_with_beta_is_as_it_should_be():
    found = compared(0.5, 0.2, 0.05, betas=(0.001, 0.01, 0.1))
    assert found.compared == ()
    assert found.lines[0].startswith("KL of the last quarter up to step 80: ")


def test_runs_are_compared_at_a_common_step():
    """A shorter run has a smaller KL, whatever its β."""
    rise = [0.01 * i for i in range(80)]
    logs = [log_of(kl=rise[:20]), log_of(kl=rise)]
    found = diagnose(logs, [RunConfiguration(beta=0.01), RunConfiguration(beta=0.1)])
    assert [x.symptom.name for x in found.compared] == ["constant"]
    assert "up to step 20" in found.compared[0].evidence


def test_a_logged_coefficient_is_the_beta():
    logs = [log_of(actor__kl_loss=healthy(0.5, i), actor__kl_coef=[beta] * 80) for i, beta in enumerate((0.01, 0.1))]
    assert [x.symptom.name for x in diagnose(logs).compared] == ["constant"]


def test_without_coefficients_runs_are_not_compared():
    found = diagnose([log_of(kl=healthy(seed=i)) for i in range(2)])
    assert found.compared == ()
    assert "give their coefficients" in found.lines[0]
    with pytest.raises(LogError, match="3 for 2 runs"):
        diagnose([log_of(kl=healthy())] * 2, [RunConfiguration()] * 3)


# Causes and threads


def test_what_the_configuration_settles_comes_first():
    found = diagnose([log_of(kl=[0.001 * i**1.8 for i in range(80)])], [RunConfiguration(facts=frozenset({"cut"}))])
    (rising,) = found.observations
    (first, settled), *rest = rising.causes
    assert settled
    assert first.what.startswith("A clamp on the value")
    assert not any(x for _, x in rest)
    assert rising.to_dict()["causes"][0]["settled_by_configuration"] is True


def test_wiring_is_a_symptom_of_the_configuration_alone():
    facts = RunConfiguration(facts=frozenset({"both", "stale"}))
    (found,) = diagnose([log_of(kl=healthy())], [facts]).observations
    assert (found.symptom.name, found.evidence) == ("wiring", "The configuration says so: both.")


def test_every_symptom_of_a_thread_exists_and_every_symptom_has_causes():
    assert {name for topic in topics() for name in topic.symptoms.split()} <= set(SYMPTOMS)
    assert all(symptom.causes for symptom in SYMPTOMS.values())
    assert threads_of("jump")[0] == "qiancheng0/ToolRL#52"
    names = [name for topic in topics() for name in topic.names]
    assert len(topics()) == 46
    assert len(names) == len(set(names)) == 81
    assert link("verl-project/verl#751") == "https://github.com/verl-project/verl/issues/751"

"""What a run says of itself: the objective, what its KL descends, and the memory it needs."""

import pytest
from training.conftest import invoke
from training.small import SMALL, arguments

from klgrad.training.build import models_of
from klgrad.training.report import completions_in_mean, memory, objective_lines
from klgrad.training.settings import parse

pytestmark = [pytest.mark.filterwarnings("ignore")]


def parsed(command, **settings):
    return parse(command, arguments(**{**SMALL, **settings}))


@pytest.fixture
def no_audit(monkeypatch):
    """For a test of other parts of a dry run, of which the audit takes longest."""
    monkeypatch.setattr("klgrad.training.report.audit_lines", lambda _: ["audited"])


def dry_run(command, which, **settings):
    """What a dry run prints, with its lines joined."""
    result = invoke(command, *arguments(**{**SMALL, **which, **settings}), "--dry-run")
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_a_dry_run_leaves_nothing(model, tmp_path):
    """What it prints is in tests/goldens/dry_run.txt."""
    said = dry_run("train", {"model": model}, output_dir=tmp_path / "run", kl_estimator="exact")
    assert "not about 0" not in said  # the check before a first update is not for the models of an audit
    assert not (tmp_path / "run").exists()


WHOLE = "on fresh samples: reverse KL, whole completions"


@pytest.mark.parametrize(
    ("settings", "noted", "fresh"),
    [
        (
            {"kl_placement": "reward"},
            "β differs from prompt to prompt",
            f"{WHOLE}, mean over the tokens of 8 completions, divided by the spread of the group",
        ),
        ({"kl_cell": "k1-loss"}, "", "on fresh samples: nothing: ref has no effect"),
        ({"kl_coef": 0}, "", "no KL: kl_coef is 0"),
        ({"loss_type": "grpo"}, "note: loss_type='grpo' averages the KL", f"{WHOLE}, mean per completion"),
        (
            {"loss_type": "bnpo", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
            "divided by the tokens of one forward pass (loss_type bnpo)",
            f"{WHOLE}, mean per completion",
        ),
        (
            {"loss_type": "bnpo", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            "note: loss_type='bnpo' divides the KL by the tokens of one forward pass, of 2 completions",
            f"{WHOLE}, mean over the tokens of 2 completions",
        ),
        pytest.param(
            {"kl_reduction": "sequence", "num_iterations": 2, "kl_ratio": "prefix"},
            "weighted by kl_ratio='prefix', kl_ratio_bound='truncate:2': the same",
            WHOLE,
            marks=[pytest.mark.slow, pytest.mark.many],
        ),
    ],
)
def test_a_dry_run_audits_what_is_trained(model, settings, noted, fresh):
    found = dry_run("train", {"model": model}, **settings)
    assert noted in found
    assert fresh in found
    assert ("truncated at 2" in found) == ("kl_ratio" in settings)


def test_a_dry_run_with_another_divergence_audits_it(model):
    settings = {"kl_divergence": "0.3 forward + 0.7 reverse"}
    found = dry_run("distill", {"model": f"{model}:2", "teacher": model}, **settings)
    assert "-1 (0.3 forward-kl + 0.7 reverse-kl)" in found
    assert "on fresh samples: reverse KL plus 0.429 x forward KL, token by token" in found


def test_a_dry_run_of_a_distillation_audits_it(model):
    """Completions are used twice, and the KL of each token is summed over the vocabulary."""
    found = dry_run("distill", {"teacher": model}, num_iterations=2, kl_reduction="sequence")
    assert "completions of at most 5 tokens, each of which is used for 2 updates" in found
    assert "on fresh samples: reverse KL, token by token" in found
    assert "on stale samples (num_iterations=2), with kl_ratio='none': the same on the sampler's prefixes" in found


@pytest.mark.parametrize(
    ("settings", "completions"),
    [
        ({}, 8 * 3),  # all completions of a generation
        ({"loss_type": "bnpo"}, 8),  # those of one forward pass
        ({"kl_cell": "k2-loss-token-mean", "kl_reduction": "sequence"}, 8),
    ],
)
def test_over_how_many_completions_a_run_averages(model, settings, completions):
    training = parsed("train", model=model, gradient_accumulation_steps=3, **settings).training
    assert completions_in_mean(training) == completions


@pytest.mark.usefixtures("no_audit")
@pytest.mark.parametrize(
    ("command", "settings", "said"),
    [
        ("train", {"kl_target": 3.0, "kl_target_unit": "token"}, "β 0.05 at first, adapted to 3 nats per token"),
        ("train", {"sync_ref_model": True}, "reference the model as it starts, moved towards the policy every"),
        ("train", {"kl_placement": "advantage"}, "placement in the advantage"),
        ("train", {"num_processes": 4}, "4 prompts x 8 completions of at most 5 tokens, on 4 processes"),
        ("distill", {"teacher": "one={model},two={model}"}, "reference one and two"),
    ],
)
def test_a_dry_run_of_other_settings(model, command, settings, said):
    given = {"model": model, "num_generations": 8, **settings}
    if command == "distill":
        given["teacher"] = settings["teacher"].format(model=model)
    assert said in dry_run(command, given)


@pytest.mark.usefixtures("no_audit")
def test_a_dry_run_counts_the_processes_of_accelerates_file(model, tmp_path):
    (tmp_path / "accelerate.yaml").write_text("num_processes: 4\n")
    asked = {"model": model, "accelerate_config": tmp_path / "accelerate.yaml"}
    assert "on 4 processes" in dry_run("train", asked)


def test_the_dry_run_describes_rewards_and_token_weights(model):
    """For each setting the line that it adds or changes; nothing of a standard deviation that divides nothing."""

    def lines(command, **settings):
        return objective_lines(parsed(command, **{"model" if command == "train" else "teacher": model}, **settings))

    scaled = "rewards are divided by their group's standard deviation (scale_rewards), which rescales β against them"
    assert lines("train")[2:] == [scaled]
    assert lines("train", scale_rewards="none")[2:] == []
    assert "the batch's standard" in lines("train", scale_rewards="batch")[2]
    (noted,) = lines("train", kl_placement="reward")[2:]
    assert "a standard deviation divides the KL too" in noted
    assert lines("distill")[2:] == []
    assert lines("distill")[0] == "-1 KL(π‖ref)"
    assert lines("distill", reward="any:thing")[0] == "E[reward] - 1 KL(π‖ref)"
    assert lines("distill", reward="any:thing")[2:] == [scaled]
    for settings, said in (
        ({}, "divided by all tokens of the update"),
        ({"loss_type": "grpo"}, "averaged over each completion's tokens"),
        ({"kl_reduction": "sequence"}, "; summed over each completion;"),
        ({"kl_placement": "reward"}, "; summed over each completion;"),
    ):
        assert said in lines("train", **settings)[1]
        assert "summed over the sequence" not in lines("train", **settings)[1]


def test_memory_counts_what_is_there(model):
    from transformers import AutoModelForCausalLM

    def of(command="train", **settings):
        given = parsed(command, model=model, **settings)
        return memory(given, models_of(given))

    size = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_pretrained(model).parameters())
    cache = 8 * 5 * 3 * 2 * 8 * 4  # completions, tokens, layers, keys and values, width of a head, bytes
    whole = {"policy": size, "gradients": size, "AdamW": 2 * size, "reference": size, "keys and values": cache}
    assert of() == whole
    adapters = 3 * (2 * 16 + 16 + 8) * 16 * 4  # layers, both sides of queries and values, rank, bytes
    trained = {"gradients": adapters, "AdamW": 2 * adapters, "reference": 0}
    assert of(use_peft=True) == {**whole, **trained}
    assert of(use_peft=True, load_in_4bit=True) == {**whole, **trained, "policy": size / 8}
    assert of("distill", teacher=f"one={model},two={model}")["reference"] == 2 * size
    assert 0 < of(kl_estimator="exact", kl_memory=1)["exact KL"] <= 2**20

"""Values of a file are read as on a command line; ranges of this package's settings are checked before a run."""

import pytest

from klgrad.errors import KlgradError, MeaningError, SettingError
from klgrad.training.settings import parse

CPU = ("--use_cpu",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_steps: 3.7", "argument --max_steps/--max-steps: invalid int value: '3.7'"),
        ("5: 1", "setting in the configuration file"),
        ("kl_coef: yes", "argument --kl_coef/--kl-coef: invalid float value: 'True'"),
        ("quick: [1, 2]", "argument --quick: Truthy value expected"),
        ("reward_weights: [1.0, one]", "reward_weights"),
        ("reward_weights: {a: 1}", "reward_weights"),
        ("lr_scheduler_type: nope", "nope"),
        ("dtype: int8", "argument --dtype: invalid choice: 'int8'"),
        ("kl_level: tokens", "invalid choice: 'tokens'"),
        ("kl_ratio_bound: 2.0", "kl_ratio_bound"),
    ],
)
def test_a_file_with_a_value_of_another_type(yaml, text, said):
    with pytest.raises(KlgradError, match=said):
        parse("train", [*yaml(f"{text}\n"), *CPU])


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("train_size", 0, 1),
        ("eval_size", -1, 0),
        ("eval_every", -1, 0),
        ("student_layers", 0, 1),
        ("num_processes", 0, 1),
    ],
)
def test_a_flag_out_of_its_range(name, value, bound):
    with pytest.raises(SettingError, match=f"`{name}` >= {bound}; received {value}"):
        parse("train", [f"--{name}={value}", *CPU])


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("seed: null", "seed", 42),  # no value: the default
        ("learning_rate: 3e-5", "learning_rate", 3e-5),  # text, by YAML's rules
        ("num_train_epochs: 2", "num_train_epochs", 2),
        ("reward_weights: 0.5\nreward: a:b", "reward_weights", [0.5]),
        ("reward_weights: [1e-1, 2]\nreward: 'a:b,a:c'", "reward_weights", [0.1, 2]),
        ("max_grad_norm: .inf", "max_grad_norm", float("inf")),
        ("kl_target: null", "kl_target", None),
        ("report_to: [none]", "report_to", []),
        ("report_to: [wandb, tensorboard]", "report_to", ["wandb", "tensorboard"]),
        ("model_init_kwargs: {use_cache: false}", "model_init_kwargs", {"use_cache": False}),
        ("loss_type: dr_grpo", "loss_type", "dr_grpo"),
    ],
)
def test_what_is_taken_from_a_file(yaml, text, name, value):
    assert getattr(parse("train", [*yaml(f"{text}\n"), *CPU]).training, name) == value


def test_names_may_be_a_list_in_a_file(yaml):
    assert parse("train", [*yaml("task: [addition, subtraction]\n"), *CPU]).run.task == "addition,subtraction"


def test_one_module_for_adapters_may_be_written_without_a_list(yaml):
    assert parse("train", [*yaml("lora_target_modules: all-linear\n"), *CPU]).policy.lora_target_modules == "all-linear"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--generation_batch_size", "7"], "`generation_batch_size`"),
        (["--deepspeed", "missing.json"], ""),
        (["--model_init_kwargs", "{not json"], ""),
        (["--fp16", "--bf16=true"], "`fp16`, `bf16`"),
        (["--dataloader_prefetch_factor", "2"], "`dataloader_prefetch_factor`"),
        (["--per_device_train_batch_size", "3"], "`num_generations`"),
    ],
)
def test_what_trl_or_transformers_refuse_is_named(given, named):
    with pytest.raises(SettingError, match=f"settings that fit together.*{named}"):
        parse("train", [*given, *CPU])


def test_a_file_that_says_false_in_quotes_does_not_resume(yaml):
    """The words of a file are understood before anything depends on them."""
    assert parse("train", [*yaml("resume: 'false'\n"), *CPU]).run.resume is False


def test_in_python_too():
    from klgrad.trl import KLConfig

    for settings in ({"kl_ratio_bound": 2.0}, {"kl_coef": -1.0}, {"teacher": 5}):
        with pytest.raises(MeaningError, match=next(iter(settings))):
            KLConfig("unused", use_cpu=True, bf16=False, **settings)

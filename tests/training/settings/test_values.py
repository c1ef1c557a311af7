"""Every setting of this package is checked for type and range before anything is loaded; TRL checks its own."""

import pytest

from klgrad.errors import MeaningError, SettingError
from klgrad.training.settings import parse

CPU = ("--use_cpu",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kl_ratio_bound: 2.0", r'`kl_ratio_bound` as text; received 2.0, a number, in .* kl_ratio_bound: "2.0"'),
        ("task: [addition, subtraction]", r"`task` as text; .* with commas: task: addition,subtraction"),
        ("reward: [a.py:f]", r"`reward` as text; .* reward: a.py:f"),
        ("5: 1", "names of settings; received the key 5 in the configuration file"),
        ("kl_coef: yes", "`kl_coef` as a number; received True, true or false"),
        ("quick: [1]", "`quick` as true or false"),
        ("kl_level: tokens", "`kl_level` token or sequence; received 'tokens'"),
    ],
)
def test_a_file_with_a_value_of_another_type(yaml, text, said):
    with pytest.raises(SettingError, match=said):
        parse("train", [*yaml(f"{text}\n"), *CPU])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("train_size", "0", ">= 1; received 0"),
        ("eval_every", "-1", ">= 0; received -1"),
        ("kl_coef", "-1", ">= 0; received -1.0; remedy: a negative β"),
        ("kl_target", "0", "> 0; received 0.0"),
        ("kl_coef", "nan", "as a finite number; received nan"),
    ],
)
def test_a_flag_out_of_its_range(name, value, said):
    with pytest.raises((SettingError, MeaningError), match=f"`{name}` {said}"):
        parse("train", [f"--{name}={value}", *CPU])


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("scale_rewards: false", "scale_rewards", "none"),
        ("learning_rate: 3e-5", "learning_rate", 3e-5),  # text, by YAML's rules
        ("num_train_epochs: 2", "num_train_epochs", 2),
        ("reward_weights: 0.5\nreward: a:b", "reward_weights", [0.5]),
        ("reward_weights: [1e-1, 2]\nreward: 'a:b,a:c'", "reward_weights", [0.1, 2]),
        ("max_grad_norm: .inf", "max_grad_norm", float("inf")),
        ("kl_target: null", "kl_target", None),
        ("report_to: [none]", "report_to", []),
        ("model_init_kwargs: {use_cache: false}", "model_init_kwargs", {"use_cache": False}),
        ("loss_type: dr_grpo", "loss_type", "dr_grpo"),
    ],
)
def test_what_is_taken_from_a_file(yaml, text, name, value):
    assert getattr(parse("train", [*yaml(f"{text}\n"), *CPU]).training, name) == value


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

    for settings in ({"kl_ratio_bound": 2.0}, {"kl_coef": True}, {"kl_horizon": 1.5}, {"teacher": 5}):
        with pytest.raises(MeaningError, match=next(iter(settings))):
            KLConfig("unused", use_cpu=True, bf16=False, **settings)

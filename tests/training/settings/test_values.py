"""Every setting is checked for its type and its range before anything is loaded, from a file as from flags."""

import pytest

from klgrad.errors import MeaningError, SettingError
from klgrad.training.settings import parse
from klgrad.trl.config_checks import described, fits

CPU = ("--use_cpu",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kl_ratio_bound: 2.0", r'`kl_ratio_bound` as text; received 2.0, a number, in .* kl_ratio_bound: "2.0"'),
        ("task: [addition, subtraction]", r"`task` as text; .* with commas: task: addition,subtraction"),
        ("reward: [a.py:f]", r"`reward` as text; .* reward: a.py:f"),
        ("max_steps: 3.7", "`max_steps` as a whole number; received 3.7"),
        ("seed: null", "`seed` as a whole number; received None.* leave the setting out"),
        ("5: 1", "names of settings; received the key 5 in the configuration file"),
        ("kl_coef: yes", "`kl_coef` as a number; received True, true or false"),
        ("use_vllm: 1", "`use_vllm` as true or false; received 1, a whole number"),
        ("quick: [1]", "`quick` as true or false"),
        ("model_init_kwargs: 3", "`model_init_kwargs` as a mapping or text"),
        ("reward_weights: [1.0, one]", "reward_weights"),
        ("reward_weights: {a: 1}", "`reward_weights` as a list of numbers"),
        ("lr_scheduler_type: nope", "`lr_scheduler_type` as linear or cosine"),
        ("optim: nope", "`optim` as .*adamw_torch"),
        ("dtype: int8", "`dtype` auto or bfloat16 or float16 or float32; received 'int8'"),
        ("kl_level: tokens", "`kl_level` token or sequence; received 'tokens'"),
        ("scale_rewards: 1.5", "`scale_rewards` group or batch or none"),
        ("learning_rate: .nan", "`learning_rate` as a finite number; received nan"),
        ("max_completion_length: null", "`max_completion_length` >= 1; received None"),
        ("num_generations: null", "`num_generations` >= 2; received None"),
        ("report_to: 5", "`report_to` as text or a list of texts"),
    ],
)
def test_a_file_with_a_value_of_another_type(yaml, text, said):
    with pytest.raises(SettingError, match=said):
        parse("train", [*yaml(f"{text}\n"), *CPU])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gradient_accumulation_steps", "0", ">= 1; received 0; remedy: 1 makes an update of every batch"),
        ("steps_per_generation", "0", ">= 1; received 0"),
        ("per_device_train_batch_size", "0", ">= 1; received 0"),
        ("num_iterations", "0", ">= 1; received 0; .*nothing would be trained"),
        ("num_train_epochs", "0", "> 0; received 0.0"),
        ("max_steps", "0", "-1 or >= 1; received 0"),
        ("train_size", "0", ">= 1; received 0"),
        ("eval_every", "-1", ">= 0; received -1"),
        ("num_generations", "-2", ">= 2; received -2"),
        ("loss_type", "nope", "grpo or dr_grpo or .*; received 'nope'"),
        ("importance_sampling_level", "word", "token or sequence; received 'word'"),
        ("scale_rewards", "nope", "group or batch or none"),
        ("multi_objective_aggregation", "nope", "sum_then_normalize"),
        ("vllm_importance_sampling_mode", "nope", "token_truncate"),
        ("vllm_mode", "nope", "colocate or server"),
        ("temperature", "0", "> 0; received 0.0"),
        ("temperature", "nan", "as a finite number; received nan"),
        ("learning_rate", "nan", "as a finite number; received nan"),
        ("learning_rate", "-1e-5", ">= 0; received -1e-05"),
        ("top_p", "1.5", "above 0 to 1; received 1.5"),
        ("delta", "0.5", "> 1; received 0.5"),
        ("seed", "-1", "from 0 to 4.29497e\\+09; received -1"),
        ("save_steps", "0", "> 0; received 0"),
        ("lora_dropout", "1", "from 0 below 1; received 1"),
        ("report_to", "nowhere", "none, all, .*wandb.*; received 'nowhere'"),
    ],
)
def test_a_flag_out_of_its_range(name, value, said):
    with pytest.raises(SettingError, match=f"`{name}` {said}"):
        parse("train", [f"--{name}={value}", *CPU])


def test_metrics_cannot_be_sent_by_a_package_that_is_not_here(monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    with pytest.raises(SettingError, match="the package of `report_to` wandb; received no such package"):
        parse("train", ["--report_to", "wandb", *CPU])


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


def test_types_of_annotations():
    assert fits(1, float)
    assert not fits(True, int)
    assert not fits("x", list[str])
    assert fits(None, int | None)
    assert described(list[float] | None) == "a list of numbers"


def test_in_python_too():
    from klgrad.trl import KLConfig

    wrong = (
        {"kl_ratio_bound": 2.0},
        {"loss_type": "nope"},
        {"temperature": 0.0},
        {"num_iterations": 0},
        {"teacher": 5},
    )
    for settings in wrong:
        with pytest.raises(MeaningError, match=next(iter(settings))):
            KLConfig("unused", use_cpu=True, bf16=False, **settings)

"""A tiny language model on disk, with a tokenizer of words, for whole training runs."""

import tempfile
from functools import cache
from typing import Any

import torch

WORDS = ("<pad>", "<end>", *(f"w{i}" for i in range(30)))
TARGET = 5
"""The token that `reward` counts."""


def save(folder, words, tokenizer, **shape):
    """Write a random Llama and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    common = {"num_attention_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=words, **common, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tokenizer_of(words, unknown, *splits):
    """A tokenizer of words between spaces, which the further `splits` divide."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    by_word = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    by_word.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), *splits])
    return PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", eos_token="<end>")


@cache
def folder(layers=2, hidden=32, words=None):
    made = tempfile.mkdtemp(prefix="klgrad-tiny-")
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    save(made, words or len(WORDS), tokenizer(), num_key_value_heads=2, **shape)
    return made


@cache
def tokenizer():
    return tokenizer_of(WORDS, "w0")


def prompts(rows=64):
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"w{i % 30} w{(7 * i) % 30}" for i in range(rows)]})


def reward(completion_ids, **_):
    return [sum(token == TARGET for token in ids) + 0.1 * len(ids) for ids in completion_ids]


SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "seed": 1,
    "gradient_checkpointing": False,
}


def trainer(trainer_class, config_class, output, model=None, reward_funcs=reward, **settings) -> Any:
    of_trainer = {name: settings.pop(name) for name in ("peft_config", "processing_class") if name in settings}
    return trainer_class(
        model=model or folder(),
        reward_funcs=reward_funcs,
        args=config_class(output_dir=str(output), **{**SETTINGS, **settings}),
        train_dataset=prompts(),
        **{"processing_class": tokenizer(), **of_trainer},
    )


def trained(*args, **settings) -> Any:
    made = trainer(*args, **settings)
    made.train()
    return made


def move_reference(trainer):
    """Away from the policy, so that there is a KL."""
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(1.5)


def weights(trained):
    return torch.cat([p.detach().flatten() for p in trained.model.parameters()])


def logged(trained, name):
    return [row[name] for row in trained.state.log_history if name in row]

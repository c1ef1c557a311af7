"""A stock GRPO run of TRL with `KLCallback`: a tiny model with random weights, on a CPU, without a download.

Run `python examples/callback.py FOLDER`, then `klgrad logs FOLDER/rollouts --by step --html kl.html`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

from klgrad.trl import KLCallback

WORDS = ["<pad>", "<eos>", "<unk>", *map(str, range(50))]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model() -> LlamaForCausalLM:
    """Two layers with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **sizes))


def reward(completions: list[str], **columns: object) -> list[float | None]:
    """How often 7 is written."""
    return [float(completion.split().count("7")) for completion in completions]


def main(folder: Path) -> None:
    """Train for ten updates, and measure every second one."""
    args = GRPOConfig(
        str(folder),
        max_steps=10,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    prompts = Dataset.from_dict({"prompt": [f"{i} {i + 1}" for i in range(40)]})
    callback = KLCallback(every=2, log_rollouts=folder / "rollouts")
    GRPOTrainer(
        model(), reward, args, train_dataset=prompts, processing_class=tokenizer(), callbacks=[callback]
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "callback-run"))

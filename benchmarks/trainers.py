"""Trainers side by side: TRL's and klgrad's around copies of one model, on one stored batch of completions."""

import copy
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PrinterCallback, TrainerCallback

GROUP = 8


@dataclass(frozen=True)
class Size:
    """Of the batch, and of how often it is trained on."""

    completions: int
    prompt: int
    length: int
    steps: int
    rounds: int = 1


class Clock(TrainerCallback):
    """Seconds of each step, and the most memory that it took beyond what stood before it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.standing: list[int] = []
        self.extra: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Models and the optimizer's state stand; nothing of the step before is still under way."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.standing.append(torch.cuda.memory_allocated())
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer has stepped."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.extra.append(torch.cuda.max_memory_allocated() - self.standing[-1])
        self.seconds.append(time.perf_counter() - self._start)


class Stage:
    """Prompts, completions and rewards, and a model to start from."""

    def __init__(self, folder: Path, tokenizer: Any, size: Size, dtype: torch.dtype) -> None:
        self.size, self.tokenizer = size, tokenizer
        # TRL loads the reference from where the policy came from, so that both start alike.
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.vocabulary: int = self.model.config.vocab_size
        draw, known = random.Random(0), range(100, min(len(tokenizer), self.vocabulary))
        self.completions = [draw.choices(known, k=size.length) for _ in range(size.completions)]
        self.rewards = [draw.random() for _ in range(size.completions)]
        self.prompts = [f"{i}" + " a" * (size.prompt - 1) for i in range(size.completions // GROUP)]

    def train(self, settings: dict[str, Any], steps: int) -> Clock:
        """Some steps of a fresh trainer: TRL's own where `beta` is set, else klgrad's."""
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(settings, steps, folder)
            trainer.remove_callback(PrinterCallback)
            trainer.add_callback(clock)
            trainer.train()
        return clock

    def trainer(self, settings: dict[str, Any], steps: int, folder: str) -> Any:
        """One that is given its completions instead of sampling them."""
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        from klgrad.trl import KLConfig, KLTrainer

        make, configure = (GRPOTrainer, GRPOConfig) if "beta" in settings else (KLTrainer, KLConfig)
        args = configure(
            output_dir=folder,
            per_device_train_batch_size=self.size.completions,
            num_generations=GROUP,
            max_completion_length=self.size.length,
            max_steps=steps,
            gradient_checkpointing=False,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **settings,
        )
        made = make(
            model=copy.deepcopy(self.model),
            reward_funcs=lambda completions, **_: self.rewards,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": self.prompts}),
            processing_class=self.tokenizer,
        )
        made._generate_single_turn = lambda *_, **__: ([list(ids) for ids in self.completions], None)
        return made


def save_random_llama(folder: Path, vocabulary: int, hidden: int, layers: int) -> None:
    """In bf16; its head is its embedding, as models of this size have it."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=True,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)

"""Runs TRL's and klgrad's trainers in turn, with copies of one model and the same stored batch of completions."""

import copy
import gc
import random
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PrinterCallback, TrainerCallback

GROUP = 8


@dataclass(frozen=True)
class Size:
    """The size of the batch, and the number of steps."""

    completions: int
    prompt: int
    length: int
    steps: int


class Turns:
    """Lets one of several threads run at a time, in turn, in a new random order every cycle."""

    def __init__(self, names: list[str]) -> None:
        self.active, self._order, self._shuffle = set(names), [], random.Random(0)
        self._changed, self._now = threading.Condition(), ""

    def await_own(self, name: str) -> None:
        """Wait for the turn of a thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._now == name)

    def pass_on(self) -> None:
        """Give the turn to the next thread."""
        with self._changed:
            self._order = [name for name in self._order if name in self.active]
            if not self._order:
                self._order = self._shuffle.sample(sorted(self.active), len(self.active))
            self._now = self._order.pop() if self._order else ""
            self._changed.notify_all()

    def leave(self, name: str) -> None:
        """Remove a thread from the cycle."""
        self.active.discard(name)
        self.pass_on()


class Clock(TrainerCallback):
    """Measures the seconds of each step, and its peak memory beyond the memory before it."""

    def __init__(
        self, name: str = "", turns: Turns | None = None, timer: Callable[[], float] = time.perf_counter
    ) -> None:
        self.name, self.turns, self.timer = name, turns, timer
        self.seconds: list[float] = []
        self.standing: list[int] = []
        self.extra: list[int] = []
        self.own: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the turn, which lasts from here to the end of a step."""
        self._begin()

    def _begin(self) -> None:
        if self.turns is not None:
            self.turns.await_own(self.name)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        elif self.turns is None:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which takes a while
        self.standing.append(_memory("allocated"))
        self.own.append(0.0)
        self._start = self.timer()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the step after the optimizer has finished."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(self.timer() - self._start)
        self.extra.append(_memory("max") - self.standing[-1])
        if self.turns is not None:
            self.turns.pass_on()
        self._begin()


def _memory(which: str) -> int:
    """Current or peak memory in bytes: of the GPU, or resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() if which == "allocated" else torch.cuda.max_memory_allocated()
    field = "VmRSS" if which == "allocated" else "VmHWM"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


@contextmanager
def own_time(clock: "Clock") -> Iterator[None]:
    """Measure the time of klgrad's own code in each step: the rollout, the term, and its metrics."""
    from klgrad import KLTerm
    from klgrad.trl import kl_trainer
    from klgrad.trl.metrics import KLMetrics
    from klgrad.trl.scorer import Scorer

    own = [(kl_trainer, "gather_rows"), (Scorer, "rollout"), (kl_trainer, "per_token_loss")]
    places: list[tuple[Any, str]] = [*own, (KLTerm, "__call__"), (KLMetrics, "record")]
    before, inside = [getattr(*place) for place in places], []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = _now()
            inside.append(start)
            try:
                return function(*args, **kwargs)
            finally:
                inside.pop()
                clock.own[-1] += 0.0 if inside else _now() - start  # nested calls count once

        return run

    for place, function in zip(places, before, strict=True):
        setattr(*place, timed(function))
    try:
        yield
    finally:
        for place, function in zip(places, before, strict=True):
            setattr(*place, function)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Stage:
    """Prompts, completions and rewards, and a model to start from."""

    timer: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, folder: Path, tokenizer: Any, size: Size, dtype: torch.dtype) -> None:
        self.size, self.tokenizer = size, tokenizer
        # TRL loads the reference from the same folder as the policy, so that both start equal.
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.vocabulary: int = self.model.config.vocab_size
        draw, known = random.Random(0), range(100, min(len(tokenizer), self.vocabulary))
        self.completions = [draw.choices(known, k=size.length) for _ in range(size.completions)]
        self.rewards = [draw.random() for _ in range(size.completions)]
        self.prompts = [f"{i}" + " a" * (size.prompt - 1) for i in range(size.completions // GROUP)]

    def train(self, settings: dict[str, Any], steps: int) -> Clock:
        """Run some steps of a new trainer: TRL's own if `beta` is set, else klgrad's."""
        clock = Clock()
        with own_time(clock), tempfile.TemporaryDirectory() as folder:
            self._with(clock, self.trainer(settings, steps, folder)).train()
        return clock

    def train_in_turn(self, candidates: dict[str, dict[str, Any]], steps: int) -> dict[str, Clock]:
        """Run one step of each candidate in turn, so that a slower machine affects all of them."""
        turns, clocks, failed = Turns(list(candidates)), {}, []

        def run(name: str, trainer: Any) -> None:
            try:
                trainer.train()
            except Exception:
                failed.append(name)
                print(f"  {name} does not run here:\n{traceback.format_exc()[-2000:]}", flush=True)
            finally:
                turns.leave(name)

        with tempfile.TemporaryDirectory() as folder:
            threads = []
            for name, settings in candidates.items():
                clocks[name] = Clock(name, turns, self.timer)
                trainer = self._with(clocks[name], self.trainer(settings, steps, f"{folder}/{len(threads)}"))
                threads.append(threading.Thread(target=run, args=(name, trainer)))
            for thread in threads:
                thread.start()
            turns.pass_on()
            for thread in threads:
                thread.join()
        return {name: clock for name, clock in clocks.items() if name not in failed}

    def _with(self, clock: Clock, trainer: Any) -> Any:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        return trainer

    def trainer(self, settings: dict[str, Any], steps: int, folder: str) -> Any:
        """A trainer that gets stored completions instead of sampling them; `callbacks` are made by calling each."""
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        from klgrad.trl import KLConfig, KLTrainer

        settings = dict(settings)
        callbacks = [make() for make in settings.pop("callbacks", ())]
        kinds: tuple[Any, Any] = (GRPOTrainer, GRPOConfig) if "beta" in settings else (KLTrainer, KLConfig)
        make, configure = kinds
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
            callbacks=callbacks,
        )
        made._generate_single_turn = lambda *_, **__: ([list(ids) for ids in self.completions], None)
        return made


def save_random_llama(folder: Path, vocabulary: int, hidden: int, layers: int) -> None:
    """Save a random Llama in bf16, with a tied embedding, as is usual for this size."""
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

"""Distillation by a KL alone: what the experiments on it share.

A student with 20 of SmolLM2-135M's 30 layers is trained towards the whole model, with the same prompts and the same
number of completions in every arm, and judged on held-out prompts by exact KLs (`Judge`).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from judge import Judge
from packed import Job, Row

LAYERS = 20
UPDATES = 40
EVERY = 10
COMMON = {
    "max_steps": UPDATES,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 256,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_completion_length": 32,
    "gradient_checkpointing": "false",
    "save_strategy": "no",
    "report_to": "none",
    "eval_size": 64,
}


def train(job: Job, folder: Path, change: Callable[[Any], object] = lambda trainer: None) -> list[Row]:
    """Train one student, and return its evaluations, after every `EVERY` updates or as many as the job says.

    `change` is called with the trainer before training. The rows' `seconds` are those of training so far, without
    evaluations. Jobs that share a GPU slow each other down, so they compare only with those of jobs that ran beside as
    many others.
    """
    import fused_layers
    import graph_sampling
    import shared_prompts

    from klgrad.training.build import build, models_of
    from klgrad.training.settings import parse

    settings = parse("distill", [*job.flags, "--output_dir", str(folder)])
    trainer, evaluator = build(settings, models_of(settings))
    fused_layers.install(trainer)
    graph_sampling.install(trainer)
    shared_prompts.install(trainer)
    judge = Judge(trainer, evaluator, on_reference=True)
    every, rows, clock = job.settings.get("every", EVERY), [], TrainingClock()
    change(trainer)

    def evaluate() -> None:
        step = trainer.state.global_step
        if step % every == 0 and (not rows or rows[-1]["update"] != step):
            clock.stop()
            rows.append({"update": step, "seconds": round(clock.seconds, 2), **judge(seed=1000 + step)})
            clock.start()

    evaluate()
    trainer.after_update = [evaluate]
    trainer.train()
    return rows


class TrainingClock:
    """Counts the seconds between `start` and `stop`; it has not started."""

    def __init__(self) -> None:
        self.seconds, self._since = 0.0, None

    def start(self) -> None:
        """Go on counting."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop counting, when the GPU has finished what was asked of it."""
        if self._since is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds, self._since = self.seconds + time.perf_counter() - self._since, None

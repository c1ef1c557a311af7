"""The share of a run that `KLCallback` takes: `python benchmarks/bench_callback.py MODEL_FOLDER [--steps N]`.

TRL's trainer takes its steps in turn with and without a callback that measures every step; the ratio of two steps of
one cycle, less 1, is the cost of a measurement. By default one step in a hundred is measured, so that the share of a
run is a hundredth of it. Completions are stored: sampling would make the steps longer and the share smaller, so the
share in a real run is below what is printed here. On a CPU the model is a small random one; on a GPU it is the one in
the folder. On a CPU processor time is measured, which other processes do not disturb.
"""

import argparse
import importlib.metadata
import inspect
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers reads it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from bench_trainer import UNCOUNTED, ratio
from harness import RESULTS, provenance, write
from trainers import Size, Stage, save_random_llama
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from klgrad.trl import KLCallback

DEFAULT = inspect.signature(KLCallback).parameters["every"].default
WITHOUT = "without"
SETTINGS: dict[str, float] = {"beta = 0": 0.0, "beta > 0": 0.05}
CALLBACKS: dict[str, tuple[Any, ...]] = {
    WITHOUT: (),
    "sampled": (lambda: KLCallback(every=1),),
    "exact": (lambda: KLCallback(every=1, exact=True),),
}
"""With beta = 0 the start weights are loaded into the policy; with beta > 0 TRL has scored the reference already."""


def rows(stage: Stage, steps: int) -> Iterator[dict[str, object]]:
    """One row per setting and kind of callback."""
    for setting, beta in SETTINGS.items():
        candidates = {name: {"beta": beta, "callbacks": made} for name, made in CALLBACKS.items()}
        clocks = stage.train_in_turn(candidates, steps)
        plain = clocks[WITHOUT].seconds[UNCOUNTED:]
        for name in [name for name in clocks if name != WITHOUT]:
            found = clocks[name].seconds[UNCOUNTED:]
            middle, low, high = ratio(found, plain)
            yield {
                "benchmark": "callback",
                "candidate": f"{name}, {setting}",
                "completions": stage.size.completions,
                "length": stage.size.length,
                "vocabulary": stage.vocabulary,
                "steps": len(found),
                "step_ms": f"{1e3 * median(plain):.4g}",
                "measured_step_ms": f"{1e3 * median(found):.4g}",
                "cost_of_measurement": f"{middle - 1:.3f}",
                "every": DEFAULT,
                "share": f"{(middle - 1) / DEFAULT:.4%}",
                "share_low": f"{(low - 1) / DEFAULT:.4%}",
                "share_high": f"{(high - 1) / DEFAULT:.4%}",
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
                "trl": importlib.metadata.version("trl"),
                **provenance(),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    tokenizer, gpu = AutoTokenizer.from_pretrained(given.model), torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        source, size = given.model, Size(32, prompt=64, length=256, steps=given.steps)
        if not gpu:
            source, size = Path(folder), Size(8, prompt=16, length=48, steps=given.steps)
            save_random_llama(source, len(tokenizer), hidden=256, layers=6)
        stage = Stage(source, tokenizer, size, torch.float32)
        if not gpu:
            stage.timer = time.process_time
        found: list[dict[str, object]] = []
        for row in rows(stage, given.steps):
            found.append(row)
            write(found, given.out / ("callback.csv" if gpu else "callback_cpu.csv"))
            columns = ("candidate", "step_ms", "measured_step_ms", "cost_of_measurement", "share", "share_high")
            print("  ".join(f"{name} {row[name]}" for name in columns), flush=True)


if __name__ == "__main__":
    main()

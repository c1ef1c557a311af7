"""Compare the cost of `KLTrainer` with TRL's `GRPOTrainer`: `python benchmarks/bench_trainer.py MODEL_FOLDER [--tiny]`.

A training step consists of scoring by the reference, forward pass, backward pass and optimizer. All candidates use the
same stored completions: sampling would take most of the time, and hide differences in the rest. The candidates take
their steps in turn. On a CPU the model is a small random one, and memory is resident memory.
"""

import argparse
import gc
import importlib.metadata
import logging
import os
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers reads it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from harness import RESULTS, provenance, write
from trainers import Clock, Size, Stage, save_random_llama
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

BASELINE = "TRL, its KL"
CANDIDATES: dict[str, dict[str, Any]] = {
    "TRL, no KL": {"beta": 0.0},
    BASELINE: {"beta": 0.05},
    "klgrad k1 (sequence)": {"kl_estimator": "k1"},
    "klgrad k1, leave-one-out": {"kl_estimator": "k1", "kl_baseline": "leave_one_out"},
    "klgrad k1_k3": {"kl_estimator": "k1_k3"},
    "klgrad k1, advantage": {"kl_estimator": "k1", "kl_placement": "advantage"},
    "klgrad exact": {"kl_estimator": "exact"},
}
IN_MEMORY = (BASELINE, "klgrad k1 (sequence)", "klgrad exact")
ON_A_CPU = ("TRL, no KL", BASELINE, "klgrad k1 (sequence)", "klgrad k1, leave-one-out")
"""A selection, since a step takes seconds on a CPU."""
SAMPLED = ("klgrad k1 (sequence)", "klgrad k1, leave-one-out", "klgrad k1_k3", "klgrad k1, advantage")
VOCABULARIES = (2**15, 2**17, 2**18)
SIZES = (Size(32, prompt=64, length=256, steps=52), Size(64, prompt=64, length=512, steps=27))
"""A small step, which is dominated by kernel launches, and one that keeps the GPU busy."""
UNCOUNTED = 2
"""The first steps of a trainer, in which kernels are compiled and the optimizer creates its state."""


def attempt(stage: Stage, name: str) -> Clock | None:
    """The steps of one candidate; None, with the reason printed, if it fails, so that the others still run."""
    start, clock = time.perf_counter(), None
    try:
        clock = stage.train(CANDIDATES[name], stage.size.steps)
    except Exception:
        print(f"  {name} does not run here:\n{traceback.format_exc()[-2000:]}", flush=True)
    gc.collect()  # trainers contain reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"  {name}: {time.perf_counter() - start:.1f} s", flush=True)
    return clock


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """The median ratio of two steps of the same cycle, with its 95% bootstrap interval over cycles."""
    draw, pairs = random.Random(0), [a / b for a, b in zip(ours, theirs, strict=True)]
    made = [median(draw.choices(pairs, k=len(pairs))) for _ in range(2000)]
    low, *_, high = quantiles(made, n=40)
    return median(pairs), low, high


def step_rows(stage: Stage) -> Iterator[dict[str, object]]:
    """One row per candidate, as a multiple of TRL with its own KL."""
    chosen = CANDIDATES if torch.cuda.is_available() else {name: CANDIDATES[name] for name in ON_A_CPU}
    found = {name: clock.seconds[UNCOUNTED:] for name, clock in stage.train_in_turn(chosen, stage.size.steps).items()}
    for name, steps in found.items():
        middle, low, high = ratio(steps, found[BASELINE]) if BASELINE in found else 3 * (float("nan"),)
        lower, _, upper = quantiles(steps, n=4)
        yield {
            "benchmark": "trainer step",
            "candidate": name,
            **_shape(stage),
            "steps": len(steps),
            "median_ms": f"{1e3 * median(steps):.4g}",
            "p25_ms": f"{1e3 * lower:.4g}",
            "p75_ms": f"{1e3 * upper:.4g}",
            "times_trl": f"{middle:.4f}",
            "times_trl_low": f"{low:.4f}",
            "times_trl_high": f"{high:.4f}",
            **_measured_with(),
        }


def own_rows(stage: Stage) -> Iterator[dict[str, object]]:
    """The time of a step that is spent in klgrad's own code."""
    for name in SAMPLED:
        if clock := attempt(stage, name):
            own, steps = clock.own[UNCOUNTED:-1], clock.seconds[UNCOUNTED:]
            yield {
                "benchmark": "trainer own",
                "candidate": name,
                **_shape(stage),
                "steps": len(steps),
                "own_ms": f"{1e3 * median(own):.3g}",
                "step_ms": f"{1e3 * median(steps):.4g}",
                "share": f"{median(a / b for a, b in zip(own, steps, strict=True)):.4f}",
                **_measured_with(),
            }


def memory_rows(tokenizer: Any, size: Size, vocabularies: tuple[int, ...], hidden: int) -> Iterator[dict[str, object]]:
    """Peak memory of a step by vocabulary, in addition to models and optimizer, and the size of all logits."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    for vocabulary in vocabularies:
        print(f"memory, vocabulary {vocabulary}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            save_random_llama(Path(folder), vocabulary, hidden=hidden, layers=4)
            stage = Stage(Path(folder), tokenizer, size, dtype)
            for name in IN_MEMORY:
                if clock := attempt(stage, name):
                    yield {
                        "benchmark": "trainer memory",
                        "candidate": name,
                        **_shape(stage),
                        "standing_gib": f"{clock.standing[-1] / 2**30:.2f}",
                        "extra_gib": f"{max(clock.extra[UNCOUNTED:]) / 2**30:.2f}",
                        "logits_gib": f"{dtype.itemsize * size.completions * size.length * vocabulary / 2**30:.2f}",
                        **_measured_with(),
                    }


def _shape(stage: Stage) -> dict[str, int]:
    size = stage.size
    return {"completions": size.completions, "length": size.length, "vocabulary": stage.vocabulary}


def _measured_with() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "trl": importlib.metadata.version("trl"), **provenance()}


def save(rows: Iterator[dict[str, object]], path: Path, columns: tuple[str, ...]) -> None:
    """Write the file again after each row, so that an interrupted run leaves its rows; then print a table."""
    found: list[dict[str, object]] = []
    for row in rows:
        found.append(row)
        write(found, path)
    for row in [{"candidate": "", **dict(zip(columns, columns, strict=True))}, *found]:
        print(f"{row['candidate']:<28}" + "".join(f"{row[name]:>16}" for name in columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tiny", action="store_true", help="two layers only, to try it out on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", default="own,step,memory")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    tokenizer, gpu = AutoTokenizer.from_pretrained(given.model), torch.cuda.is_available()
    columns = ("completions", "median_ms", "p25_ms", "p75_ms", "times_trl", "times_trl_low", "times_trl_high")
    where = "" if gpu else "_cpu"
    with tempfile.TemporaryDirectory() as folder:
        source, sizes = given.model, SIZES
        if not gpu:  # a smaller model and batch
            source, sizes = Path(folder), (Size(8, prompt=16, length=48, steps=5 if given.tiny else 10),)
            shape = {"hidden": 64, "layers": 2} if given.tiny else {"hidden": 576, "layers": 6}
            save_random_llama(source, len(tokenizer), **shape)
        # Weights in float32 under autocast to bf16 are TRL's default.
        stages = lambda: (Stage(source, tokenizer, size, torch.float32) for size in sizes)
        if "own" in given.parts:
            rows = (row for stage in stages() for row in own_rows(stage))
            save(rows, given.out / f"trainer_own{where}.csv", ("completions", "own_ms", "step_ms", "share"))
        if "step" in given.parts:
            rows = (row for stage in stages() for row in step_rows(stage))
            save(rows, given.out / f"trainer_step{where}.csv", columns)
    gc.collect()
    if "memory" not in given.parts:
        return
    size = Size(16, prompt=64, length=1024, steps=UNCOUNTED + 2) if gpu else Size(8, prompt=16, length=256, steps=3)
    vocabularies, hidden = (VOCABULARIES, 1024) if gpu else ((2**15,) if given.tiny else (2**15, 2**17), 256)
    columns = ("vocabulary", "standing_gib", "extra_gib", "logits_gib")
    save(memory_rows(tokenizer, size, vocabularies, hidden), given.out / f"trainer_memory{where}.csv", columns)


if __name__ == "__main__":
    main()

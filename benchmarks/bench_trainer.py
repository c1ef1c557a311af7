"""What `KLTrainer` costs beside TRL's `GRPOTrainer`: `python benchmarks/bench_trainer.py MODEL_FOLDER [--tiny]`.

A training step is scoring by the reference, forward, backward and the optimizer. Completions are stored ones, the same
for all: sampling would be most of the time, and hide what is added to the rest. `--tiny` tries it out on a CPU, with a
random model and the folder's tokenizer.
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
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers looks
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
VOCABULARIES = (2**15, 2**16, 2**17, 2**18)
UNCOUNTED = 2
"""First steps of a trainer, in which kernels are compiled and the optimizer makes its state."""
SECONDS = 110
"""For the rounds of `step`: another one begins only if it would end before, being as long as the last."""


def attempt(stage: Stage, name: str) -> Clock | None:
    """One candidate's steps, or None and its reason: one that does not run here must not end the run."""
    start, clock = time.perf_counter(), None
    try:
        clock = stage.train(CANDIDATES[name], stage.size.steps)
    except Exception:
        print(f"  {name} does not run here:\n{traceback.format_exc()[-2000:]}", flush=True)
    gc.collect()  # trainers refer to themselves
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    took = f"{1e3 * median(clock.seconds[UNCOUNTED:]):.1f} ms a step, " if clock else ""
    print(f"  {name}: {took}{time.perf_counter() - start:.1f} s in all", flush=True)
    return clock


def step_times(stage: Stage) -> dict[str, list[list[float]]]:
    """Seconds of the counted steps, by candidate and round; each round in an order of its own."""
    found: dict[str, list[list[float]]] = {name: [] for name in CANDIDATES}
    shuffle, begin, last = random.Random(0), time.perf_counter(), 0.0
    for turn in range(stage.size.rounds):
        start = time.perf_counter()
        if start - begin + last > SECONDS:
            break
        print(f"step, round {turn + 1}", flush=True)
        for name in shuffle.sample(list(found), len(found)):
            if clock := attempt(stage, name):
                found[name].append(clock.seconds[UNCOUNTED:])
            else:
                del found[name]
        last = time.perf_counter() - start
    return found


def ratio(rounds: list[list[float]], base: list[list[float]]) -> tuple[float, float, float]:
    """Of the medians, and 95% of its bootstrap: rounds are drawn in pairs, then the steps within each."""
    draw, made = random.Random(0), []
    again = lambda x: draw.choices(x, k=len(x))
    for _ in range(2000):
        chosen = again(range(len(rounds)))
        ours, theirs = ([s for r in chosen for s in again(side[r])] for side in (rounds, base))
        made.append(median(ours) / median(theirs))
    low, *_, high = quantiles(made, n=40)
    return median(chain(*rounds)) / median(chain(*base)), low, high


def step_rows(stage: Stage) -> Iterator[dict[str, object]]:
    """One row per candidate, as a multiple of TRL with its own KL."""
    found = step_times(stage)
    for name, rounds in found.items():
        steps = list(chain(*rounds))
        middle, low, high = ratio(rounds, found[BASELINE]) if BASELINE in found else 3 * (float("nan"),)
        lower, _, upper = quantiles(steps, n=4)
        yield {
            "benchmark": "trainer step",
            "candidate": name,
            **_shape(stage),
            "rounds": len(rounds),
            "steps": len(steps),
            "median_ms": f"{1e3 * median(steps):.4g}",
            "p25_ms": f"{1e3 * lower:.4g}",
            "p75_ms": f"{1e3 * upper:.4g}",
            "times_trl": f"{middle:.4f}",
            "times_trl_low": f"{low:.4f}",
            "times_trl_high": f"{high:.4f}",
            **_measured_with(),
        }


def memory_rows(tokenizer: Any, size: Size) -> Iterator[dict[str, object]]:
    """The most memory of a step by vocabulary, beside models and optimizer, and what all logits in bf16 would take."""
    for vocabulary in VOCABULARIES:
        print(f"memory, vocabulary {vocabulary}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            save_random_llama(Path(folder), vocabulary, hidden=1024, layers=4)
            stage = Stage(Path(folder), tokenizer, size, torch.bfloat16)
            for name in IN_MEMORY:
                if clock := attempt(stage, name):
                    yield {
                        "benchmark": "trainer memory",
                        "candidate": name,
                        **_shape(stage),
                        "standing_gib": f"{clock.standing[-1] / 2**30:.2f}",
                        "extra_gib": f"{max(clock.extra[UNCOUNTED:]) / 2**30:.2f}",
                        "logits_gib": f"{2 * size.completions * size.length * vocabulary / 2**30:.2f}",
                        **_measured_with(),
                    }


def _shape(stage: Stage) -> dict[str, int]:
    size = stage.size
    return {"completions": size.completions, "length": size.length, "vocabulary": stage.vocabulary}


def _measured_with() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "trl": importlib.metadata.version("trl"), **provenance()}


def save(rows: Iterator[dict[str, object]], path: Path, columns: tuple[str, ...]) -> None:
    """Write the file anew with each row, so that what is cut short has left something, and print a table."""
    found: list[dict[str, object]] = []
    for row in rows:
        found.append(row)
        write(found, path)
    for row in [{"candidate": "", **dict(zip(columns, columns, strict=True))}, *found]:
        print(f"{row['candidate']:<28}" + "".join(f"{row[name]:>16}" for name in columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers and few tokens, for a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    columns = ("median_ms", "p25_ms", "p75_ms", "times_trl", "times_trl_low", "times_trl_high")
    with tempfile.TemporaryDirectory() as folder:
        source, size = given.model, Size(completions=32, prompt=64, length=256, steps=12, rounds=8)
        if given.tiny:
            source, size = Path(folder), Size(completions=16, prompt=8, length=8, steps=6, rounds=3)
            save_random_llama(source, len(tokenizer), hidden=64, layers=2)
        # Weights in float32 under autocast to bf16 are TRL's default.
        save(step_rows(Stage(source, tokenizer, size, torch.float32)), given.out / "trainer_step.csv", columns)
    if not torch.cuda.is_available():
        print("memory: skipped, for it is that of a GPU")
        return
    size = Size(completions=16, prompt=64, length=1024, steps=UNCOUNTED + 2)
    columns = ("vocabulary", "standing_gib", "extra_gib", "logits_gib")
    save(memory_rows(tokenizer, size), given.out / "trainer_memory.csv", columns)


if __name__ == "__main__":
    main()

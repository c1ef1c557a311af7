"""Distillation with the estimators of Tang & Munos (2025), Fig. 8, on a language model.

The paper's claim: far from the reference, differentiating k3 token by token makes little progress, vanilla estimators
do; sequence-level gradients beat token-level ones; leave-one-out and cumulative (to-go) variants are faster.

Here a student with 20 of SmolLM2-135M's 30 layers is trained towards the whole model by the KL alone. Every arm has
the same prompts, the same number of completions and the same scale (summed over the completion, averaged over
completions). Completions either may end ("may-end") or always have 32 tokens ("fixed-length": the end token is
replaced by one that the model never writes), because a sequence-level term can lower its KL by ending early. All arms
have the same evaluation (`Judge`): the exact KL(student‖teacher) over the whole vocabulary, on the student's own
completions of held-out prompts, and measures that show whether a low KL means a good student.

    python benchmarks/exp_fig8.py sweep TEACHER      every arm at every learning rate, one seed
    python benchmarks/exp_fig8.py seeds TEACHER      each arm at its best rate, from three seeds
    python benchmarks/exp_fig8.py fresh TEACHER      some arms at their best rate, from six seeds that chose no rate

TEACHER is the folder of the unpacked model. Results: src/klgrad/papers/recorded/fig8_sweep.csv
and fig8_seeds.csv, which has the runs of `seeds` and of `fresh`.
"""

import argparse
import csv
import shutil
from pathlib import Path
from typing import Any

from distill_runs import COMMON, LAYERS, UPDATES, train
from experiment import add, missing
from harness import RECORDED
from packed import Job, run_all

RATES = (1e-4, 3e-4, 3e-5, 6e-4)
SEEDS = (0, 1, 2)
FRESH_SEEDS = (3, 4, 5, 6, 7, 8)
UNUSED = "<empty_output>"
"""A token that SmolLM2 never writes."""

EXACT = "--kl_estimator exact --kl_reduction sequence --num_iterations 1"
CELL = "--kl_reduction sequence --kl_cell"
ARMS = {
    "k3-loss": f"{CELL} k3-loss",
    "k2-loss": f"{CELL} k2-loss",
    "k1-reward": f"{CELL} k1-reward",
    "k1-reward-leave-one-out": f"{CELL} k1-reward-leave-one-out",
    "k1-reward-to-go": f"{CELL} k1-reward-to-go",
    "exact-token": f"{EXACT} --kl_level token",
    "exact-discount-0.9-leave-one-out": f"{EXACT} --kl_discount 0.9 --kl_baseline leave_one_out",
}
"""At token level k3 (of GRPO) and k2 (the paper's vanilla); at sequence level the paper's three; and two of ours."""
LENGTHS = ("may-end", "fixed-length")
SEQUENCE_LEVEL = ("k1-reward", "k1-reward-leave-one-out", "k1-reward-to-go", "exact-discount-0.9-leave-one-out")
TOKEN_LEVEL = ("k2-loss", "exact-token")
"""What the sequence level is compared with."""


def sweep(given: Any) -> list[Job]:
    """Every arm at every rate."""
    return [job(given, arm, lengths, rate, 0) for rate in RATES for lengths in LENGTHS for arm in ARMS]


def seeds(given: Any) -> list[Job]:
    """Every arm at its best rate."""
    rates = best_rates(given.out / "fig8_sweep.csv")
    return [job(given, *which, rate, seed) for seed in SEEDS for which, rate in rates.items()]


def fresh(given: Any, arms: tuple[str, ...] = SEQUENCE_LEVEL + TOKEN_LEVEL) -> list[Job]:
    """Some arms at their best rate, with seeds that had no part in its choice."""
    rates = best_rates(given.out / "fig8_sweep.csv")
    chosen = [(arm, lengths, rates[arm, lengths]) for lengths in LENGTHS for arm in arms]
    return [job(given, *each, seed) for seed in FRESH_SEEDS for each in chosen]


def job(given: Any, arm: str, lengths: str, rate: float, seed: int) -> Job:
    """The flags of one run."""
    teacher = given.teacher if lengths == "may-end" else fixed_length(given.teacher, given.runs)
    chosen = {**COMMON, "learning_rate": rate, "seed": seed, "teacher": teacher, "model": f"{teacher}:{LAYERS}"}
    flags = [str(x) for name, value in chosen.items() for x in (f"--{name}", value)]
    label = {"arm": arm, "lengths": lengths, "learning_rate": f"{rate:g}", "seed": seed}
    return Job(f"{arm}_{lengths}_{rate:g}_{seed}", label, [*flags, *ARMS[arm].split()])


def fixed_length(teacher: Path, folder: Path) -> Path:
    """A copy of the model in another folder, whose end token is one that it never writes."""
    target = folder / "teacher-fixed-length"
    if target.is_dir():
        return target
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    partial = folder / f".{target.name}.partial"
    shutil.copytree(teacher, partial, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(partial)
    tokenizer.eos_token = UNUSED
    tokenizer.save_pretrained(partial)
    for kind in (AutoConfig, GenerationConfig):
        config = kind.from_pretrained(partial)
        config.eos_token_id = tokenizer.eos_token_id
        config.save_pretrained(partial)
    return partial.rename(target)


def best_rates(path: Path) -> dict[tuple[str, str], float]:
    """The rate with the lowest final KL per completion, the paper's measure, for each arm and kind of length."""
    with path.open(encoding="utf-8") as file:
        last = [row for row in csv.DictReader(file) if int(row["update"]) == UPDATES]
    last.sort(key=lambda row: -float(row["kl_per_sequence"] or "inf"))
    return {(row["arm"], row["lengths"]): float(row["learning_rate"]) for row in last}  # the lowest is set last


def create_students(given: Any) -> None:
    """Write the weights that all jobs start from."""
    from klgrad.models import resolve

    for teacher in (given.teacher, fixed_length(given.teacher, given.runs)):
        resolve(f"{teacher}:{LAYERS}")


PARTS = {
    "sweep": (sweep, "fig8_sweep.csv"),
    "seeds": (seeds, "fig8_seeds.csv"),
    "fresh": (fresh, "fig8_seeds.csv"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the CSV files")
    parser.add_argument("--runs", type=Path, default=Path("runs/fig8"), help="folder of unfinished work")
    parser.add_argument("--workers", type=int, default=8, help="jobs at once; each takes up to 15 GiB")
    parser.add_argument("--only", default="", help="only jobs whose name contains this")
    given = parser.parse_args()
    made, file = PARTS[given.what]
    given.runs.mkdir(parents=True, exist_ok=True)
    create_students(given)
    jobs = [job for job in missing(made(given), given.out / file) if given.only in job.name]
    add(run_all(jobs, train, given.runs / given.what, given.workers), given.out / file)


if __name__ == "__main__":
    main()

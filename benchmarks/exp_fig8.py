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

TEACHER is the folder of the unpacked model. Results: src/klgrad/papers/recorded/fig8_sweep.csv
and fig8_seeds.csv.
"""

import argparse
import csv
import shutil
from pathlib import Path
from typing import Any

from distill_runs import COMMON, LAYERS, UPDATES, train
from harness import RECORDED, provenance, write
from packed import Job, run_all

RATES = (1e-4, 3e-4, 3e-5, 6e-4)
SEEDS = (0, 1, 2)
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

    shutil.copytree(teacher, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.eos_token = UNUSED
    tokenizer.save_pretrained(target)
    for kind in (AutoConfig, GenerationConfig):
        config = kind.from_pretrained(target)
        config.eos_token_id = tokenizer.eos_token_id
        config.save_pretrained(target)
    return target


def best_rates(path: Path) -> dict[tuple[str, str], float]:
    """The rate with the lowest final KL per completion, the paper's measure, for each arm and kind of length."""
    with path.open(encoding="utf-8") as file:
        last = [row for row in csv.DictReader(file) if int(row["update"]) == UPDATES]
    last.sort(key=lambda row: -float(row["kl_per_sequence"] or "inf"))
    return {(row["arm"], row["lengths"]): float(row["learning_rate"]) for row in last}  # the lowest is set last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sweep", "seeds"])
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the CSV files")
    parser.add_argument("--runs", type=Path, default=Path("runs/fig8"), help="folder of unfinished work")
    parser.add_argument("--workers", type=int, default=8, help="jobs at once; each takes up to 15 GiB")
    parser.add_argument("--only", default="", help="only jobs whose name contains this")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    if given.what == "sweep":
        jobs = [job(given, a, w, r, 0) for r in RATES for w in LENGTHS for a in ARMS]
    else:
        rates = best_rates(given.out / "fig8_sweep.csv")
        jobs = [job(given, a, w, r, seed) for seed in SEEDS for (a, w), r in rates.items()]
    from klgrad.models.resolve import resolve

    for teacher in (given.teacher, given.runs / "teacher-fixed-length"):
        resolve(f"{teacher}:{LAYERS}")  # create it once, before the workers start
    rows = run_all([j for j in jobs if given.only in j.name], train, given.runs / given.what, given.workers)
    write([{**row, **provenance()} for row in rows], given.out / f"fig8_{given.what}.csv")


if __name__ == "__main__":
    main()

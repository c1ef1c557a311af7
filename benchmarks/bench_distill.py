"""Compare klgrad's terms with other trainers in distillation, with one student, teacher and set of prompts.

`python benchmarks/bench_distill.py sweep TEACHER` trains every setting at every rate; `... seeds TEACHER` trains
each setting again, with other seeds, at its best rate. All students have the same evaluation: the exact KL to the
teacher on their own completions of held-out prompts. Runs that are already in the file of results are skipped.
"""

import argparse
import csv
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import RESULTS, provenance, write

KEPT = 20
"""Number of layers of the student; the teacher has 30."""
RATES = (3e-4, 1e-4, 6e-4)
SEEDS = (1, 2, 3)
EVALUATIONS = 4
"""Number of completions of each held-out prompt in the evaluation."""
COMMON = {
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": "128",
    "gradient_accumulation_steps": "2",
    "max_completion_length": "32",
    "gradient_checkpointing": "false",
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": "1",
}
TOKEN = "--kl_level token"
LOO = "--kl_baseline leave_one_out"
SETTINGS = {
    "exact, discount 0": "--kl_estimator exact --kl_discount 0",
    "exact, discount 0, completions used twice": "--kl_estimator exact --kl_discount 0 --num_iterations 2",
    "exact, discount 0, completions used 4 times": "--kl_estimator exact --kl_discount 0 --num_iterations 4",
    "exact, discount 0.5, leave-one-out": f"--kl_estimator exact --kl_discount 0.5 {LOO}",
    "exact, discount 1, leave-one-out": f"--kl_estimator exact --kl_discount 1 {LOO}",
    "top 64, the tail sampled": "--kl_estimator exact --kl_discount 0 --kl_top_k 64",
    "sampled, sequence level": f"--kl_estimator k1_k3 --kl_discount 1 {LOO}",
    "TRL DistillationTrainer, reverse KL (its default)": "trl 1.0",
    "TRL DistillationTrainer, JSD": "trl 0.5",
    "TRL DistillationTrainer, forward KL": "trl 0.0",
    "on-policy distillation: k1 of the token as advantage": f"--kl_estimator k1 --kl_placement advantage {TOKEN}",
    "k1 of the completion as reward": "--kl_estimator k1 --kl_placement reward --kl_discount 1",
    "GRPO's k3 as loss": "--kl_reduction sequence --kl_cell k3-loss",
}
"""First the terms of klgrad; then other methods, with their own trainer or with the same loss in `KLTrainer`."""
OWN = 7
"""The number of settings, from the first, that are klgrad's."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    setting: str
    rate: float
    seed: int

    @property
    def folder(self) -> str:
        """The name of its output folder."""
        return f"{list(SETTINGS).index(self.setting):02d}-{self.rate:g}-{self.seed}"

    def key(self, generations: int) -> tuple[str, ...]:
        """Identifies the run in a file of results."""
        return self.setting, f"{self.rate:g}", str(self.seed), str(self.updates(generations))

    def updates(self, generations: int) -> int:
        """The number of updates: all settings have the same number of completions, and some use them more than once."""
        how = SETTINGS[self.setting].split()
        return generations * int(how[how.index("--num_iterations") + 1]) if "--num_iterations" in how else generations

    def command(self, given: Any, out: Path) -> list[str]:
        """The command line of the run."""
        chosen = {**COMMON, "max_steps": self.updates(given.updates), "learning_rate": self.rate, "seed": self.seed}
        flags = [str(x) for name, value in chosen.items() for x in (f"--{name}", value)]
        how = SETTINGS[self.setting].split()
        if how[0] == "trl":
            return [sys.executable, __file__, "trl", str(given.teacher), "--beta", how[1], "--out", str(out), *flags]
        data = ["--eval_every", "0", "--eval_size", "8", "--overwrite", "true"]
        if LOO in SETTINGS[self.setting] or "reward" in how:
            data += ["--num_generations", "8"]  # the other settings need no groups
        models = ["--model", f"{given.teacher}:{KEPT}", "--teacher", str(given.teacher), "--output_dir", str(out)]
        return [sys.executable, "-m", "klgrad", "distill", *models, *data, *flags, *how]


def train_all(jobs: list[Job], given: Any) -> Iterator[tuple[Job, Path]]:
    """Train several jobs at a time, and yield each when it is finished; a failed job is reported and left out."""
    from klgrad.models import resolve

    resolve(f"{given.teacher}:{KEPT}")  # create it once, before the jobs start
    runs: Path = given.runs

    def one(job: Job) -> tuple[Job, Path | None]:
        out, start = runs / job.folder, time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        with (runs / f"{job.folder}.log").open("w") as log:
            status = subprocess.run(job.command(given, out), stdout=log, stderr=subprocess.STDOUT).returncode
        print(f"{job.setting} at {job.rate:g}, seed {job.seed}: exit {status}, {time.monotonic() - start:.0f} s")
        return job, out / "model" if status == 0 else None

    with ThreadPoolExecutor(given.jobs) as pool:
        for done in as_completed([pool.submit(one, job) for job in jobs]):
            job, path = done.result()
            if path is not None:
                yield job, path


def evaluator(given: Any) -> Any:
    """A function from the folder of a model to its KL and lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    from klgrad.training.build import build, models_of
    from klgrad.training.settings import parse

    flags = [x for name, value in COMMON.items() for x in (f"--{name}", value)]
    models = ["--model", f"{given.teacher}:{KEPT}", "--teacher", str(given.teacher)]
    settings = parse("distill", [*models, *flags, "--eval_size", "64", "--output_dir", str(given.runs / "evaluator")])
    trainer, evaluate = build(settings, models_of(settings))
    student = str(models_of(settings).path)

    def judge(folder: Path | None) -> dict[str, float]:
        source = AutoModelForCausalLM.from_pretrained(folder or student, dtype=torch.float32)
        trainer.model.load_state_dict(source.state_dict())
        found = []
        for seed in range(EVALUATIONS):
            object.__setattr__(evaluate, "seed", 1000 + seed)
            found.append(evaluate(trainer))
        mean = lambda pick: sum(pick(x) for x in found) / len(found)
        return {
            "kl_per_token": mean(lambda x: x["kl"]["per_token"]["mean"]),
            "kl_per_completion": mean(lambda x: x["kl"]["per_sequence"]["mean"]),
            "length": mean(lambda x: x["length"]),
            "correct_in_domain": mean(lambda x: x["domains"]["in"]["reward"]),
        }

    return judge


def train_by_trl(given: Any, rest: list[str]) -> None:
    """Train with TRL's own distillation trainer, on the prompts of `klgrad distill`."""
    from transformers import AutoTokenizer
    from trl.scripts.utils import TrlParser
    from trl.trainer.distillation_config import DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer

    from klgrad.models import resolve
    from klgrad.training.data import data_of
    from klgrad.training.settings import RunConfig

    student = resolve(f"{given.teacher}:{KEPT}")
    kinds: Any = (DistillationConfig,)
    args = TrlParser(kinds).parse_args_into_dataclasses([*rest, "--output_dir", str(given.out)])[0]
    args.beta, args.disable_tqdm = given.beta, True
    tokenizer = AutoTokenizer.from_pretrained(student, padding_side="left")
    data = data_of(RunConfig(eval_size=8), args.seed, conversational=True)
    trainer = DistillationTrainer(
        student,
        str(given.teacher),
        args,
        train_dataset=data.train.select_columns(["prompt"]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(given.out / "model"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results; none if it does not exist."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def best_rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The best rate of each setting, by the KL per token."""
    ordered = sorted((row for row in rows if row["learning_rate"]), key=lambda row: -float(row["kl_per_token"]))
    return {row["setting"]: float(row["learning_rate"]) for row in ordered}  # the last one, with the lowest KL, stays


def to_do(given: Any, made: list[dict[str, Any]]) -> list[Job]:
    """The jobs that are not in the file yet, the longest first."""
    names = [name for name in SETTINGS if re.search(given.only, name)]
    if not names:
        raise SystemExit(f"--only {given.only!r} finds none of: {'; '.join(SETTINGS)}")
    if given.what == "sweep":
        jobs = [Job(name, rate, 0) for rate in RATES for name in names]
    else:
        rates = best_rates(rows_of(given.out / "distill_sweep.csv"))
        jobs = [Job(name, rates[name], seed) for seed in SEEDS for name in names if name in rates]
    known = {(row["setting"], row["learning_rate"], row["seed"], row["updates"]) for row in made}
    return sorted((job for job in jobs if job.key(given.updates) not in known), key=lambda job: -job.updates(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["sweep", "seeds", "trl"])
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--runs", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=8, help="at once; each takes 10 to 16 GiB")
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--only", default="", help="settings whose name this regular expression finds")
    given, rest = parser.parse_known_args()
    if given.what == "trl":
        return train_by_trl(given, rest)
    results = given.out / f"distill_{given.what}.csv"
    made, judge = rows_of(results), None
    start = [] if made else [(None, None)]
    for job, folder in itertools.chain(start, train_all(to_do(given, made), given)):
        judge = judge or evaluator(given)
        numbers = {name: f"{value:.4g}" for name, value in judge(folder).items()}
        setting = {"setting": "the student as it starts", "own": "", "learning_rate": "", "seed": ""}
        if job is not None:
            own = list(SETTINGS).index(job.setting) < OWN
            setting = {"setting": job.setting, "own": own, "learning_rate": f"{job.rate:g}", "seed": job.seed}
        updates = "" if job is None else job.updates(given.updates)
        made.append({**setting, **numbers, "updates": updates, **provenance()})
        print(json.dumps({**setting, **numbers}))
        write(made, results)
    return None


if __name__ == "__main__":
    main()

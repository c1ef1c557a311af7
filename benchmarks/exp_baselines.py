"""What SmolLM2-135M answers before any training: greedy and by temperature, on the questions of the experiments.

The experiments sample at temperature 1, so a part of what training gains is sharper sampling, which needs no training.
The untrained model is also the reference of the runs with a reward and the teacher of the distillations. Its questions
are those of `rl_runs.py`, held out, of other kinds, and drawn as the training questions are; and those on which
distilled students are judged. The KL is that of the sharper policy from temperature 1, exact for each token.

    python benchmarks/exp_baselines.py MODEL

It runs on a CPU, in about 20 minutes on one core. Result: src/klgrad/papers/recorded/baselines.csv.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import distill_runs
import torch
from harness import RECORDED, provenance, read, write
from rl_runs import COMMON
from transformers import AutoModelForCausalLM, AutoTokenizer

from klgrad.support import Json
from klgrad.training.data import TASKS, correct, evaluation_rows, tasks_of, training_rows

SEEDS = (0, 1, 2)
TEMPERATURES = (1.0, 0.5, 0.0)
"""0 is greedy decoding."""
NAMES = ("in domain", "out of domain", "drawn as in training", "distillation")
EVERY, EVERY_DISTILLED = 12, 6
"""One in so many of the questions on which trained models are judged. The first ones would not do: the questions are
distinct, so the short ones, of which there are few, come first."""
BATCH = 32


def sets(seed: int) -> Iterator[tuple[str, int, list[Json]]]:
    """The questions of one seed: name, the most tokens of a completion, and rows."""
    trained, evaluated = (tasks_of(str(COMMON[name]).split(",")) for name in ("task", "eval_task"))
    size, digits = COMMON["eval_size"], COMMON["digits"]
    held_out = {task.name: evaluation_rows(task, size, digits, seed)[::EVERY] for task in evaluated}
    inside = [task.name for task in trained]
    longest = COMMON["max_completion_length"]
    yield "in domain", longest, [row for name in inside for row in held_out[name]]
    yield "drawn as in training", longest, training_rows(trained, 2 * size // EVERY, digits, seed)
    yield "out of domain", longest, [row for name in held_out if name not in inside for row in held_out[name]]
    kinds = [task for task in TASKS.values() if task.use != "named"]
    distilled = [row for kind in kinds for row in evaluation_rows(kind, distill_runs.COMMON["eval_size"], 1, seed)]
    yield "distillation", distill_runs.COMMON["max_completion_length"], distilled[::EVERY_DISTILLED]


class Sampler:
    """Samples every prompt at every temperature; what all prompts begin with is read once, and a prompt once."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def chat(self, prompt: str) -> list[int]:
        """The ids of a prompt by the chat template."""
        messages = [{"role": "user", "content": prompt}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    @torch.inference_mode()
    def __call__(self, prompts: list[str], longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(prompts, temperatures, tokens) ids, and the KL of each completion from temperature 1."""
        chats, copies, end = [self.chat(prompt) for prompt in prompts], len(TEMPERATURES), self.tokenizer.eos_token_id
        shared = next(i for i, column in enumerate(zip(*chats, strict=False)) if len(set(column)) > 1)
        width = max(map(len, chats))
        rows = torch.tensor([[*ids[:shared], *[end] * (width - len(ids)), *ids[shared:]] for ids in chats])
        mask = torch.tensor([[1] * shared + [0] * (width - len(ids)) + [1] * (len(ids) - shared) for ids in chats])
        place = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = self.model(input_ids=rows[:1, :shared], use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(len(rows))
        given = {"attention_mask": mask, "position_ids": place[:, shared:], "past_key_values": cache}
        logits = self.model(input_ids=rows[:, shared:], logits_to_keep=1, **given).logits[:, -1]
        cache.batch_repeat_interleave(copies)
        logits, mask, place = (x.repeat_interleave(copies, 0) for x in (logits, mask, place[:, -1:]))
        temperature = torch.tensor(TEMPERATURES).repeat(len(rows))[:, None]
        # Completions that have ended leave the batch: `alive` has the places of the others.
        alive = torch.arange(len(logits))
        kl, ids = torch.zeros(len(logits)), torch.full((len(logits), longest), end)
        for step in range(longest):
            token, divergence = sample(logits, temperature[alive])
            ids[alive, step], kl[alive] = token, kl[alive] + divergence
            going = (token != end).nonzero()[:, 0]
            alive, token, mask, place = (x[going] for x in (alive, token, mask, place))
            if step == longest - 1 or not len(alive):
                break
            cache.batch_select_indices(going)
            mask, place = torch.cat([mask, mask.new_ones(len(mask), 1)], 1), place + 1
            given = {"attention_mask": mask, "position_ids": place, "past_key_values": cache}
            logits = self.model(input_ids=token[:, None], **given).logits[:, -1]
        return ids.view(len(rows), copies, longest), kl.view(len(rows), copies)


def sample(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row at its temperature, and the KL of that distribution from the one at temperature 1."""
    ref, greedy = logits.log_softmax(-1), temperature[:, 0] == 0
    logp = (logits / temperature.clamp(min=1e-3)).log_softmax(-1)
    best = logits.argmax(-1)
    token = torch.where(greedy, best, torch.multinomial(logp.exp(), 1)[:, 0])
    exact = (logp.exp() * (logp - ref)).sum(-1)
    return token, torch.where(greedy, -ref.gather(-1, best[:, None])[:, 0], exact)


def measure(sampler: Sampler, name: str, seed: int, longest: int, rows: list[Json]) -> list[dict[str, Any]]:
    """A row for each temperature."""
    torch.manual_seed(1000 + seed)
    rows = sorted(rows, key=lambda row: len(row["prompt"]))
    found: list[list[tuple[float, float, int]]] = [[] for _ in TEMPERATURES]
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        ids, kl = sampler([row["prompt"] for row in part], longest)
        for i in range(len(TEMPERATURES)):
            texts = sampler.tokenizer.batch_decode(ids[:, i], skip_special_tokens=True)
            right = correct(completions=texts, answer=[row["answer"] for row in part])
            ends = ids[:, i] == sampler.tokenizer.eos_token_id
            lengths = (ends.cumsum(-1) - ends.long() == 0).sum(-1)  # with the end token
            found[i] += zip(right, kl[:, i].tolist(), lengths.tolist(), strict=True)
    return [_row(name, seed, at, each) for at, each in zip(TEMPERATURES, found, strict=True)]


def _row(name: str, seed: int, temperature: float, found: list[tuple[float, float, int]]) -> dict[str, Any]:
    right, kl, length = zip(*found, strict=True)
    row: dict[str, Any] = {"set": name, "seed": seed, "temperature": temperature, "questions": len(found)}
    for column, values in {"correct": right, "kl_per_sequence": kl}.items():
        row |= {column: f"{fmean(values):.5g}", f"{column}_se": f"{stdev(values) / math.sqrt(len(found)):.5g}"}
    return row | {"length": f"{fmean(length):.5g}", **provenance()}


def main() -> None:
    """Measure what the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the unpacked model")
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the CSV file")
    parser.add_argument("--runs", type=Path, help="not used: there is no unfinished work")
    given = parser.parse_args()
    path, sampler = given.out / "baselines.csv", None
    jobs = [(seed, *each) for seed in SEEDS for each in sets(seed)]
    for seed, name, longest, rows in sorted(jobs, key=lambda job: NAMES.index(job[1])):
        known = read(path)
        if any((row["set"], row["seed"]) == (name, str(seed)) for row in known):
            continue
        sampler = sampler or Sampler(given.model)
        write([*known, *measure(sampler, name, seed, longest, rows)], path)
        print(f"{name}, seed {seed}: {len(rows)} questions", flush=True)


if __name__ == "__main__":
    main()

"""Evaluate a model on held-out prompts: rewards, and the KL to its reference. Training is not affected."""

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy
import torch
from accelerate import Accelerator
from torch import Tensor

from ..core.result import Estimate, proportion_interval, ratio_of_means
from ..core.rollout import Rollout
from ..integrations import lend
from ..reports import KLSums, Report
from ..support import Json
from ..trl import KLTrainer
from ..trl.compat import decode, generate, padded, tokenize_prompts
from ..trl.scorer import gather_rows
from .data import EvaluationSet, Reward, arguments, values_of


@contextmanager
def apart_from_rng(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch inside the block, and restore their states after it.

    Example:
        >>> random.seed(0)
        >>> with apart_from_rng(seed=1):
        ...     inside = random.random()
        >>> first = random.random()
        >>> random.seed(0)
        >>> first == random.random()
        True
    """
    python, arrays = random.getstate(), numpy.random.get_state()
    device = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(device):
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


SAMPLES = 3
"""Completions of each set that an evaluation keeps: of its first prompts, so that evaluations can be compared."""


@dataclass(frozen=True)
class Evaluator:
    """Samples one completion for each held-out prompt, always with the same seed.

    Attributes:
        sets: prompts by task.
        rewards: reward functions; empty for distillation without a verifier.
        weights: one for each reward.
        seed: of the samples.
        greedy: report the rewards of greedy decoding too, as a set of its own for each task.
        comparison: with the teachers of a distillation; None for others.
    """

    sets: list[EvaluationSet]
    rewards: list[Reward]
    weights: list[float]
    seed: int
    greedy: bool = False
    comparison: "TeacherComparison | None" = None

    @property
    def count(self) -> int:
        return sum(len(task.rows) for task in self.sets)

    def __call__(self, trainer: KLTrainer, advanced: Callable[[int], None] = lambda count: None) -> Json:
        """Evaluate the trainer's model. `advanced` is called after each batch with the number of its prompts.

        The history gets rewards by set and by domain, the KL to the reference over all prompts, the mean length, some
        of the completions; for a distillation also the comparison with its teachers.
        """
        training = trainer.model.training
        trainer.model.eval()
        if self.comparison is not None:
            self.comparison.forget_student()
        seed = self.seed + trainer.accelerator.process_index
        try:
            with apart_from_rng(seed), torch.no_grad():
                results = self._evaluate(trainer, advanced)
            if self.comparison is not None and not trainer.args.use_vllm:  # vLLM generates by the student alone
                with apart_from_rng(seed), torch.no_grad():
                    results["distillation"] = self.comparison(self, trainer)
            return results
        finally:
            trainer.model.train(training)

    def _evaluate(self, trainer: KLTrainer, advanced: Callable[[int], None]) -> Json:
        sums, scores, sets, samples = KLSums(), {"in": [], "out": []}, {}, []
        for task in self.sets:
            rewards, greedy, texts = list[float](), list[float](), list[str]()
            for rows in steps(trainer, task):
                local = share(rows, trainer.accelerator)
                completions = self.sample(trainer, local)
                if self.comparison is not None:
                    self.comparison.kept.setdefault((STUDENT, task.name, False), []).append(completions)
                texts = texts or decode(trainer, completions[:SAMPLES])  # of the first prompts, in the main process
                rewards += self.scores(trainer, local, completions)[: len(rows)]
                if self.greedy:
                    greedy += self.scores(trainer, local, self.sample(trainer, local, greedily=True))[: len(rows)]
                sums.add(rollout(trainer, local, completions, len(rows)))
                advanced(len(rows))
            firsts = zip(task.rows, texts, rewards or [None] * len(texts), strict=False)
            samples += [
                {"set": task.name, "prompt": row["prompt"], "completion": text, "reward": reward}
                for row, text, reward in firsts
            ]
            if rewards:
                scores[task.domain] += rewards
                sets[task.name] = {"domain": task.domain, **mean_reward(rewards)}
            if greedy:
                sets[f"{task.name}, greedy"] = {"domain": task.domain, **mean_reward(greedy)}
        report = sums.report()
        domains = {name: mean_reward(values) for name, values in scores.items() if values}
        length = float(report.scalars["length/mean"])
        return {"sets": sets, "domains": domains, "kl": _kl(report), "length": length, "samples": samples}

    def sample(
        self, trainer: KLTrainer, rows: list[Json], column: str = "prompt", *, greedily: bool = False
    ) -> list[list[int]]:
        """Generate as the trainer does, with or without vLLM, after the prompts of a column; or by greedy decoding."""
        prompts = tokenize_prompts(trainer, [row[column] for row in rows])
        if not greedily:
            return generate(trainer, prompts)
        greedy = copy.deepcopy(trainer.generation_config)
        greedy.do_sample = False
        greedy.temperature = greedy.top_p = greedy.top_k = greedy.min_p = None
        with lend(trainer, generation_config=greedy):
            return generate(trainer, prompts)

    def scores(self, trainer: KLTrainer, rows: list[Json], completions: list[list[int]]) -> list[float]:
        """The rewards of all processes' completions; none without reward functions."""
        if not self.rewards:
            return []
        values = torch.tensor(self._rewards(trainer, rows, completions), device=trainer.accelerator.device)
        return gather_rows(trainer.accelerator, {"reward": values})[0]["reward"].tolist()

    def _rewards(self, trainer: KLTrainer, rows: list[Json], completions: list[list[int]]) -> list[float]:
        texts = decode(trainer, completions)
        chats = [
            t if isinstance(row["prompt"], str) else [{"role": "assistant", "content": t}]
            for t, row in zip(texts, rows, strict=True)
        ]
        named = arguments(rows, chats, completions, trainer.state)
        total = [0.0] * len(rows)
        for reward, weight in zip(self.rewards, self.weights, strict=True):
            values = values_of(reward, named)
            total = [a + weight * (0.0 if b is None else b) for a, b in zip(total, values, strict=True)]
        return total


Kept = dict[tuple[str, str, bool], list[list[list[int]]]]


@dataclass
class TeacherComparison:
    """Compares a student with its teachers, on the same prompts.

    Attributes:
        teachers: their names.
        kept: completions by name, set and decoding; those of the teachers are the same in every evaluation.
    """

    teachers: list[str]
    kept: Kept = field(default_factory=Kept)

    def __call__(self, evaluator: Evaluator, trainer: KLTrainer) -> Json:
        """Rewards of the student and of each teacher, sampled and greedy.

        With one teacher also KL(teacher‖student), on the teacher's completions; and with an exact term the overlap of
        the two models' likeliest entries, on the student's.
        """
        models = itertools.chain([trainer.model_wrapped], trainer.scorer.each_reference())
        results: Json = {"rewards": {}}
        for name, model in zip([STUDENT, *self.teachers], models, strict=True):
            with lend(trainer, model_wrapped=model):  # by which TRL generates
                results["rewards"][name] = self._rewards(evaluator, trainer, name)
        if len(self.teachers) > 1:
            return results
        sums, overlaps = KLSums(), list[Tensor]()
        for task in evaluator.sets:
            for i, rows in enumerate(steps(trainer, task)):
                local = share(rows, trainer.accelerator)
                batch = rollout(trainer, local, self.kept[self.teachers[0], task.name, False][i], len(rows))
                # There the teacher is the policy, and the student its reference.
                sums.add(Rollout(batch.ref_logp, batch.logp, batch.mask, token_reverse_kl=batch.token_forward_kl))
                if trainer.objective.exact:
                    overlaps.append(overlap(trainer, local, self.kept[STUDENT, task.name, False][i])[:, : len(rows)])
        results["forward_kl"] = _kl(sums.report())
        if overlaps:
            *masses, tokens = torch.cat(overlaps, 1)
            named = zip(("student_on_teachers", "teacher_on_students"), masses, strict=True)
            results["overlap"] = {"k": TOP, **{name: _mean(ratio_of_means(mass, tokens)) for name, mass in named}}
        return results

    def forget_student(self) -> None:
        """Before an evaluation: it has changed."""
        self.kept = {key: value for key, value in self.kept.items() if key[0] != STUDENT}

    def _rewards(self, evaluator: Evaluator, trainer: KLTrainer, name: str) -> Json:
        """By decoding and domain, of the model that generates now."""
        column = "prompt" if name == STUDENT else trainer.args.teacher_prompt or "prompt"
        results: Json = {}
        for how, greedy in (("sampled", False), ("greedy", True)):
            rewards: dict[str, list[float]] = {"in": [], "out": []}
            for task in evaluator.sets:
                shares = [share(rows, trainer.accelerator) for rows in steps(trainer, task)]
                if (key := (name, task.name, greedy)) not in self.kept:
                    self.kept[key] = [evaluator.sample(trainer, rows, column, greedily=greedy) for rows in shares]
                for rows, local, completions in zip(steps(trainer, task), shares, self.kept[key], strict=True):
                    rewards[task.domain] += evaluator.scores(trainer, local, completions)[: len(rows)]
            results[how] = {domain: mean_reward(values) for domain, values in rewards.items() if values}
        return results


STUDENT = "student"

TOP = 16
"""Entries of which the mass is compared."""


def overlap(trainer: KLTrainer, rows: list[Json], completions: list[list[int]]) -> Tensor:
    """(3, B) of all processes' completions, summed over tokens: masses of likeliest entries, and tokens.

    First the student's mass on the teacher's likeliest entries, then the teacher's mass on the student's.
    """
    batch = batch_of(trainer, rows, completions)
    student, _ = trainer.scorer.top_k(trainer.model, batch, TOP, "teacher")
    _, teacher = trainer.scorer.top_k(trainer.model, batch, TOP, "student")
    mask = batch["completion_mask"]
    assert student.entries_logp is not None  # it was asked for
    masses = [(x.exp().sum(-1) * mask).sum(-1) for x in (student.entries_logp, teacher.logp)]
    local = torch.stack([*masses, mask.sum(-1).to(masses[0].dtype)], 1)
    return gather_rows(trainer.accelerator, {"masses": local})[0]["masses"].T


def _kl(report: Report) -> Json:
    """The exact KL if it was computed, else k3."""
    kind = next(kind for kind in ("exact", "k3") if f"kl/reverse/{kind}/per_token" in report.estimates)
    estimates = {unit: report.estimates[f"kl/reverse/{kind}/{unit}"] for unit in ("per_token", "per_sequence")}
    return {unit: {"estimator": kind, **_mean(estimate)} for unit, estimate in estimates.items()}


def _mean(estimate: Estimate, name: str = "mean") -> Json:
    errors = {"standard_error": float(estimate.standard_error), "interval": list(estimate.interval())}
    return {name: float(estimate.mean), **errors}


def steps(trainer: KLTrainer, task: EvaluationSet) -> list[list[Json]]:
    """The rows of a set, as many at a time as all processes evaluate at once."""
    size = trainer.args.per_device_train_batch_size * trainer.accelerator.num_processes
    return [task.rows[start : start + size] for start in range(0, len(task.rows), size)]


def share(rows: list[Json], accelerator: Accelerator) -> list[Json]:
    """This process' part, padded to equal size, so that the first `len(rows)` gathered results are those of `rows`."""
    size = math.ceil(len(rows) / accelerator.num_processes)
    local = rows[accelerator.process_index * size : (accelerator.process_index + 1) * size]
    return local + [rows[0]] * (size - len(local))


def batch_of(trainer: KLTrainer, rows: list[Json], completions: list[list[int]]) -> Json:
    """Prompts and completions as the trainer's batches have them."""
    batch = padded(trainer, tokenize_prompts(trainer, [row["prompt"] for row in rows]), completions)
    trainer.scorer.add_teachers(batch, rows)
    return batch


def rollout(trainer: KLTrainer, local_rows: list[Json], completions: list[list[int]], rows: int) -> Rollout:
    """The completions of all processes, with log-probs of the model and of its reference."""
    batch = batch_of(trainer, local_rows, completions)
    local: Json = {"mask": batch["completion_mask"]}
    if trainer.objective.exact:
        statistics = trainer.scorer.exact(trainer.model, batch)
        local |= {"logp": statistics.logp, "ref_logp": statistics.ref_logp}
        local |= {"token_reverse_kl": statistics.reverse_kl, "token_forward_kl": statistics.forward_kl}
    else:
        local["ref_logp"] = trainer.scorer.reference_log_probs(batch)
        local["logp"] = trainer.scorer.log_probs(trainer.model, batch)
    return Rollout(**{name: x[:rows] for name, x in gather_rows(trainer.accelerator, local)[0].items()})


def mean_reward(values: list[float]) -> Json:
    """Mean reward with its standard error and 95% interval over prompts.

    Rewards of 0 and 1 have Wilson's interval, others that of Student's t, which is nan for one prompt like the error.
    """
    reward = torch.tensor(values, dtype=torch.float64)
    score = {**_mean(ratio_of_means(reward, torch.ones_like(reward)), "reward"), "count": len(values)}
    if set(values) <= {0.0, 1.0}:
        score["interval"] = list(proportion_interval(int(sum(values)), len(values)))
    return score

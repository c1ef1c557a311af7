"""Evaluate a model on held-out prompts: rewards, and the KL to its reference. Training is not affected."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from transformers import GenerationConfig

from ..core.result import Estimate, proportion_interval, ratio_of_means
from ..core.rollout import Rollout
from ..reports import KLSums, Report
from ..support import Json
from ..trl import KLTrainer
from ..trl.compat import Completions, decode, generate, padded, tokenize_prompts
from ..trl.scorer import everywhere
from .data import EvaluationSet, Reward, arguments, values_of
from .libraries import apart_from_rng

SAMPLES = 3
"""Completions of each set that an evaluation keeps: of its first prompts, so that evaluations can be compared."""


def _ignored(count: int) -> None:
    """The progress of an evaluation that nobody watches."""


@dataclass(frozen=True)
class Evaluator:
    """Samples one completion for each held-out prompt, always with the same seed.

    Attributes:
        sets: prompts by task.
        rewards: reward functions; empty for distillation without a verifier.
        weights: one for each reward.
        seed: of the samples.
        greedy: use greedy decoding instead of sampling at the run's temperature.
    """

    sets: list[EvaluationSet]
    rewards: list[Reward]
    weights: list[float]
    seed: int
    greedy: bool = False

    @property
    def count(self) -> int:
        """The number of prompts."""
        return sum(len(task.rows) for task in self.sets)

    def __call__(self, trainer: KLTrainer, advanced: Callable[[int], None] = _ignored) -> Json:
        """Evaluate the trainer's model.

        Args:
            trainer: has the model and its reference.
            advanced: is called after each batch with the number of its prompts, to show progress.

        Returns:
            A dictionary for the history: rewards by set and by domain, the KL to the reference over all prompts, the
            mean length, and some of the completions.
        """
        training = trainer.model.training
        trainer.model.eval()
        try:
            with apart_from_rng(self.seed + trainer.accelerator.process_index), torch.no_grad():
                return self._evaluate(trainer, advanced)
        finally:
            trainer.model.train(training)

    def _evaluate(self, trainer: KLTrainer, advanced: Callable[[int], None]) -> Json:
        sums, scores, sets, samples = KLSums(), {"in": [], "out": []}, {}, []
        for task in self.sets:
            rewards, texts = self._scores(trainer, task, sums, advanced)
            samples += _samples(task, texts, rewards)
            if rewards:
                scores[task.domain] += rewards
                sets[task.name] = {"domain": task.domain, **_mean(rewards)}
        report = sums.report()
        domains = {name: _mean(values) for name, values in scores.items() if values}
        kl = None if self.greedy else _kl(report)  # greedy completions are not samples of π, so they give no estimate
        length = float(report.scalars["length/mean"])
        return {"sets": sets, "domains": domains, "kl": kl, "length": length, "samples": samples}

    def _scores(
        self, trainer: KLTrainer, task: EvaluationSet, sums: KLSums, advanced: Callable[[int], None]
    ) -> tuple[list[float], list[str]]:
        """Rewards and first completions of one set, batch by batch; every process evaluates its share of each batch.

        The completions are those of this process: in the main process, of the first prompts.
        """
        accelerator, rewards, texts = trainer.accelerator, [], []
        step = trainer.args.per_device_train_batch_size * accelerator.num_processes
        for start in range(0, len(task.rows), step):
            rows = task.rows[start : start + step]
            local = _share(rows, accelerator)
            prompts, completions = self._sample(trainer, local)
            if start == 0:
                texts = decode(trainer, completions[:SAMPLES])
            if self.rewards:
                values = torch.tensor(self._rewards(trainer, local, completions), device=accelerator.device)
                rewards += accelerator.gather(values)[: len(rows)].tolist()
            sums.add(_rollout(trainer, prompts, completions, len(rows)))
            advanced(len(rows))
        return rewards, texts

    def _sample(self, trainer: KLTrainer, rows: list[Json]) -> tuple[list[list[int]], list[list[int]]]:
        """Generate as the trainer does, with or without vLLM."""
        prompts = tokenize_prompts(trainer, [row["prompt"] for row in rows])
        before = getattr(trainer, "generation_config", None)
        if self.greedy and before is not None:
            trainer.generation_config = _greedy(before)
        try:
            completions = generate(trainer, prompts)
        finally:
            if before is not None:
                trainer.generation_config = before
        return prompts, completions

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


def _samples(task: EvaluationSet, texts: list[str], rewards: list[float]) -> list[Json]:
    """The first completions of a set, with their prompts and rewards; the reward is None without reward functions."""
    samples = zip(task.rows, texts, [*rewards, *[None] * len(texts)], strict=False)
    return [{"set": task.name, "prompt": row["prompt"], "completion": t, "reward": r} for row, t, r in samples]


def _kl(report: Report) -> Json:
    """The exact KL if it was computed, else k3."""
    kind = next(kind for kind in ("exact", "k3") if f"kl/reverse/{kind}/per_token" in report.estimates)
    estimates = {unit: report.estimates[f"kl/reverse/{kind}/{unit}"] for unit in ("per_token", "per_sequence")}
    return {unit: {"estimator": kind, "mean": float(e.mean), **_errors(e)} for unit, e in estimates.items()}


def _errors(estimate: Estimate) -> Json:
    """Standard error and 95% interval."""
    return {"standard_error": float(estimate.standard_error), "interval": list(estimate.interval())}


def _share(rows: list[Json], accelerator: Accelerator) -> list[Json]:
    """This process' part, padded to equal size, so that the first `len(rows)` gathered results are those of `rows`."""
    size = math.ceil(len(rows) / accelerator.num_processes)
    local = rows[accelerator.process_index * size : (accelerator.process_index + 1) * size]
    return local + [rows[0]] * (size - len(local))


def _rollout(trainer: KLTrainer, prompts: list[list[int]], completions: list[list[int]], rows: int) -> Rollout:
    """The completions of all processes, with log-probs of the model and of its reference."""
    batch = padded(trainer, prompts, completions)
    local: Json = {"mask": batch["completion_mask"]}
    if trainer.objective.exact:
        seen = trainer.scorer.exact(trainer.model, Completions.of(batch))
        local |= {"logp": seen.logp, "ref_logp": seen.ref_logp, "token_reverse_kl": seen.reverse_kl}
    else:
        with trainer.scorer.reference() as ref:
            local |= {"ref_logp": trainer.scorer.log_probs(ref, batch)}
        local |= {"logp": trainer.scorer.log_probs(trainer.model, batch)}
    return Rollout(**{name: x[:rows] for name, x in everywhere(trainer.accelerator, local)[0].items()})


def _greedy(config: GenerationConfig) -> GenerationConfig:
    greedy = copy.deepcopy(config)
    greedy.do_sample = False
    greedy.temperature = greedy.top_p = greedy.top_k = greedy.min_p = None
    return greedy


def _mean(values: list[float]) -> Json:
    """Mean reward with its standard error and 95% interval over prompts.

    Rewards of 0 and 1 have Wilson's interval, others that of Student's t, which is nan for one prompt like the error.
    """
    reward = torch.tensor(values, dtype=torch.float64)
    mean = ratio_of_means(reward, torch.ones_like(reward))
    score = {"reward": float(mean.mean), **_errors(mean), "count": len(values)}
    if set(values) <= {0.0, 1.0}:
        score["interval"] = list(proportion_interval(int(sum(values)), len(values)))
    return score

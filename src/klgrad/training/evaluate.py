"""Evaluate a model on held-out prompts: rewards, and the KL to its reference. Training is not affected."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.rollout import Rollout
from ..core.statistics import Estimate, proportion_interval, ratio_of_means
from ..reports import KLSums, Report
from ..trl import KLTrainer
from ..trl.compat import Completions, decode, generate, padded, tokenize_prompts
from ..trl.scorer import everywhere
from .data import EvaluationSet, arguments, values_of
from .libraries import apart_from_rng as apart

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
    rewards: list[Callable[..., Any]]
    weights: list[float]
    seed: int
    greedy: bool = False

    @property
    def count(self) -> int:
        """The number of prompts."""
        return sum(len(each.rows) for each in self.sets)

    def __call__(self, trainer: KLTrainer, advanced: Callable[[int], None] = _ignored) -> dict[str, Any]:
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
            with apart(self.seed + trainer.accelerator.process_index), torch.no_grad():
                return self._evaluate(trainer, advanced)
        finally:
            trainer.model.train(training)

    def _evaluate(self, trainer: KLTrainer, advanced: Callable[[int], None]) -> dict[str, Any]:
        sums, scores, found, samples = KLSums(), {"in": [], "out": []}, {}, []
        for each in self.sets:
            rewards, texts = self._scores(trainer, each, sums, advanced)
            samples += _samples(each, texts, rewards)
            if rewards:
                scores[each.domain] += rewards
                found[each.name] = {"domain": each.domain, **_mean(rewards)}
        report = sums.report()
        domains = {name: _mean(values) for name, values in scores.items() if values}
        kl = None if self.greedy else _kl(report)  # greedy completions are not samples of π, so they give no estimate
        length = float(report.scalars["length/mean"])
        return {"sets": found, "domains": domains, "kl": kl, "length": length, "samples": samples}

    def _scores(
        self, trainer: KLTrainer, each: EvaluationSet, sums: KLSums, advanced: Callable[[int], None]
    ) -> tuple[list[float], list[str]]:
        """Rewards and first completions of one set, batch by batch; every process evaluates its share of each batch.

        The completions are those of this process: in the main process, of the first prompts.
        """
        accelerator, found, texts = trainer.accelerator, [], []
        step = trainer.args.per_device_train_batch_size * accelerator.num_processes
        for start in range(0, len(each.rows), step):
            rows = each.rows[start : start + step]
            own = _share(rows, accelerator)
            prompts, completions = self._sample(trainer, own)
            if start == 0:
                texts = decode(trainer, completions[:SAMPLES])
            if self.rewards:
                values = torch.tensor(self._rewards(trainer, own, completions), device=accelerator.device)
                found += accelerator.gather(values)[: len(rows)].tolist()
            sums.add(_rollout(trainer, prompts, completions, len(rows)))
            advanced(len(rows))
        return found, texts

    def _sample(self, trainer: KLTrainer, rows: list[dict[str, Any]]) -> tuple[list[list[int]], list[list[int]]]:
        """Generate as the trainer does, with or without vLLM."""
        prompts = tokenize_prompts(trainer, [row["prompt"] for row in rows])
        before = getattr(trainer, "generation_config", None)
        if self.greedy and before is not None:
            trainer.generation_config = _greedy(before)
        try:
            made = generate(trainer, prompts)
        finally:
            if before is not None:
                trainer.generation_config = before
        return prompts, made

    def _rewards(self, trainer: KLTrainer, rows: list[dict[str, Any]], completions: list[list[int]]) -> list[float]:
        texts = decode(trainer, completions)
        chats = [
            t if isinstance(row["prompt"], str) else [{"role": "assistant", "content": t}]
            for t, row in zip(texts, rows, strict=True)
        ]
        given = arguments(rows, chats, completions, trainer.state)
        total = [0.0] * len(rows)
        for reward, weight in zip(self.rewards, self.weights, strict=True):
            values = values_of(reward, given)
            total = [a + weight * (0.0 if b is None else b) for a, b in zip(total, values, strict=True)]
        return total


def _samples(each: EvaluationSet, texts: list[str], rewards: list[float]) -> list[dict[str, Any]]:
    """The first completions of a set, with their prompts and rewards; the reward is None without reward functions."""
    found = zip(each.rows, texts, [*rewards, *[None] * len(texts)], strict=False)
    return [{"set": each.name, "prompt": row["prompt"], "completion": t, "reward": r} for row, t, r in found]


def _kl(report: Report) -> dict[str, Any]:
    """The exact KL if it was computed, else k3."""
    kind = next(kind for kind in ("exact", "k3") if f"kl/reverse/{kind}/per_token" in report.estimates)
    found = {unit: report.estimates[f"kl/reverse/{kind}/{unit}"] for unit in ("per_token", "per_sequence")}
    return {unit: {"estimator": kind, "mean": float(e.mean), **_errors(e)} for unit, e in found.items()}


def _errors(estimate: Estimate) -> dict[str, Any]:
    """Standard error and 95% interval."""
    return {"standard_error": float(estimate.standard_error), "interval": list(estimate.interval())}


def _share(rows: list[dict[str, Any]], accelerator: Any) -> list[dict[str, Any]]:
    """This process' part, padded to equal size, so that the first `len(rows)` gathered results are those of `rows`."""
    size = math.ceil(len(rows) / accelerator.num_processes)
    own = rows[accelerator.process_index * size : (accelerator.process_index + 1) * size]
    return own + [rows[0]] * (size - len(own))


def _rollout(trainer: KLTrainer, prompts: list[list[int]], completions: list[list[int]], rows: int) -> Rollout:
    """The completions of all processes, with log-probs of the model and of its reference."""
    batch = padded(trainer, prompts, completions)
    local: dict[str, Any] = {"mask": batch["completion_mask"]}
    if trainer.objective.exact:
        seen = trainer.scorer.exact(trainer.model, Completions.of(batch))
        local |= {"logp": seen.logp, "ref_logp": seen.ref_logp, "token_reverse_kl": seen.reverse_kl}
    else:
        with trainer.scorer.reference() as ref:
            local |= {"ref_logp": trainer.scorer.log_probs(ref, batch)}
        local |= {"logp": trainer.scorer.log_probs(trainer.model, batch)}
    return Rollout(**{name: x[:rows] for name, x in everywhere(trainer.accelerator, local)[0].items()})


def _greedy(config: Any) -> Any:
    found = copy.deepcopy(config)
    found.do_sample = False
    found.temperature = found.top_p = found.top_k = found.min_p = None
    return found


def _mean(values: list[float]) -> dict[str, Any]:
    """Mean reward with its standard error and 95% interval over prompts.

    Rewards of 0 and 1 have Wilson's interval, others that of Student's t, which is nan for one prompt like the error.
    """
    reward = torch.tensor(values, dtype=torch.float64)
    found = {**_errors(mean := ratio_of_means(reward, torch.ones_like(reward))), "count": len(values)}
    if set(values) <= {0.0, 1.0}:
        found["interval"] = list(proportion_interval(int(sum(values)), len(values)))
    return {"reward": float(mean.mean), **found}

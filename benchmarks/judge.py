"""One evaluator for every arm of an experiment: exact divergences and correct answers on held-out prompts."""

import math
from typing import Any

import torch

from klgrad.core.rollout import Rollout
from klgrad.reports import KLSums
from klgrad.training.evaluate import apart_from_rng as apart
from klgrad.trl.compat import generate, padded, tokenize_prompts


class Judge:
    """Samples one completion for each held-out prompt and reports numbers over the whole vocabulary.

    A policy can be near its reference on its own completions because it writes only the few that the reference finds
    likely. So in addition to KL(policy‖reference) on the policy's completions it reports the policy's entropy, the
    share of tokens that repeat the token before, the share of right answers, and with `on_reference`
    KL(reference‖policy) on completions of the reference.
    """

    def __init__(self, trainer: Any, evaluator: Any, *, on_reference: bool) -> None:
        self.trainer, self.evaluator = trainer, evaluator
        if not trainer.objective.exact:
            trainer.scorer.enable_exact()
        self.rows = [row for each in evaluator.sets for row in each.rows]
        self.domains = [each.domain for each in evaluator.sets for _ in each.rows]
        self.ids = tokenize_prompts(trainer, [row["prompt"] for row in self.rows])
        self.of_reference = self._of_reference() if on_reference else []

    def __call__(self, seed: int) -> dict[str, Any]:
        """Numbers by name, standard errors (`_se`) over prompts, and the first completion as text."""
        trainer, sums, completions = self.trainer, KLSums(), []
        entropy = repeated = tokens = 0.0
        training = trainer.model.training
        trainer.model.eval()
        with torch.no_grad():
            for batch, made in self._sample(seed):
                found, mask, ids = self._exact(batch), batch["completion_mask"].bool(), batch["completion_ids"]
                sums.add(Rollout(found.logp, found.ref_logp, mask, token_reverse_kl=found.reverse_kl))
                entropy += float((found.entropy * mask).sum())
                repeated += float(((ids[:, 1:] == ids[:, :-1]) & mask[:, 1:]).sum())
                tokens += float(mask.sum())
                completions += made
            covered = self._forward_kl()
        trainer.model.train(training)
        report = sums.report().metrics()
        numbers = {"length": report["length/mean"]}
        for unit in ("per_token", "per_sequence"):
            numbers[f"kl_{unit}"] = report[f"kl/reverse/exact/{unit}"]
            numbers[f"kl_{unit}_se"] = report[f"kl/reverse/exact/{unit}/standard_error"]
        numbers |= covered
        numbers["entropy_per_token"], numbers["share_repeated"] = entropy / tokens, repeated / tokens
        numbers |= self._correct(completions) | {"distinct": len(set(map(tuple, completions)))}
        text = trainer._tokenizer.decode(completions[0])
        return {name: float(f"{value:.5g}") for name, value in numbers.items()} | {"sample": text}

    def _correct(self, completions: list[list[int]]) -> dict[str, float]:
        """The share of right answers: of all, and if there are several domains, of each with its standard error."""
        right = self.evaluator._rewards(self.trainer, self.rows, completions)
        found = {"correct": sum(right) / len(right)}
        for domain in sorted(set(self.domains)) if len(set(self.domains)) > 1 else []:
            own = [x for x, d in zip(right, self.domains, strict=True) if d == domain]
            mean = sum(own) / len(own)
            spread = sum((x - mean) ** 2 for x in own) / (len(own) - 1)
            found |= {f"correct_{domain}": mean, f"correct_{domain}_se": math.sqrt(spread / len(own))}
        return found

    def _forward_kl(self) -> dict[str, float]:
        """KL(reference‖policy) per token of the reference's completions."""
        if not self.of_reference:
            return {}
        total = tokens = 0.0
        for batch in self.of_reference:
            mask = batch["completion_mask"].bool()
            total += float((self._exact(batch).forward_kl * mask).sum())
            tokens += float(mask.sum())
        return {"forward_kl_per_token": total / tokens}

    def _of_reference(self) -> list[Any]:
        trainer = self.trainer
        policy, trainer.model_wrapped = trainer.model_wrapped, trainer.ref_model
        try:
            return [batch for batch, _ in self._sample(seed=999)]
        finally:
            trainer.model_wrapped = policy

    def _exact(self, batch: Any) -> Any:
        return self.trainer.scorer.exact(self.trainer.model, batch)

    def _sample(self, seed: int) -> list[tuple[Any, list[list[int]]]]:
        """Batches, padded as in TRL, and the completions of each."""
        size, found = self.trainer.args.generation_batch_size, []
        with apart(seed), torch.no_grad():
            for start in range(0, len(self.ids), size):
                ids = self.ids[start : start + size]
                made = generate(self.trainer, ids)
                found.append((padded(self.trainer, ids, made), made))
        return found

"""Forward passes of the policy and of its reference over completions."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from ..core.rollout import Rollout
from ..errors import MeaningError
from ..kernels import TokenStatistics, TopEntries
from .config import KLConfig
from .gather import everywhere
from .groups import with_peers
from .head_check import HeadCheck
from .model_forward import Answer, Question, add_statistics_forward, head_of, shared_vocabulary
from .objective import Objective
from .seam import batch as scored
from .seam.batch import Batch, Completions
from .seam.forward import ForwardPass, completion_log_probs
from .seam.generation import Sampled, padded, padded_mask
from .seam.models import base_of, reference_model
from .top_k import with_top_k_kl


class Scorer:
    """Log-probs and exact KLs of completions, as the objective needs them.

    Args:
        trainer: whose models, temperature and accelerator are used.
        args: its configuration.
        objective: what is trained; an exact one prepares both models to return statistics.
    """

    def __init__(self, trainer: GRPOTrainer, args: KLConfig, objective: Objective) -> None:
        self._trainer, self._args, self._objective = trainer, args, objective
        self.vocabulary = shared_vocabulary(self._bases())
        self._check_head = HeadCheck()
        if objective.exact:
            self.enable_exact()

    def enable_exact(self) -> None:
        """Prepare both models for `exact` and `top_k`; done already for an exact objective."""
        for model in self._bases():
            add_statistics_forward(model)

    def _bases(self) -> list[Any]:
        trainer = self._trainer
        models = [each for each in (trainer.model, trainer.ref_model) if each is not None]
        return [base_of(trainer.accelerator.unwrap_model(each)) for each in models]

    # One model

    def reference(self) -> AbstractContextManager[Any]:
        """The reference model, while the context lasts."""
        return reference_model(self._trainer)

    def log_probs(self, model: Any, batch: Batch) -> Tensor:
        """(B, T) log-probs by one of the models, without gradient, in batches that fit into memory."""
        with torch.no_grad():
            size = self._args.per_device_train_batch_size
            return completion_log_probs(self._trainer, model, batch, batch_size=size)[0]

    def ask(self, model: Any, batch: Completions, question: Question) -> Answer:
        """Call a model as training calls it."""
        with self._trainer.accelerator.autocast():
            return model(input_ids=batch.ids, attention_mask=batch.attention, question=question)

    def question(self, batch: Completions) -> Question:
        """A question about the statistics of completions."""
        return Question(
            batch.keep,
            self._trainer.temperature,
            batch.targets,
            batch.mask,
            vocabulary=self.vocabulary,
            budget=self._args.kl_memory << 20,
            float32=self._args.cast_lm_head_to_fp32,
        )

    # Policy and reference

    def exact(self, model: Any, batch: Completions) -> TokenStatistics:
        """Log-probs, both exact KLs to the reference, and the entropy of completions; no logits are stored."""
        temperature = self._trainer.temperature
        with torch.no_grad(), self.reference() as ref:
            hidden = self.ask(ref, batch, Question(batch.keep, temperature)).hidden
            head = head_of(self._trainer.accelerator.unwrap_model(ref), temperature, self.vocabulary)
        return _statistics(self.ask(model, batch, replace(self.question(batch), ref_hidden=hidden, ref_head=head)))

    def top_k(self, model: Any, batch: Completions, k: int) -> tuple[TokenStatistics, TopEntries]:
        """Log-probs and entropy of the policy, also at the reference's k likeliest entries, and these entries."""
        plain = self.question(batch)
        with torch.no_grad(), self.reference() as ref:
            best = self.ask(ref, batch, replace(plain, top_k=k))
        found = TopEntries(*(best[name] for name in ("ids", "logp", "token_logp", "has_token")))
        return _statistics(self.ask(model, batch, replace(plain, entries=found.ids))), found

    def forward(self, model: Any, batch: Batch) -> ForwardPass:
        """The policy's pass over a batch, with its gradient, and the exact KLs where the objective needs them."""
        if not self._objective.exact:
            how = {"compute_entropy": True, "compute_aux_loss": self._trainer.aux_loss_enabled}
            return ForwardPass(*completion_log_probs(self._trainer, model, batch, **how))
        refuse_images(scored.has_images(batch), "kl_estimator='exact'")
        given = Completions.of(batch)
        self._check_head(self, self._trainer, model, given)
        if self._objective.top_k is None:
            found = self.exact(model, given)
        else:
            found, best = self.top_k(model, given, self._objective.top_k)
            behavior = self._behavior(found.logp.detach(), batch)
            found = with_top_k_kl(found, best, self._objective, given.mask, behavior)
        return ForwardPass(found.logp, found.entropy, None, found)

    def rollout(self, passed: ForwardPass, batch: Batch, group: Tensor) -> tuple[Rollout, slice]:
        """All processes' completions of a step, and which of the rows carry a gradient in this process."""
        exact = passed.exact
        local = {
            "logp": passed.logp,
            "ref_logp": scored.reference_log_probs(batch) if exact is None else exact.ref_logp,
            "mask": scored.sampled_tokens(batch),
            "behavior_logp": self._behavior(passed.logp.detach(), batch),
            "token_reverse_kl": None if exact is None else exact.reverse_kl,
            "token_forward_kl": None if exact is None else exact.forward_kl,
        }
        tensors, own = everywhere(self._trainer.accelerator, local)
        tensors["mask"] = tensors["mask"].bool()
        return Rollout(**tensors, group=with_peers(group) if self._objective.needs_groups else None), own

    def sampled_rollout(self, sampled: Sampled) -> Rollout:
        """All processes' completions that were just sampled."""
        refuse_images(sampled.images is not None, "kl_placement='reward'")
        batch = padded(self._trainer, sampled.prompt_ids, sampled.completion_ids)
        mask = batch["completion_mask"]
        if sampled.tool_mask is not None:  # the policy did not sample what a tool returned
            mask = mask * padded_mask(self._trainer, sampled.tool_mask)
        own = self.log_probs(self._trainer.model, batch)
        with self.reference() as ref:
            other = self.log_probs(ref, batch)
        tensors, _ = everywhere(self._trainer.accelerator, {"logp": own, "ref_logp": other, "mask": mask})
        return Rollout(**tensors)

    def _behavior(self, logp: Tensor, batch: Batch) -> Tensor | None:
        """(B, T) log-probs of the sampler; `logp`, the policy's own, if it sampled and the term has weights."""
        found = scored.sampler_log_probs(batch, logp)
        return logp if found is None and self._objective.is_weighted else found


def refuse_images(found: bool, where: str) -> None:
    """Raise `MeaningError` for images: without its image, a completion would get other log-probs."""
    if found:
        raise MeaningError(
            "prompts of text", f"images, with {where}", "use a sampled estimator with kl_placement='loss'"
        )


def _statistics(answer: Answer) -> TokenStatistics:
    return TokenStatistics(*(getattr(answer, name) for name in TokenStatistics._fields))

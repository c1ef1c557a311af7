"""The KLs over the vocabulary that `KLTrainer` gets for an audit of `kl_estimator="exact"`.

The models of an audit have the given log-probs of the sampled tokens, and one other token with the rest of the
probability. The KL over that vocabulary is not the KL of the audited problem. So the KLs of each token are given, as
the log-probs are: those of the batch, or for `kl_top_k` those that the trainer's own code computes from the logits of
the batch. Placement, baseline, ratios, reduction and accumulation are the trainer's and TRL's.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..audit.batch import Batch
from ..kernels import TokenStatistics, TopEntries

ENTRIES = 1
"""Likeliest entries of the reference that are summed over in the audit of `kl_top_k`, whatever its value: the
vocabularies of the problems have 2 to 4 entries, and the rest must not be empty."""


def give_exact_kl(trainer: Any, batch: Batch) -> None:
    """Make the next loss of a `KLTrainer` with an exact term use the KLs of a batch.

    Args:
        trainer: a `KLTrainer` whose policy returns the given log-probs.
        batch: the audited batch; its rows are the completions of the next loss, in order.
    """
    trainer.scorer.forward = partial(_forward, trainer, batch)


def _forward(trainer: Any, batch: Batch, model: Any, scored: dict[str, Any]) -> Any:
    """In the place of `Scorer.forward`."""
    from ..trl.seam.forward import ForwardPass, completion_log_probs

    logp, entropy, _ = completion_log_probs(trainer, model, scored, compute_entropy=True)
    assert entropy is not None  # it was asked for
    width = logp.shape[1]  # TRL cuts the columns in which no completion has a token
    ref_logp, reverse, forward = (
        x[:, :width] for x in (batch.ref_logp, batch.token_reverse_kl, batch.token_forward_kl)
    )
    found = TokenStatistics(logp, entropy, ref_logp, reverse, forward, entries_logp=None)
    if trainer.objective.top_k is not None:
        found = _over_top_entries(trainer, batch, found, scored)
    return ForwardPass(logp, entropy, None, found)


def _over_top_entries(trainer: Any, batch: Batch, found: TokenStatistics, scored: dict[str, Any]) -> TokenStatistics:
    from ..trl.seam.batch import sampled_tokens
    from ..trl.top_k import with_top_k_kl

    width = found.logp.shape[1]
    logits, ref_logits, tokens = (x[:, :width] for x in (batch.logits, batch.ref_logits, batch.tokens))
    best = _top_entries(ref_logits, tokens)
    entries = torch.log_softmax(logits, -1).gather(-1, best.ids)
    behavior = trainer.scorer._behavior(found.logp.detach(), scored)
    found = found._replace(reverse_kl=None, forward_kl=None, entries_logp=entries)
    return with_top_k_kl(found, best, trainer.objective, sampled_tokens(scored), behavior)


def _top_entries(ref_logits: Tensor, tokens: Tensor) -> TopEntries:
    every = torch.log_softmax(ref_logits, -1)
    logp, ids = every.topk(ENTRIES, -1)
    token_logp = every.gather(-1, tokens[..., None]).squeeze(-1)
    return TopEntries(ids, logp, token_logp, (ids == tokens[..., None]).any(-1))

"""LLaMA-Factory: the KL of its ASFT loss (`use_asft_loss`), by its own `_kl_divergence`.

The function receives the logits of the policy and of the reference, and the tokens as labels; `asft_loss_func` adds
`asft_alpha` times it to a loss of fine-tuning. Its prefixes are then those of a data set, where the audit's are those
of π or of another sampler. Only this file of the package is loaded.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from .framework import Default, Framework
from .harness import load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

DEFAULT = "llamafactory use_asft_loss asft_alpha"
IGNORED = -100
"""The label of tokens that have no loss."""


def subjects() -> list[Subject]:
    """The KL of ASFT, a mean over the tokens of the batch."""
    return [subject("llamafactory", DEFAULT, _loss)]


def _loss(batch: Batch) -> Tensor:
    flat = lambda logits: logits.flatten(0, 1)
    labels = batch.tokens.where(batch.mask, IGNORED).flatten()
    return functions()._kl_divergence(flat(batch.logits), flat(batch.ref_logits), labels)


@cache
def functions() -> ModuleType:
    """The file with the losses."""
    path = "llamafactory/train/trainer_utils.py"
    replaced = ("llamafactory", "transformers", "ray")
    return load("llamafactory", path, replaced=replaced, package="llamafactory.train")


FRAMEWORK = Framework(
    "llamafactory",
    "llamafactory",
    "0.9.5",
    subjects,
    Default("no KL; with use_asft_loss, asft_alpha=0.1", DEFAULT),
)

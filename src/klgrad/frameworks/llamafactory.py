"""LLaMA-Factory: the KL of its ASFT loss (`use_asft_loss`), by its own `asft_loss_func`.

The function receives the logits of the policy and of the reference, with one prompt token; its loss with
`asft_alpha=0`, which has no KL, is subtracted, so that the KL alone is audited. ASFT is a fine-tuning on a data set: its
prefixes are those of the data, where the audit's are those of π or of another sampler. The package is not imported,
only this file is loaded.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

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
    from torch.nn.functional import pad

    asft = _asft()
    labels = pad(batch.tokens.where(batch.mask, IGNORED), (1, 0), value=IGNORED)
    # Logits at a position are for the token after it.
    logits, ref_logits = (pad(x, (0, 0, 0, 1)) for x in (batch.logits, batch.ref_logits))
    return asft({"logits": logits}, labels, ref_logits, 1.0) - asft({"logits": logits}, labels, ref_logits, 0.0)


@cache
def _asft() -> Any:
    path = "llamafactory/train/trainer_utils.py"
    replaced = ("llamafactory", "transformers", "ray")
    return load("llamafactory", path, replaced=replaced, package="llamafactory.train").asft_loss_func


FRAMEWORK = Framework(
    "llamafactory",
    "llamafactory",
    "0.9.5",
    subjects,
    Default("no KL; with use_asft_loss, asft_alpha=0.1", DEFAULT),
)

"""twinkle-kit: the KL of its `GRPOLoss` and `PPOLoss` (`beta`), that of its `GAEAdvantage`, and its `GKDLoss`.

The losses receive logp, `old_logps` = old_logp, `ref_logps` = ref_logp and the advantages of the audit, zero by
default; beta = 1. In the reward (`kl_coef`), `build_token_rewards` takes the log-probs at sampling and those of the
reference, `GAEAdvantage` turns them into advantages without a critic, and `PPOLoss` applies them to logp. Distillation
takes the logits of the policy and, as those of the teacher, of the reference. Only the files of the losses and of the
advantages are loaded.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

from .framework import Default, Framework
from .harness import instead, load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

IGNORED = -100
"""The label of tokens that have no loss."""


def subjects() -> list[Subject]:
    """In the loss: both reductions. In the reward: whitened, as by default, and not. Then distillation."""
    return [
        _in_loss("GRPOLoss"),
        _in_loss("PPOLoss"),
        *(_in_reward(normalize, gae_lambda) for normalize, gae_lambda in ((True, 0.95), (False, 1.0))),
        *(_distilled(beta) for beta in (0.5, 0.0, 1.0)),
    ]


def _in_loss(kind: str) -> Subject:
    policy_loss = getattr(_modules()["loss.grpo"], kind)(beta=1.0)

    def loss(batch: Batch) -> Tensor:
        return policy_loss(
            {"labels": _labels(batch)},
            {"logps": batch.logp},
            old_logps=batch.old_logp,
            ref_logps=batch.ref_logp,
            advantages=batch.advantages,
        ).loss

    return subject("twinkle", f"twinkle {kind} beta", loss, stacks=kind == "GRPOLoss")


def _in_reward(normalize: bool, gae_lambda: float) -> Subject:
    modules = _modules()
    estimate = modules["advantage.gae"].GAEAdvantage(normalize=normalize, gae_lambda=gae_lambda)
    policy_loss = modules["loss.grpo"].PPOLoss()

    def loss(batch: Batch) -> Tensor:
        import torch

        lists = lambda x: [row[live].tolist() for row, live in zip(x, batch.mask, strict=True)]
        lengths = batch.mask.sum(-1).tolist()
        rewards = estimate.build_token_rewards(
            batch.rewards, lengths, old_logps=lists(batch.old_logp), ref_logps=lists(batch.ref_logp), kl_coef=1.0
        )
        table = torch.zeros_like(batch.ref_logp)
        table[batch.mask] = table.new_tensor([x for row in rewards for x in row])
        advantages, _ = estimate(table, torch.zeros_like(table), masks=batch.mask)
        outputs, labels = {"logps": batch.logp}, {"labels": _labels(batch)}
        return policy_loss(labels, outputs, old_logps=batch.old_logp, advantages=advantages).loss

    name = f"twinkle kl_coef normalize_advantages={normalize} gae_lambda={gae_lambda:g}"
    better = instead(unwhitened="normalize_advantages=False" if normalize else "")
    return subject("twinkle", name, loss, instead=better)


def _distilled(beta: float) -> Subject:
    gkd = _modules()["loss.gkd"].GKDLoss(beta=beta)

    def loss(batch: Batch) -> Tensor:
        return gkd({"labels": _labels(batch)}, {"logits": batch.logits}, teacher_logits=batch.ref_logits).loss

    return subject("twinkle", f"twinkle GKDLoss beta={beta:g}", loss)


def _labels(batch: Batch) -> Tensor:
    return batch.tokens.where(batch.mask, IGNORED)


@cache
def _modules() -> dict[str, ModuleType]:
    found, data_format = {}, ModuleType("twinkle.data_format")
    vars(data_format).update(LossOutput=SimpleNamespace)  # a TypedDict, whose items the trainer reads
    for name in ("loss.grpo", "loss.gkd", "advantage.gae"):
        path, package = f"twinkle/{name.replace('.', '/')}.py", f"twinkle.{name.partition('.')[0]}"
        loaded = {"twinkle.data_format": data_format}
        found[name] = load("twinkle-kit", path, replaced=("twinkle",), package=package, loaded=loaded)
    return found


FRAMEWORK = Framework(
    "twinkle",
    "twinkle-kit",
    "0.5.1",
    subjects,
    Default("no KL; with beta alone raised", "twinkle GRPOLoss beta"),
    caveats=(
        "The docstring of `GKDLoss` writes β=0 as KL(S‖T) and β=1 as KL(T‖S); its code has KL(T‖S), the forward KL, at "
        "0 and KL(S‖T), the reverse KL, at 1.",
    ),
)

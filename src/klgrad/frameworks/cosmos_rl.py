"""cosmos-rl: `compute_loss` of its GRPO trainer, with the KL in the loss (`train_policy.kl_beta`).

The function receives the live tokens of all completions in one row: logp, `old` = old_logp, `ref` = ref_logp and the
advantages of the audit, zero by default; beta = 1, and the settings are those of its own `GrpoConfig` otherwise. Only
the files of the configuration and of the trainer are loaded.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

from .framework import Default, Framework
from .harness import load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

TOKEN_MEAN = "token-mean"
TRAINER = "cosmos_rl/policy/trainer/llm_trainer/grpo_trainer.py"


def subjects() -> list[Subject]:
    """The kinds of reduction, without and with the ratio; the default with a KL comes first."""
    kinds = (TOKEN_MEAN, "seq-mean-token-mean", "seq-mean-token-sum")
    return [_subject(kind, unbiased) for kind, unbiased in product(kinds, (False, True))]


def _subject(kind: str, unbiased: bool) -> Subject:
    settings = {"type": "grpo", "loss_type": kind, "unbiased_kl_estimate": unbiased, "kl_beta": 1.0}
    policy = modules()["config"].GrpoConfig(**settings)
    config = SimpleNamespace(train=SimpleNamespace(train_policy=policy))

    def loss(batch: Batch) -> Tensor:
        from torch.nn.functional import pad

        mask = batch.mask
        ends = pad(mask.sum(-1).cumsum(0), (1, 0))
        return modules()["trainer"].compute_loss(
            batch.logp[mask], batch.old_logp[mask], batch.ref_logp[mask], batch.advantages, ends, config, mask
        )[0]

    name = f"cosmos-rl kl_beta loss_type={kind} unbiased_kl_estimate={unbiased}"
    return subject("cosmos-rl", name, loss, stacks=kind != TOKEN_MEAN)


@cache
def modules() -> dict[str, ModuleType]:
    """The files of the configuration and of the trainer."""
    paths = {"config": "cosmos_rl/policy/config/__init__.py", "trainer": TRAINER}
    stand_ins = ("toml", "msgpack")
    return {name: load("cosmos-rl", path, stand_ins=stand_ins, replaced=("cosmos_rl",)) for name, path in paths.items()}


FRAMEWORK = Framework(
    "cosmos-rl",
    "cosmos-rl",
    "0.4.7",
    subjects,
    Default(
        "kl_beta=0, no KL; with kl_beta alone raised",
        "cosmos-rl kl_beta loss_type=token-mean unbiased_kl_estimate=False",
    ),
)

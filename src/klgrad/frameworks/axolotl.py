"""Axolotl: the KL in the loss of its asynchronous GRPO trainer, and its distillation on the teacher's top k tokens.

`AsyncGRPOTrainer._compute_loss` receives a batch with ref_logp, old_logp and the advantages of the audit, zero by
default, and its model returns logp; beta = 1, and the other settings are those of its own `AsyncGRPOConfig`, or TRL's.
Its synchronous trainer is TRL's: see trl. Distillation (`kd_trainer`) is its `distillation_loss_fn` on the logits of
the policy, with all tokens of the reference as the teacher's top k: the audit has 2 or 3. A separate test checks what
it descends with fewer. The package asks for a newer Python, so only these files are loaded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ..errors import RunFileError
from . import trl
from .formulae import OVER_COMPLETIONS, OVER_TOKENS, SUM, AsLoss, part_of
from .framework import Framework
from .harness import bare, load, subject
from .run_settings import EARLIER, Change, Reader, Run, Why, one_of, under

if TYPE_CHECKING:
    from .harness import Batch, Subject, Tensor

REPLACED = ("axolotl", "trl", "transformers", "accelerate", "peft", "liger_kernel")
TOKEN_MEAN = "dapo"
"""A loss type that averages over the tokens of the batch."""


def subjects() -> list[Subject]:
    """Three kinds of reduction, without the bias correction, as by default, and with it; then distillation."""
    kinds = (TOKEN_MEAN, "grpo", "dr_grpo")
    return [*(_in_loss(*x) for x in product(kinds, (False, True))), *(_distilled(beta) for beta in (0.0, 0.5, 1.0))]


def _in_loss(kind: str, corrected: bool) -> Subject:
    module = modules()["async_trainer"]
    args = module.AsyncGRPOConfig()
    args.use_bias_correction_kl = corrected
    vars(args).update(delta=None, importance_sampling_level="token")
    trainer = bare(
        module.AsyncGRPOTrainer,
        args=args,
        beta=1.0,
        loss_type=kind,
        epsilon_low=0.2,
        epsilon_high=0.2,
        top_entropy_quantile=1.0,
        is_fsdp_enabled=False,
        aux_loss_enabled=False,
        use_vllm=True,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x),
        current_gradient_accumulation_steps=1,
    )

    def loss(batch: Batch) -> Tensor:
        mask = batch.mask.to(batch.logp.dtype)
        logs = {"train": defaultdict(list)}
        trainer._metrics, trainer.max_completion_length = logs, mask.shape[1]
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.logp, batch.logp.detach() * 0, None)
        data = {
            "prompt_ids": batch.tokens[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": batch.tokens,
            "completion_mask": mask,
            "advantages": batch.advantages[:, 0],
            "old_per_token_logps": batch.old_logp,
            "ref_per_token_logps": batch.ref_logp,
            "num_items_in_batch": mask.sum(),
        }
        return trainer._compute_loss(None, data)

    return subject(f"axolotl async loss_type={kind} use_bias_correction_kl={corrected}", loss)


def _distilled(beta: float) -> Subject:
    def loss(batch: Batch) -> Tensor:
        return kd_loss(batch.logits[batch.mask], batch.ref_logits[batch.mask], beta) / batch.mask.sum()

    return subject(f"axolotl kd_trainer kd_beta={beta:g}", loss)


def kd_loss(logits: Tensor, teacher_logits: Tensor, beta: float, *, k: int | None = None, **settings: object) -> Tensor:
    """The sum of its distillation losses over rows of logits, with the teacher's k likeliest tokens, scaled up to 1."""
    import torch

    top = torch.log_softmax(teacher_logits, -1).topk(k or logits.shape[-1])
    teacher = torch.log_softmax(top.values, -1)
    function = modules()["liger"].LigerFusedLinearKLTopKLogprobFunction.distillation_loss_fn
    settings = {"normalize_topk": None, **settings}
    # Its cast to float32 takes the logarithm of 0 where a token has a probability below 1e-38, as one of the audit has.
    wide = torch.Tensor.double if logits.dtype == torch.float64 else torch.Tensor.float
    with patch.object(torch.Tensor, "float", wide):
        return function(logits, top.indices, teacher, torch.ones_like(teacher), beta=beta, **settings)


@cache
def modules() -> dict[str, ModuleType]:
    """The asynchronous trainer, and the losses of distillation with the file that they import."""
    names = ("core.trainers.grpo.async_trainer", "integrations.kd.utils", "integrations.kd.kernels.liger")
    return load("axolotl", *(f"axolotl.{name}" for name in names), replaced=REPLACED)


# `rl: grpo` and `trl` of its configurations. The synchronous trainer is TRL's; the asynchronous one has its own loss.

TRL = "trl."
KNOWN: dict[str, object] = {
    "rl": "",
    f"{TRL}beta": None,
    "rl_beta": None,
    **under(TRL, loss_type=None, use_bias_correction_kl=None, importance_sampling_level=None, num_iterations=None),
    **under(TRL, use_vllm=False, use_liger_loss=None, async_prefetch=False, use_data_producer=False),
    **under(TRL, skip_zero_advantage_batches=True, sync_ref_model=False),
    "gradient_accumulation_steps": 1,
}
"""The defaults of `TRLConfig` of Axolotl; None is passed on to TRL as its own default."""

HARMLESS = ("adam_beta1", "adam_beta2", "adam_beta3")
ALGORITHMS = ("grpo", "gdpo")
REDUCTIONS = {
    "grpo": OVER_COMPLETIONS,
    "sapo": OVER_COMPLETIONS,
    "bnpo": OVER_TOKENS,
    "dapo": OVER_TOKENS,
    "cispo": OVER_TOKENS,
    "dr_grpo": SUM,
}
"""Of the asynchronous trainer."""

PASSED = ("loss_type", "importance_sampling_level", "num_iterations", "use_vllm", "use_bias_correction_kl")
SKIPS = (
    "skip_zero_advantage_batches=true, the default: a micro-batch whose advantages are all 0 is skipped, and its KL "
    "with it."
)
MOVES = "sync_ref_model=true: the reference moves, and a KL to it is no distance from the start."
LOSES_RATIO = "its default is false in the asynchronous trainer, where TRL's is true: k3 without it is the forward KL"


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the configuration, with the defaults of Axolotl, and of TRL where Axolotl passes nothing on."""
    run = Run("axolotl", given, KNOWN, TRL)
    if not run["rl"]:
        raise RunFileError("rl: grpo", "a configuration without rl", "give the file of an RL run")
    run.one_of("rl", ALGORITHMS)
    beta = run["rl_beta"] if run["beta"] is None else run["beta"]
    if run["rl_beta"] is not None and run["beta"] is not None:
        run.unread["rl_beta"] = "trl.beta is set, and comes first"
    run.settings[f"{TRL}beta"] = 0.0 if beta is None else float(beta)
    run.notes += [MOVES] * run["sync_ref_model"]
    return _read_async(run) if run["async_prefetch"] or run["use_data_producer"] else _read_sync(run)


def _read_sync(run: Run) -> Run:
    """By the reader of TRL."""
    if run["use_liger_loss"]:
        raise RunFileError("a loss of TRL", "use_liger_loss: true", "its loss is not read here; see klgrad audit liger")
    passed = {name: run[name] for name in (*PASSED, "beta") if run[name] is not None}
    passed |= {x: run[x] for x in ("gradient_accumulation_steps",) if x in run.values}
    of_trl = trl.read_config(passed, "grpo")
    run.settings |= {f"{TRL}{x}": of_trl.settings[x] for x in PASSED}
    run.changes = [replace(change, name=f"{TRL}{change.name}") for change in of_trl.changes]
    run.notes += [*of_trl.notes, OF_TRL]
    run.parts = of_trl.parts
    run.stale = of_trl.stale
    return run.of("TRL's GRPOTrainer", of_trl.target)


OF_TRL = "The loss is TRL's: audited with the TRL that is installed here. Axolotl 0.21 pins TRL 1.14.1."


def _read_async(run: Run) -> Run:
    """Its own loss: k3, times the ratio if `use_bias_correction_kl` is set."""
    kind = one_of(f"{TRL}loss_type", run["loss_type"] or "dapo", tuple(REDUCTIONS))
    level = run["importance_sampling_level"] or "token"
    corrected, beta = bool(run["use_bias_correction_kl"]), run["beta"]
    run.switch_on("beta", 0.04, "at 0 no reference is loaded, and there is no KL")
    if not corrected:
        run.changes.append(Change(f"{TRL}use_bias_correction_kl", True, False, LOSES_RATIO))
    if level != "token":  # None is TRL's default
        why = "a ratio of the completion on the KL of a token belongs to no divergence"
        run.change("importance_sampling_level", "token", why)
    if REDUCTIONS[kind] == OVER_COMPLETIONS:
        run.change("loss_type", "dapo", Why.LENGTH)
    name = f"async loss_type={kind} use_bias_correction_kl={corrected}"
    caveat = "Audited with the ratio of the token." if level != "token" and corrected else ""
    run.parts = [part_of("axolotl", name, AsLoss("k3", ratio=corrected), REDUCTIONS[kind], beta, caveat)]
    run.notes += [SKIPS] * bool(run["skip_zero_advantage_batches"] and beta)
    run.is_stale_by("async_prefetch", EARLIER)
    return run.of("its asynchronous GRPO trainer", "reverse-kl-token")


FRAMEWORK = Framework.of(
    "axolotl",
    subjects,
    reader=Reader(
        "Axolotl",
        KNOWN,
        read_config,
        re.compile(r"axolotl train|axolotl\.cli\.train"),
        beginnings=("trl.",),
        telling=("base_model",),
        harmless=HARMLESS,
    ),
)

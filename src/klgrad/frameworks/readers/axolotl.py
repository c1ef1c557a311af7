"""Axolotl: `rl: grpo` and `trl` of its configurations.

The synchronous trainer is TRL's; the asynchronous one has a loss of its own.
"""

import re
from dataclasses import replace
from typing import Any

from ...errors import RunFileError
from .. import trl
from ..run_settings import Change, Reader, Run, Why, one_of, with_defaults
from ..transcribed import OVER_COMPLETIONS, OVER_TOKENS, SUM
from .formulae import AsLoss, part_of

TRL = "trl."
KNOWN: dict[str, Any] = {
    "rl": "",
    f"{TRL}beta": None,
    "rl_beta": None,
    f"{TRL}loss_type": None,
    f"{TRL}use_bias_correction_kl": None,
    f"{TRL}importance_sampling_level": None,
    f"{TRL}num_iterations": None,
    f"{TRL}use_vllm": False,
    f"{TRL}use_liger_loss": None,
    f"{TRL}async_prefetch": False,
    f"{TRL}use_data_producer": False,
    f"{TRL}skip_zero_advantage_batches": True,
    f"{TRL}sync_ref_model": False,
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
    settings, named = with_defaults(given, KNOWN)
    if not settings["rl"]:
        raise RunFileError("rl: grpo", "a configuration without rl", "give the file of an RL run")
    one_of("rl", settings["rl"], ALGORITHMS)
    beta = settings[f"{TRL}beta"]
    beta = settings["rl_beta"] if beta is None else beta
    settings = {**settings, f"{TRL}beta": 0.0 if beta is None else float(beta)}
    unread = {}
    if settings["rl_beta"] is not None and given.get(f"{TRL}beta") is not None:
        unread["rl_beta"] = "trl.beta is set, and comes first"
    notes = (MOVES,) if settings[f"{TRL}sync_ref_model"] else ()
    if settings[f"{TRL}async_prefetch"] or settings[f"{TRL}use_data_producer"]:
        return _read_async(settings, named, unread, notes)
    return _read_sync(settings, given, named, unread, notes)


def _read_sync(
    settings: dict[str, Any],
    given: dict[str, Any],
    named: tuple[str, ...],
    unread: dict[str, str],
    notes: tuple[str, ...],
) -> Run:
    """By the reader of TRL."""
    if settings[f"{TRL}use_liger_loss"]:
        raise RunFileError("a loss of TRL", "use_liger_loss: true", "its loss is not read here; see klgrad audit liger")
    passed = {name: settings[f"{TRL}{name}"] for name in PASSED if settings[f"{TRL}{name}"] is not None}
    passed |= {"beta": settings[f"{TRL}beta"]}
    passed |= {x: settings[x] for x in ("gradient_accumulation_steps",) if x in given}
    reader = trl.FRAMEWORK.reader
    assert reader is not None
    run = reader.read(passed, "grpo")
    changes = tuple(replace(change, name=f"{TRL}{change.name}") for change in run.changes)
    shown = settings | {f"{TRL}{x}": run.settings[x] for x in PASSED if x in run.settings}
    return replace(
        run, framework="axolotl", trainer="TRL's GRPOTrainer", settings=shown, given=named,
        changes=changes, unread=unread, notes=(*notes, *run.notes, OF_TRL),
    )  # fmt: skip


OF_TRL = "The loss is TRL's: audited with the TRL that is installed here. Axolotl 0.21 pins TRL 1.14.1."


def _read_async(
    settings: dict[str, Any], named: tuple[str, ...], unread: dict[str, str], notes: tuple[str, ...]
) -> Run:
    """Its own loss: k3, times the ratio if `use_bias_correction_kl` is set."""
    kind = one_of(f"{TRL}loss_type", settings[f"{TRL}loss_type"] or "dapo", tuple(REDUCTIONS))
    level = settings[f"{TRL}importance_sampling_level"] or "token"
    corrected, beta = bool(settings[f"{TRL}use_bias_correction_kl"]), settings[f"{TRL}beta"]
    changes = []
    if not beta:
        changes.append(Change(f"{TRL}beta", 0.04, 0.0, "at 0 no reference is loaded, and there is no KL"))
    if not corrected:
        changes.append(Change(f"{TRL}use_bias_correction_kl", True, False, LOSES_RATIO))
    if level != "token":
        why = "a ratio of the completion on the KL of a token belongs to no divergence"
        changes.append(Change(f"{TRL}importance_sampling_level", "token", level, why))
    if REDUCTIONS[kind] == OVER_COMPLETIONS:
        changes.append(Change(f"{TRL}loss_type", "dapo", kind, Why.LENGTH))
    name = f"async loss_type={kind} use_bias_correction_kl={corrected}"
    caveat = "Audited with the ratio of the token." if level != "token" and corrected else ""
    part = part_of("axolotl", name, AsLoss("k3", ratio=corrected), REDUCTIONS[kind], beta, caveat)
    more = (SKIPS,) if settings[f"{TRL}skip_zero_advantage_batches"] and beta else ()
    stale = ["async_prefetch=true: completions of earlier policies are trained on"] * settings[f"{TRL}async_prefetch"]
    return Run(
        "axolotl", "its asynchronous GRPO trainer", settings, named, (part,) if beta else (), tuple(stale),
        "reverse-kl-token", tuple(changes), (*notes, *more), unread=unread,
    )  # fmt: skip


READER = Reader(
    "Axolotl",
    KNOWN,
    read_config,
    re.compile(r"axolotl train|axolotl\.cli\.train"),
    beginnings=("trl.",),
    telling=("base_model",),
    harmless=HARMLESS,
    version="0.21.0",
    source="axolotl-ai-cloud/axolotl: src/axolotl/utils/schemas/trl.py, src/axolotl/core/trainers/grpo/__init__.py and "
    "async_trainer.py; read on 2026-11-18",
)

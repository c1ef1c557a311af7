"""TRL: the fields of a `GRPOConfig` or `RLOOConfig`."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import RunFileError
from ...targets import Verdict
from .run import TOKEN_MEAN, Change, Part, Run, one_of, with_defaults

if TYPE_CHECKING:
    from ...audit import Subject

SAMPLING = {
    "num_iterations": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "use_vllm": False,
}
GRPO: dict[str, Any] = {
    "beta": 0.0,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "use_bias_correction_kl": True,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    **SAMPLING,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
}
RLOO: dict[str, Any] = {
    "beta": 0.05,
    "normalize_advantages": False,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    **SAMPLING,
}
TRAINERS = {"grpo": GRPO, "rloo": RLOO}
"""The defaults of the settings that matter, by trainer; a test compares them with TRL's."""

TELLING = (
    *(name for name in GRPO | RLOO if name not in ("per_device_train_batch_size", "gradient_accumulation_steps")),
    "num_generations", "reward_funcs", "max_completion_length",
)  # fmt: skip
"""Settings that tell a run of these trainers from TRL's others."""

PER_COMPLETION = ("grpo", "sapo")
PER_TOKEN = ("dapo", "cispo", "vespo")
PER_PASS = ("bnpo",)
SUMMED = ("dr_grpo", "luspo")
"""What each `loss_type` divides by: the length of each completion, the tokens of the batch, those of one forward pass
on one device, or a constant."""

LATER = "the later updates of a generation use completions of an earlier policy"
BETA = 0.04
OWN_FIELDS = ("kl_coef", "kl_level", "kl_divergence", "kl_estimator", "kl_placement", "kl_ratio", "kl_cell")
"""Fields of this package's `KLConfig`."""


def trl_run(given: dict[str, Any], trainer: str | None) -> Run:
    """Read the fields of TRL's configuration.

    Args:
        given: the settings of the file.
        trainer: `grpo` or `rloo`; None to tell by the settings, which is GRPO where they do not tell.

    Returns:
        The run.
    """
    if own := [name for name in OWN_FIELDS if name in given]:
        raise RunFileError("TRL's own settings", f"{own[0]}, of KLConfig", "use klgrad train --config FILE --dry-run")
    kind = trainer or ("rloo" if "normalize_advantages" in given else "grpo")
    settings, named = with_defaults(given, TRAINERS[kind])
    read = _grpo if kind == "grpo" else _rloo
    unsure = trainer is None and kind == "grpo" and "loss_type" not in given
    return read(settings, named, ("Read as the settings of a GRPOTrainer; --trainer rloo for RLOO.",) * unsure)


def _grpo(settings: dict[str, Any], named: tuple[str, ...], notes: tuple[str, ...]) -> Run:
    kind = one_of("loss_type", settings["loss_type"], (*PER_TOKEN, *PER_PASS, *PER_COMPLETION, *SUMMED))
    one_of("importance_sampling_level", settings["importance_sampling_level"], ("token", "sequence"))
    changes = _common(settings)
    if settings["importance_sampling_level"] != "token":
        why = "the KL would be corrected by one ratio per completion; this changes the policy loss too"
        changes.append(_to(settings, "importance_sampling_level", "token", why))
    if not settings["use_bias_correction_kl"]:
        changes.append(_to(settings, "use_bias_correction_kl", True, "k3 alone descends the forward KL"))
    if kind in PER_COMPLETION:
        changes.append(_to(settings, "loss_type", "dr_grpo", "it divides by the length of each completion"))
    elif kind in PER_TOKEN:
        changes.append(Change("loss_type", "dr_grpo", kind, TOKEN_MEAN, optional=True))
    why, caveat, audited = _of_one_pass(settings)
    if why:
        changes.append(_to(settings, "loss_type", "dr_grpo", why))
    chosen = audited_settings({**settings, "loss_type": audited})
    loss = " ".join(["trl grpo", *(f"{name}={value}" for name, value in chosen.items())])
    part = Part("loss", loss, settings["beta"], partial(_subject, "grpo", chosen), caveat)
    return _run("GRPOTrainer", settings, named, part, changes, notes)


def _of_one_pass(settings: dict[str, Any]) -> tuple[str, str, str]:
    """Why to change a loss that divides by the tokens of one forward pass, how it was audited, and as what."""
    kind, rows = settings["loss_type"], settings["per_device_train_batch_size"]
    if kind not in PER_PASS:
        return "", "", kind
    why = f"it divides by the tokens of one forward pass, of per_device_train_batch_size={rows} completions"
    if rows == 1:
        caveat = f"Audited as loss_type=grpo: with one completion in a forward pass {kind} is the same."
        return f"{why}: by the length of each completion", caveat, "grpo"
    caveat = (
        f"Audited with the batch in one forward pass; here a pass has {rows} completions, however large the batch is: "
        "what holds in large batches holds if this number is large."
    )
    return why, caveat, kind


def _rloo(settings: dict[str, Any], named: tuple[str, ...], notes: tuple[str, ...]) -> Run:
    changes = _common(settings)
    if settings["normalize_advantages"]:
        why = "the standard deviation of the batch divides the KL too"
        changes.append(_to(settings, "normalize_advantages", False, why))
    shown = ("normalize_advantages", *(n for n in ("mask_truncated_completions", "use_vllm") if settings[n]))
    chosen = {name: settings[name] for name in shown}
    loss = " ".join(["trl rloo", *(f"{name}={value}" for name, value in chosen.items())])
    part = Part("reward", loss, settings["beta"], partial(_subject, "rloo", chosen))
    return _run("RLOOTrainer", settings, named, part, changes, notes)


def _run(
    trainer: str,
    settings: dict[str, Any],
    named: tuple[str, ...],
    part: Part,
    changes: list[Change],
    notes: tuple[str, ...],
) -> Run:
    parts = (part,) if settings["beta"] else ()
    target: Verdict = "reverse-kl-token" if part.place == "loss" else "reverse-kl-sequence"
    if settings["sync_ref_model"]:
        notes = (*notes, "sync_ref_model moves the reference during training.")
    return Run("trl", trainer, settings, named, parts, _stale(settings), target, tuple(changes), notes)


def audited_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of GRPO that its KL depends on, with those defaults that the adapter's list of settings names."""
    chosen = {name: settings[name] for name in ("loss_type", "importance_sampling_level", "use_bias_correction_kl")}
    if not settings["use_bias_correction_kl"]:
        chosen["importance_sampling_level"] = "token"  # no ratio touches the KL
    plain = chosen["importance_sampling_level"] == "token" and chosen["use_bias_correction_kl"]
    others = {"mask_truncated_completions": settings["mask_truncated_completions"], "use_vllm": settings["use_vllm"]}
    if settings["use_vllm"]:
        others["vllm_importance_sampling_correction"] = settings["vllm_importance_sampling_correction"]
        others["vllm_importance_sampling_mode"] = settings["vllm_importance_sampling_mode"]
    others = {name: value for name, value in others.items() if value != GRPO[name]}
    if plain and (others or chosen["loss_type"] not in ("dapo", "grpo", *SUMMED)):
        chosen = {"loss_type": chosen["loss_type"]}  # the list of settings leaves defaults out here
    return chosen | others


def _common(settings: dict[str, Any]) -> list[Change]:
    found = []
    if not settings["beta"]:
        found.append(_to(settings, "beta", BETA, "without it TRL loads no reference and has no KL"))
    if settings["mask_truncated_completions"]:
        why = "it drops the KL of completions that are cut off"
        found.append(_to(settings, "mask_truncated_completions", False, why))
    return found


def _to(settings: dict[str, Any], name: str, value: Any, why: str) -> Change:
    return Change(name, value, settings[name], why)


def _stale(settings: dict[str, Any]) -> tuple[str, ...]:
    found = []
    if settings["num_iterations"] > 1:
        found.append(f"num_iterations={settings['num_iterations']}: each batch is used for several updates")
    steps, accumulated = settings["steps_per_generation"], settings["gradient_accumulation_steps"]
    if _whole(steps) > accumulated:
        found.append(f"steps_per_generation={steps} above gradient_accumulation_steps={accumulated}: {LATER}")
    found += _stale_by_size(settings)
    if settings["use_vllm"]:
        found.append("use_vllm: the log-probs of vLLM, which samples, differ from those of the trainer")
    return tuple(found)


def _stale_by_size(settings: dict[str, Any]) -> list[str]:
    """The reason by `generation_batch_size`, which depends on the number of processes: no file has that."""
    size, batch = settings["generation_batch_size"], settings["per_device_train_batch_size"]
    accumulated = settings["gradient_accumulation_steps"]
    processes = math.ceil(_whole(size) / max(batch * accumulated, 1))  # TRL fails with a batch of 0
    if processes <= 1:
        return []
    above = f"per_device_train_batch_size={batch} times gradient_accumulation_steps={accumulated}"
    return [f"generation_batch_size={size} above {above}: {LATER}, unless there are at least {processes} processes"]


def _whole(value: Any) -> int:
    """The number in a field that is None by default; 0 for None. A script has both as text."""
    return int(value) if str(value).isdigit() else 0


def _subject(kind: str, settings: dict[str, Any]) -> "Subject":
    from .. import trl

    return {"grpo": trl.grpo, "rloo": trl.rloo}[kind](**settings)

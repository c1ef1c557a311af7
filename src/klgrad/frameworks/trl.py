"""TRL: its own `GRPOTrainer`, `RLOOTrainer` and `DistillationTrainer`, from sampled completions to the loss.

A real trainer is built for each setting, with models that return given log-probs (`trl_stage`). The reference returns
`ref_logp`. The policy returns `behavior_logp` when a batch is scored, since that policy sampled it, and `logp` in the
loss. Only `_generate_single_turn` is replaced: it returns the audited completions; one that fills all columns of the
batch counts as truncated. Log-probs, rewards, the KL in the reward, baselines, normalisation, clipping and reduction
are TRL's. Rewards are 0, or the advantage of the completion in an audit with random advantages. TRL's head computes
log-probs in float32: for the verdict its code runs in float64, and for the float32 probes it runs unchanged.

With `use_vllm` the sampler is another program: it reports `behavior_logp`, and the policy returns `logp` at scoring
too, as in training that uses each batch once. vLLM itself is not called.

Left out, because they act on the policy loss or on the advantages, and the KL is added afterwards (tested):
`epsilon`, `epsilon_high`, `delta`, `off_policy_mask_threshold`, `top_entropy_quantile`, `scale_rewards`, the constants
of sapo and vespo, the bounds of vLLM's ratio, and `importance_sampling_level` without bias correction. RLOO's
`reward_clip_range` is applied before the KL; its `epsilon` has an effect off-policy only, where its KL is stale anyway.
`temperature` divides the logits of both models, so the KL is that of the policies at that temperature (tested).
An entropy bonus has a gradient of its own; `sync_ref_model` moves the reference between updates.

`DistillationTrainer` is described in `trl_stage`.
"""

from __future__ import annotations

import math
import re
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from ..errors import RunFileError
from .framework import Framework
from .harness import named, subject
from .run_settings import SEVERAL, KLPart, Reader, Run, Why

if TYPE_CHECKING:
    from ..trl import KLConfig
    from .harness import Batch, Subject, Tensor

DISTILLATION_BETAS = (1.0, 0.5, 0.0)
"""What `DistillationTrainer`'s β selects: reverse KL, which is its default; Jensen-Shannon divergence; forward KL."""

PER_COMPLETION = ("grpo", "sapo")
PER_TOKEN = ("dapo", "cispo", "vespo")
PER_PASS = ("bnpo",)
SUMMED = ("dr_grpo", "luspo")
"""What each `loss_type` divides by: the length of each completion, the tokens of the batch, those of one forward pass
on one device, or a constant."""


def subjects() -> list[Subject]:
    """GRPO: all combinations of what interacts with the KL. Then all other settings, one at a time."""
    ratios = (("token", True), ("token", False), ("sequence", True))
    in_full = [
        grpo(loss_type=kind, importance_sampling_level=level, use_bias_correction_kl=correction)
        for kind, (level, correction) in product(("dapo", "grpo", "dr_grpo", "luspo"), ratios)
    ]
    modes = ("sequence_truncate", "token_mask", "token_truncate")
    return [
        *in_full,
        *(grpo(loss_type=kind) for kind in ("bnpo", "cispo", "vespo", "sapo")),
        grpo(loss_type="dr_grpo", mask_truncated_completions=True),
        grpo(loss_type="dr_grpo", use_vllm=True),
        *(grpo(loss_type="dr_grpo", use_vllm=True, vllm_importance_sampling_mode=mode) for mode in modes),
        grpo(loss_type="dr_grpo", use_vllm=True, vllm_importance_sampling_correction=False),
        rloo(normalize_advantages=False),
        rloo(normalize_advantages=True),
        rloo(normalize_advantages=False, mask_truncated_completions=True),
        rloo(normalize_advantages=False, use_vllm=True),
        *(distillation(beta=beta) for beta in DISTILLATION_BETAS),
    ]


def grpo(**settings: object) -> Subject:
    """A `GRPOTrainer` with these settings, and TRL's defaults otherwise."""
    return _subject("grpo", settings)


def rloo(**settings: object) -> Subject:
    """An `RLOOTrainer` with these settings, and TRL's defaults otherwise."""
    return _subject("rloo", settings)


def distillation(**settings: object) -> Subject:
    """A `DistillationTrainer` whose teacher is the reference, with these settings, and TRL's defaults otherwise."""
    return _subject("distillation", settings)


def declared(**settings: Any) -> Subject:
    """This package's `KLTrainer` on TRL, at β = 1, with these settings."""
    return _subject("klgrad", {"kl_coef": 1.0, **settings})


def _subject(kind: str, settings: dict[str, object]) -> Subject:
    from .trl_stage import stage_of

    def loss(batch: Batch, micro_batches: int = 1) -> Tensor:
        return stage_of(kind, tuple(settings.items())).loss(batch, micro_batches)

    # The exact KLs that a `KLTrainer` is given are those of the whole batch.
    halves = None if kind == "klgrad" else partial(loss, micro_batches=2)
    return subject(named(f"trl {kind}", settings), loss, in_micro_batches=halves)


# TRL: the whole policy losses of its own `GRPOTrainer` and `RLOOTrainer`, without a KL, as is TRL's default.
#
# The trainers are built as above. A call has the whole batch, so that the statistics of TRL's batch are those of the
# limit of large batches.

TYPES = ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "vespo")
MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")


def policy_losses() -> list[Subject]:
    """Every type of loss, and every correction for a sampler that is another program (vLLM)."""
    sampled = {"loss_type": "dr_grpo", "scale_rewards": "none", "use_vllm": True}
    return [
        *(policy_loss("grpo", loss_type=kind) for kind in TYPES),
        policy_loss("grpo", loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
        policy_loss("grpo", loss_type="dr_grpo", scale_rewards="none"),
        *(policy_loss("grpo", **sampled, vllm_importance_sampling_mode=mode) for mode in MODES),
        policy_loss("grpo", **sampled, vllm_importance_sampling_correction=False),
        policy_loss("rloo", normalize_advantages=False),
    ]


def policy_loss(kind: str, **settings: object) -> Subject:
    """The loss of a trainer with these settings, without a KL, and TRL's defaults otherwise."""
    from .trl_stage import stage_of

    def loss(batch: Batch) -> Tensor:
        return stage_of(kind, (("beta", 0.0), *settings.items())).loss(batch)

    return subject(named(f"trl {kind}", settings), loss)


# Which settings of a run an audit of its trainer needs.

KL_FIELDS_LEFT_OUT = ("kl_coef", "kl_target", "kl_target_unit", "kl_horizon", "kl_memory")
"""β, which is 1 in an audit, what adapts it, and a setting of memory."""

TRL_FIELDS = (
    "loss_type", "scale_rewards", "multi_objective_aggregation", "importance_sampling_level", "epsilon", "epsilon_high",
    "delta", "use_vllm", "sapo_", "vespo_", "vllm_importance_sampling_",
)  # fmt: skip
"""Settings of TRL, or beginnings of their names, that may act on the KL or on the reward or advantage that carries it.

What makes samples stale (`rollout_lag`, `num_iterations`, `steps_per_generation`) is left out: an audit has its own
samplers, of which the loss knows the log-probs as it does for old completions.
"""


def audited_settings(config: KLConfig) -> dict[str, object]:
    """The settings of a run that may act on its KL, where they differ from their defaults.

    Args:
        config: the settings of the run.

    Returns:
        Settings for `klgrad.frameworks.trl.declared`, which runs the trainer for an audit, with β = 1 and no rewards.

    Example:
        >>> from klgrad.frameworks.trl import audited_settings
        >>> from klgrad.trl import KLConfig
        >>> audited_settings(KLConfig("runs/mine", loss_type="dr_grpo", kl_coef=0.02, learning_rate=1e-5, bf16=False))
        {'loss_type': 'dr_grpo'}
    """
    from ..trl.config import changed

    kl = lambda name: name.startswith("kl_") and name not in KL_FIELDS_LEFT_OUT
    return {name: value for name, value in changed(config).items() if kl(name) or name.startswith(TRL_FIELDS)}


# TRL: the fields of a `GRPOConfig` or `RLOOConfig`.

SAMPLING = {
    "num_iterations": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "use_vllm": False,
}
GRPO: dict[str, object] = {
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
RLOO: dict[str, object] = {
    "beta": 0.05,
    "normalize_advantages": False,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    **SAMPLING,
}
TRAINERS = {"grpo": GRPO, "rloo": RLOO}
"""The defaults of the settings that matter, by trainer; a test compares them with TRL's."""

SHARED = ("beta", "sync_ref_model", "use_vllm", "per_device_train_batch_size", "gradient_accumulation_steps")
"""Settings that TRL's other trainers have too; of `loss_type` they take other values, which are refused."""

TELLING = (*(name for name in GRPO | RLOO if name not in SHARED), "num_generations", "reward_funcs")
"""Settings that tell a run of these trainers from TRL's others."""

USUAL_BETA = 0.04
OWN_FIELDS = ("kl_coef", "kl_level", "kl_divergence", "kl_estimator", "kl_placement", "kl_ratio", "kl_cell")
"""Fields of this package's `KLConfig`."""


def read_config(given: dict[str, Any], trainer: str | None) -> Run:
    """Read the fields of TRL's configuration, of GRPO where neither `trainer` nor a setting tells."""
    if own := [name for name in OWN_FIELDS if name in given]:
        raise RunFileError("TRL's own settings", f"{own[0]}, of KLConfig", "use klgrad train --config FILE --dry-run")
    kind = trainer or ("rloo" if "normalize_advantages" in given else "grpo")
    run = Run("trl", given, TRAINERS[kind])
    unsure = trainer is None and kind == "grpo" and "loss_type" not in given
    run.notes += ["Read as the settings of a GRPOTrainer; --trainer rloo for RLOO."] * unsure
    run.notes += ["sync_ref_model moves the reference during training."] * run["sync_ref_model"]
    _add_stale(run)
    run.switch_on("beta", USUAL_BETA, "without it TRL loads no reference and has no KL")
    run.change("mask_truncated_completions", False, "it drops the KL of completions that are cut off")
    if kind == "rloo":
        run.parts.append(_read_rloo(run))
        return run.of("RLOOTrainer", "reverse-kl-sequence")
    run.parts.append(_read_grpo(run))
    return run.of("GRPOTrainer", "reverse-kl-token")


def _read_grpo(run: Run) -> KLPart:
    kind = run.one_of("loss_type", (*PER_TOKEN, *PER_PASS, *PER_COMPLETION, *SUMMED))
    run.one_of("importance_sampling_level", ("token", "sequence"))
    why = "the KL would be corrected by one ratio per completion; this changes the policy loss too"
    run.change("importance_sampling_level", "token", why)
    run.switch_on("use_bias_correction_kl", True, "k3 alone descends the forward KL")
    why, caveat, audited = _of_one_pass(run)
    if kind not in SUMMED:
        optional = kind in PER_TOKEN
        why = why or (Why.MEAN_OVER_TOKENS if optional else Why.LENGTH)
        run.change("loss_type", "dr_grpo", why, optional=optional)
    chosen = _audited_fields({**run.settings, "loss_type": audited})
    return KLPart("loss", named("trl grpo", chosen), run["beta"], partial(grpo, **chosen), caveat)


def _of_one_pass(run: Run) -> tuple[str, str, str]:
    """Why to change a loss that divides by the tokens of one forward pass, how it was audited, and as what."""
    kind, rows = run["loss_type"], run["per_device_train_batch_size"]
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


def _read_rloo(run: Run) -> KLPart:
    run.change("normalize_advantages", False, "the standard deviation of the batch divides the KL too")
    shown = ("normalize_advantages", *(n for n in ("mask_truncated_completions", "use_vllm") if run[n]))
    chosen = {name: run[name] for name in shown}
    return KLPart("reward", named("trl rloo", chosen), run["beta"], partial(rloo, **chosen))


def _audited_fields(settings: dict[str, object]) -> dict[str, object]:
    """The settings of GRPO that its KL depends on, with those defaults that the module's list of settings names."""
    chosen = {name: settings[name] for name in ("loss_type", "importance_sampling_level", "use_bias_correction_kl")}
    if not settings["use_bias_correction_kl"]:
        chosen["importance_sampling_level"] = "token"  # no ratio touches the KL
    plain = chosen["importance_sampling_level"] == "token" and chosen["use_bias_correction_kl"]
    names = ["mask_truncated_completions", "use_vllm"]
    if settings["use_vllm"]:
        names += ["vllm_importance_sampling_correction", "vllm_importance_sampling_mode"]
    others = {name: settings[name] for name in names if settings[name] != GRPO[name]}
    if plain and (others or chosen["loss_type"] not in ("dapo", "grpo", *SUMMED)):
        chosen = {"loss_type": chosen["loss_type"]}  # the list of settings leaves defaults out here
    return chosen | others


def _add_stale(run: Run) -> None:
    steps, accumulated = run["steps_per_generation"], run["gradient_accumulation_steps"]
    size, batch = run["generation_batch_size"], run["per_device_train_batch_size"]
    run.is_stale_by("num_iterations", SEVERAL, least=2)
    if _whole(steps) > accumulated:
        run.stale.append(f"steps_per_generation={steps} above gradient_accumulation_steps={accumulated}: {SEVERAL}")
    # No file has the number of processes.
    processes = math.ceil(_whole(size) / max(batch * accumulated, 1))  # TRL fails with a batch of 0
    if processes > 1:
        update = f"per_device_train_batch_size={batch} times gradient_accumulation_steps={accumulated}"
        unless = f"unless there are at least {processes} processes"
        run.stale.append(f"generation_batch_size={size} above {update}: {SEVERAL}, {unless}")
    if run["use_vllm"]:
        run.is_sampled_by("vLLM")


def _whole(value: Any) -> int:
    """The number in a field that is None by default; 0 for None. A script has both as text."""
    return int(value) if str(value).isdigit() else 0


FRAMEWORK = Framework.of(
    "trl",
    subjects,
    whole_losses=policy_losses,
    reader=Reader(
        "TRL",
        GRPO | RLOO,
        read_config,
        re.compile(r"trl (grpo|rloo)|trl[./]scripts[./](grpo|rloo)(\.py)?"),
        telling=(*TELLING, *OWN_FIELDS),
        scripts=re.compile(r"(grpo|gspo|rloo)\w*\.py$|\.\w*(grpo|gspo|rloo)\w*$"),
        harmless=OWN_FIELDS,
    ),
)

"""Tunix: `grpo_config`, `agentic_grpo_config` and `ppo_config`; and MaxText's `rl`, which Tunix's GRPO trains."""

import re
from typing import TYPE_CHECKING, Any

from ...errors import RunFileError
from ..run_settings import Change, KLPart, Reader, Run, Why, one_of, with_defaults
from ..transcribed import OVER_COMPLETIONS, OVER_TOKENS, SUM
from .formulae import AsLoss, InReward, number_or_none, part_of

if TYPE_CHECKING:
    from ...targets import Verdict

GRPO: dict[str, Any] = {
    "beta": 0.04,
    "kl_loss_mode": "kl",
    "loss_agg_mode": "sequence-mean-token-mean",
    "num_iterations": 1,
    "off_policy_steps": 0,
}
PPO: dict[str, Any] = {"beta": 0.04, "kl_method": "low_var_kl", "gamma": 1.0, "gae_lambda": 0.95, "num_iterations": 1}
SECTIONS = {"grpo_config.": GRPO, "agentic_grpo_config.": GRPO, "ppo_config.": PPO}
KNOWN = {f"{section}{name}": value for section, known in SECTIONS.items() for name, value in known.items()}
"""The defaults of the classes, and not those of `base_config.yaml`, whose β is 0.08."""

CLAMPS = tuple(f"{section}kl_clamp_value" for section in SECTIONS)
KINDS = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
REDUCTIONS = {
    "token-mean": OVER_TOKENS,
    "sequence-mean-token-mean": OVER_COMPLETIONS,
    "sequence-mean-token-scale": SUM,
    "seq-mean-token-sum": SUM,
    "sequence-mean-token-sum-norm": SUM,
}
BETA = (
    "A script that starts from base_config.yaml has its β of 0.08 where it names none; the number here is the class's."
)


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the section of the algorithm; its class has the defaults."""
    named = [section for section in SECTIONS if any(name.startswith(section) for name in given)]
    if len(named) != 1:
        received = " and ".join(named) or "none of them"
        raise RunFileError(f"one of {', '.join(SECTIONS)}", received, "give the file of one algorithm")
    (section,) = named
    defaults = {f"{section}{name}": value for name, value in SECTIONS[section].items()}
    settings, shown = with_defaults(given, defaults)
    clamp = number_or_none(given, f"{section}kl_clamp_value", None)
    values = {name.removeprefix(section): value for name, value in settings.items()}
    stale = _stale(values)
    if section == "ppo_config.":
        part, changes = _ppo(section, values, clamp)
        target: Verdict = "reverse-kl-sequence"
    else:
        part, changes = grpo_part("tunix", section, values, clamp)
        target = "reverse-kl-token"
    notes = (BETA,) if f"{section}beta" not in given else ()
    parts = (part,) if values["beta"] else ()
    return Run("tunix", section.removesuffix("."), settings, shown, parts, stale, target, tuple(changes), notes)


def grpo_part(framework: str, section: str, values: dict[str, Any], clamp: float | None) -> tuple[KLPart, list[Change]]:
    """The KL of its GRPO, and what to change.

    Args:
        framework: `tunix` or `maxtext`.
        section: before the names of the settings.
        values: those of `GRPO`.
        clamp: the bound on the value, None without.
    """
    mode = one_of(f"{section}kl_loss_mode", values["kl_loss_mode"], tuple(KINDS))
    unit = one_of(f"{section}loss_agg_mode", values["loss_agg_mode"], tuple(REDUCTIONS))
    changes = [Change(f"{section}beta", 0.04, 0.0, "at 0 there is no KL")] * (not values["beta"])
    if mode != "mse_kl":
        why = Why.AS_LOSS["k1"] if mode == "kl" else Why.K3
        changes.append(Change(f"{section}kl_loss_mode", "mse_kl", mode, why))
    if clamp is not None:
        why = f"beyond a value of {clamp:g} there is no gradient"
        changes.append(Change(f"{section}kl_clamp_value", None, clamp, why))
    if REDUCTIONS[unit] == OVER_COMPLETIONS:
        changes.append(Change(f"{section}loss_agg_mode", "token-mean", unit, Why.LENGTH))
    name = f"grpo kl_loss_mode={mode} loss_agg_mode={unit}{'' if clamp is None else f' kl_clamp_value={clamp:g}'}"
    return part_of(framework, name, AsLoss(KINDS[mode], clamp=clamp), REDUCTIONS[unit], values["beta"]), changes


def _ppo(section: str, values: dict[str, Any], clamp: float | None) -> tuple[KLPart, list[Change]]:
    mode = one_of(f"{section}kl_method", values["kl_method"], tuple(KINDS))
    changes = [Change(f"{section}kl_method", "kl", mode, Why.ONLY_K1)] * (mode != "kl")
    for name in ("gamma", "gae_lambda"):
        if values[name] != 1:
            changes.append(Change(f"{section}{name}", 1.0, values[name], "the KL of later tokens is discounted"))
    if clamp is not None:
        changes.append(Change(f"{section}kl_clamp_value", None, clamp, f"values beyond {clamp:g} are cut"))
    form = InReward(KINDS[mode], discount=values["gamma"] * values["gae_lambda"], clamp=clamp)
    caveat = "Audited with a critic that is 0, and advantages that are not normalised."
    name = f"ppo kl_method={mode} gamma={values['gamma']:g} gae_lambda={values['gae_lambda']:g}"
    return part_of("tunix", name, form, OVER_TOKENS, values["beta"], caveat), changes


def _stale(values: dict[str, Any]) -> tuple[str, ...]:
    found = [f"{x}={values[x]}: a batch is used for several updates" for x in ("num_iterations",) if values[x] > 1]
    if values.get("off_policy_steps"):
        found.append(f"off_policy_steps={values['off_policy_steps']}: completions of earlier policies are trained on")
    return tuple(found)


SOURCE = "google/tunix: tunix/rl/grpo/grpo_learner.py, rl/agentic/agentic_grpo_learner.py, rl/ppo/ppo_learner.py, "
READER = Reader(
    "Tunix",
    KNOWN,
    read_config,
    re.compile(r"tunix\.cli\.(grpo|ppo)\w*|tunix\.cli\.\w*(grpo|ppo)\w*"),
    beginnings=tuple(SECTIONS),
    harmless=("rl_training_config.", *(f"{section}force_compute_kl" for section in SECTIONS),
              *(f"{section}advantage_estimator" for section in SECTIONS)),
    sections=CLAMPS,
    version="0.1.7",
    source=f"{SOURCE}rl/algo_core.py, rl/common.py of the wheel; read on 2026-11-18",
)  # fmt: skip

# MaxText: its trainer passes `rl` to Tunix, and no `kl_loss_mode`.

RL = "rl."
MAXTEXT_KNOWN: dict[str, Any] = {
    f"{RL}grpo_beta": 0.08,
    f"{RL}loss_agg_mode": "sequence-mean-token-mean",
    f"{RL}num_iterations": 1,
    f"{RL}off_policy_steps": 0,
}
NO_MODE = (
    "MaxText has no setting for Tunix's kl_loss_mode, whose default is k1: no setting makes this KL act. Pass "
    'kl_loss_mode="mse_kl" to GrpoConfig in train_rl.py.'
)


def read_maxtext(given: dict[str, Any], _: str | None = None) -> Run:
    """Read `rl` of a configuration of MaxText's RL trainer."""
    settings, named = with_defaults(given, MAXTEXT_KNOWN)
    values = GRPO | {name.removeprefix(RL): value for name, value in settings.items()}
    values["beta"] = settings[f"{RL}grpo_beta"]
    part, changes = grpo_part("maxtext", RL, values, None)
    own = [change for change in changes if change.name in MAXTEXT_KNOWN]
    if values["beta"]:
        own.insert(
            0, Change(f"{RL}grpo_beta", 0.0, values["beta"], "k1 as a loss descends nothing; or patch the trainer")
        )
    parts = (part,) if values["beta"] else ()
    trainer = "Tunix's GRPO"
    return Run(
        "maxtext", trainer, settings, named, parts, _stale(values), "reverse-kl-token", tuple(own), (NO_MODE,)
    )  # fmt: skip


MAXTEXT = Reader(
    "MaxText",
    MAXTEXT_KNOWN,
    read_maxtext,
    re.compile(r"(.*/)?(src\.)?maxtext[./]trainers[./]post_train[./]rl[./]train_rl(\.py)?"),
    beginnings=(f"{RL}grpo_", f"{RL}use_agentic_rollout"),
    version="0.2.5",
    source="AI-Hypercomputer/maxtext: trainers/post_train/rl/train_rl.py, configs/types.py of the wheel; read on "
    "2026-11-18",
)

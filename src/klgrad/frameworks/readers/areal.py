"""AReaL: `actor`, `ref` and `teacher` of its configurations of GRPO, PPO and distillation.

Without a reference, `kl_ctl` multiplies the log-prob of the policy itself: `compute_advantages` takes zeros for the
missing log-probs.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..run_settings import Change, KLPart, Reader, Run, Why, as_type, one_of, with_defaults
from ..transcribed import OVER_TOKENS
from .formulae import AsLoss, InReward, part_of

if TYPE_CHECKING:
    from torch import Tensor

    from ...audit.batch import Batch
    from ...targets import Verdict

ACTOR, TEACHER = "actor.", "teacher."
KNOWN: dict[str, Any] = {
    f"{ACTOR}kl_ctl": 0.1,
    f"{ACTOR}kl_estimator": "k1",
    f"{ACTOR}discount": 1.0,
    f"{ACTOR}gae_lambda": 1.0,
    f"{ACTOR}gae_timestep_unit": "token",
    f"{ACTOR}adv_norm.std_level": "",
    f"{ACTOR}ppo_n_minibatches": 4,
    f"{TEACHER}rl_loss_weight": 1.0,
    f"{TEACHER}distill_loss_weight": 0.005,
    "rollout.max_head_offpolicyness": 0,
}
"""The defaults of `PPOActorConfig` and `TeacherConfig`; that of a level of normalisation stands for none."""

HARMLESS = (
    f"{ACTOR}optimizer.",
    "critic.",
    "ref.",
    f"{TEACHER}train.",
    f"{TEACHER}rollout.",
    "valid_dataset.",
    "sglang.",
)
LEVELS = ("", "batch", "group")
ENGINE = "AReaL samples with an inference engine, whose log-probs differ from those of the trainer"
NO_REFERENCE = (
    "There is no ref: with kl_ctl > 0 AReaL takes 0 for its log-probs, and rewards -kl_ctl log π of every token, "
    "which is an entropy bonus."
)
JOINT = "k1 as a loss: the teacher is scored, and its log-probs are in no gradient"


@dataclass(frozen=True)
class Distilled:
    """The loss of pure distillation: π/π_old times the log-ratio to the teacher, without its gradient."""

    def __call__(self, batch: "Batch") -> "Tensor":
        """(B, T) terms."""
        return (batch.logp - batch.ref_logp).detach() * (batch.logp - batch.old_logp).exp()


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the configuration, with AReaL's defaults for what is missing."""
    has_norm = any(name.startswith(f"{ACTOR}adv_norm.") for name in given)
    level = given.get(f"{ACTOR}adv_norm.std_level", "batch" if has_norm else "")
    plain = {**given, f"{ACTOR}adv_norm.std_level": "" if level in (None, "null") else level}
    settings, named = with_defaults(plain, KNOWN)
    named = tuple(name for name in named if name in given)
    has_ref = any(name.startswith("ref.") for name in given)
    has_teacher = any(name.startswith(TEACHER) for name in given)
    parts: list[KLPart] = []
    changes: list[Change] = []
    notes: list[str] = []
    target: Verdict = "reverse-kl-token" if has_teacher else "reverse-kl-sequence"
    beta = settings[f"{ACTOR}kl_ctl"]
    if beta and has_ref:
        part, changes = _read_reward(settings)
        parts, target = [part], "reverse-kl-sequence"
    elif beta:
        notes.append(NO_REFERENCE)
        changes.append(
            Change(f"{ACTOR}kl_ctl", 0.0, beta, "without a ref it is an entropy bonus; or add a ref section")
        )
    elif not has_teacher:
        changes.append(Change(f"{ACTOR}kl_ctl", 0.1, 0.0, "at 0 no reference is loaded, and there is no KL"))
    unread = {}
    if has_teacher and settings[f"{TEACHER}distill_loss_weight"]:
        part, wanted = _read_teacher(settings)
        parts, changes = [*parts, part], [*changes, *wanted]
        unread = _unread(settings, given)
    notes += ["A KL to the reference and one to the teacher are on: their gradients add up."] * (len(parts) > 1)
    return Run(
        "areal", "PPOActor", settings, named, tuple(parts), _stale(settings), target, tuple(changes), tuple(notes),
        unread=unread,
    )  # fmt: skip


def _unread(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, str]:
    pure = settings[f"{TEACHER}rl_loss_weight"] == 0
    if pure and settings[f"{ACTOR}kl_ctl"] and f"{ACTOR}kl_ctl" in given:
        return {f"{ACTOR}kl_ctl": "rl_loss_weight=0 replaces the loss that has its advantages"}
    return {}


def _read_reward(settings: dict[str, Any]) -> tuple[KLPart, list[Change]]:
    kind = one_of(f"{ACTOR}kl_estimator", settings[f"{ACTOR}kl_estimator"], ("k1", "k2", "k3"))
    level = one_of(f"{ACTOR}adv_norm.std_level", settings[f"{ACTOR}adv_norm.std_level"], LEVELS)
    one_of(f"{ACTOR}gae_timestep_unit", settings[f"{ACTOR}gae_timestep_unit"], ("token",))
    changes = []
    if kind != "k1":
        changes.append(Change(f"{ACTOR}kl_estimator", "k1", kind, Why.ONLY_K1))
    if level:
        why = Why.BATCH_STD if level == "batch" else Why.GROUP_STD
        changes.append(Change(f"{ACTOR}adv_norm.std_level", None, level, why))
    discount = settings[f"{ACTOR}discount"] * as_type(f"{ACTOR}gae_lambda", settings[f"{ACTOR}gae_lambda"], 1.0)
    if discount != 1:
        for name in ("discount", "gae_lambda"):
            if settings[f"{ACTOR}{name}"] != 1:
                why = "the KL of later tokens is discounted"
                changes.append(Change(f"{ACTOR}{name}", 1.0, settings[f"{ACTOR}{name}"], why))
    form = InReward(kind, discount=discount, clamp=10.0, whitened=level == "batch")
    caveat = "Audited with a critic that is 0."
    caveat += " Its division by the group's standard deviation is left out." * (level == "group")
    name = f"actor.kl_estimator={kind} discount={discount:g} adv_norm.std_level={level or 'null'}"
    return part_of("areal", name, form, OVER_TOKENS, settings[f"{ACTOR}kl_ctl"], caveat), changes


def _read_teacher(settings: dict[str, Any]) -> tuple[KLPart, list[Change]]:
    weight, beta = settings[f"{TEACHER}rl_loss_weight"], settings[f"{TEACHER}distill_loss_weight"]
    caveat = "ref is the teacher here."
    if weight == 0:
        return part_of("areal", "teacher.rl_loss_weight=0", Distilled(), OVER_TOKENS, beta, caveat, "loss"), []
    name = "teacher.rl_loss_weight>0"
    why = f"{JOINT}. At 0 the loss is distillation alone, with the right gradient; a mix of both has no setting"
    part = part_of("areal", name, AsLoss("k1"), OVER_TOKENS, beta, caveat)
    return part, [Change(f"{TEACHER}rl_loss_weight", 0.0, weight, why)]


def _stale(settings: dict[str, Any]) -> tuple[str, ...]:
    found = []
    if settings[f"{ACTOR}ppo_n_minibatches"] > 1:
        found.append(f"ppo_n_minibatches={settings[f'{ACTOR}ppo_n_minibatches']}: several updates use a batch")
    if settings["rollout.max_head_offpolicyness"]:
        lag = settings["rollout.max_head_offpolicyness"]
        found.append(f"max_head_offpolicyness={lag}: completions of earlier policies are trained on")
    return (*found, ENGINE)


READER = Reader(
    "AReaL",
    KNOWN,
    read_config,
    re.compile(r"areal\..*"),
    beginnings=("gconfig.", "actor.kl_ctl", "actor.eps_clip", "actor.ppo_n_minibatches", "teacher.distill_loss_weight"),
    harmless=HARMLESS,
    version="1.0.4",
    source="areal-project/AReaL: areal/api/cli_args.py, areal/trainer/ppo/actor.py, areal/utils/data.py; read on "
    "2026-11-18",
)

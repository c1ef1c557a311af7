"""ms-swift: the flags of `swift rlhf --rlhf_type grpo` and `megatron rlhf`."""

import re
from typing import TYPE_CHECKING, Any

from ..run_settings import Change, KLPart, Reader, Run, Why, one_of, with_defaults
from ..transcribed import OVER_COMPLETIONS, OVER_TOKENS, SUM
from .formulae import AsLoss, InReward, InScore, part_of

if TYPE_CHECKING:
    from ...targets import Verdict

KNOWN: dict[str, Any] = {
    "rlhf_type": "",
    "beta": 0.04,
    "loss_type": "grpo",
    "advantage_estimator": "grpo",
    "kl_in_reward": None,
    "scale_rewards": "",
    "teacher_model": "",
    "teacher_model_server": "",
    "teacher_kl_coef": 1.0,
    "num_iterations": 1,
    "steps_per_generation": 0,
    "gradient_accumulation_steps": 1,
    "use_vllm": False,
    "rollout_importance_sampling_mode": "",
}
"""The defaults; empty text and 0 stand for None."""

HARMLESS = ("adam_beta1", "adam_beta2", "sdar_gate_beta")
REDUCTIONS = {
    "grpo": OVER_COMPLETIONS, "sapo": OVER_COMPLETIONS, "bnpo": OVER_TOKENS, "dapo": OVER_TOKENS,
    "cispo": OVER_TOKENS, "fipo": OVER_TOKENS, "dr_grpo": SUM,
}  # fmt: skip
SCALED = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}
IN_REWARD = "k3 as a loss is cut off and descends the forward KL; in the reward k1 is used"


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the flags, with the defaults of ms-swift for those that are missing."""
    settings, named = with_defaults(given, KNOWN)
    one_of("rlhf_type", settings["rlhf_type"], ("grpo",))
    kind = one_of("loss_type", settings["loss_type"], tuple(REDUCTIONS))
    estimator = one_of("advantage_estimator", settings["advantage_estimator"], tuple(SCALED))
    told = settings["kl_in_reward"]
    in_reward = estimator != "grpo" if told is None else str(told).lower() == "true"
    scaled = settings["scale_rewards"] or SCALED[estimator]
    beta = settings["beta"]
    parts: list[KLPart] = []
    changes: list[Change] = [Change("beta", 0.04, 0.0, "at 0 no reference is loaded, and there is no KL")] * (not beta)
    target: Verdict = "reverse-kl-sequence"
    if in_reward:
        part, wanted = _in_reward(kind, estimator, scaled, beta)
    else:
        mode = settings["rollout_importance_sampling_mode"]
        name = f"loss_type={kind}{f' rollout_importance_sampling_mode={mode}' if mode else ''}"
        caveat = "The ratio to the inference engine that multiplies it is left out." if mode else ""
        part = part_of("ms-swift", name, AsLoss("k3", log_clamp=20.0, clamp=10.0), REDUCTIONS[kind], beta, caveat)
        wanted = [
            Change("kl_in_reward", True, False, IN_REWARD),
            *_in_reward(kind, estimator, scaled, beta)[1],
        ]
    parts, changes = [part] * (beta != 0), [*changes, *wanted]
    unread = {}
    if settings["teacher_model"] or settings["teacher_model_server"]:
        parts.append(_teacher(settings, kind))
    elif "teacher_kl_coef" in given:
        unread["teacher_kl_coef"] = "there is no teacher_model and no teacher_model_server"
    notes = ["A KL to the reference and one to the teacher are on: their gradients add up."] * (len(parts) > 1)
    return Run(
        "ms-swift", f"GRPO, advantages by {estimator}", settings, named, tuple(parts), _stale(settings), target,
        tuple(changes), tuple(notes), unread=unread,
    )  # fmt: skip


def _in_reward(kind: str, estimator: str, scaled: str, beta: float) -> tuple[KLPart, list[Change]]:
    changes = []
    if estimator != "rloo":
        changes.append(Change("advantage_estimator", "rloo", estimator, "it has no division by a standard deviation"))
    if scaled != SCALED["rloo"]:
        why = Why.BATCH_STD if scaled == "batch" else Why.GROUP_STD
        changes.append(Change("scale_rewards", "none", scaled, why))
    if kind != "dr_grpo":
        optional = REDUCTIONS[kind] == OVER_TOKENS
        changes.append(Change("loss_type", "dr_grpo", kind, Why.MEAN_OVER_TOKENS if optional else Why.LENGTH, optional))
    name = f"kl_in_reward advantage_estimator={estimator} loss_type={kind}"
    caveat = "" if scaled == "none" else f"Its division by the standard deviation of the {scaled} is left out."
    return part_of("ms-swift", name, InScore(), REDUCTIONS[kind], beta, caveat), changes


def _teacher(settings: dict[str, Any], kind: str) -> KLPart:
    form = InReward("k1", discount=0.0)
    caveat = "ref is the teacher here."
    coefficient = settings["teacher_kl_coef"]
    return part_of("ms-swift", f"teacher loss_type={kind}", form, REDUCTIONS[kind], coefficient, caveat, "advantage")


def _stale(settings: dict[str, Any]) -> tuple[str, ...]:
    steps, accumulated = settings["steps_per_generation"], settings["gradient_accumulation_steps"]
    found = []
    if settings["num_iterations"] > 1:
        found.append(f"num_iterations={settings['num_iterations']}: each batch is used for several updates")
    if steps > accumulated:
        found.append(f"steps_per_generation={steps} above gradient_accumulation_steps={accumulated}: several updates")
    if settings["use_vllm"]:
        found.append("use_vllm=true: vLLM's log-probs differ from those of the trainer")
    return tuple(found)


READER = Reader(
    "ms-swift",
    KNOWN,
    read_config,
    re.compile(r"(swift|megatron) rlhf|(.*/)?swift/cli/rlhf\.py|swift\.cli\.rlhf"),
    beginnings=("rlhf_type",),
    harmless=HARMLESS,
    version="4.6.0",
    source="modelscope/ms-swift: swift/rlhf_trainers/grpo_trainer.py and args_mixin.py, swift/arguments/rlhf_args.py; "
    "read on 2026-11-18",
    flags="_",
)

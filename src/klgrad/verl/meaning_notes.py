"""Settings of verl that change the meaning of the declared KL without being an error: one sentence each."""

from collections.abc import Callable
from typing import Any

from .config_checks import skips_scoring
from .declaration import Declaration

Note = Callable[[Any, Declaration], str | None]


def notes(config: Any, declaration: Declaration) -> list[str]:
    """The sentences that apply to a configuration; they are logged when a run starts."""
    found = (note(config, declaration) for note in NOTES)
    return [sentence for sentence in found if sentence is not None]


def _updates_per_batch(config: Any) -> int:
    actor = config["actor_rollout_ref"]["actor"]
    return actor["ppo_epochs"] * (config["data"]["train_batch_size"] // actor["ppo_mini_batch_size"])


def _old_completions(config: Any, declaration: Declaration) -> str | None:
    mode = config["trainer"]["v1"]["trainer_mode"]
    updates = _updates_per_batch(config)
    if "async" not in mode and updates <= 1:
        return None
    why = f"trainer_mode={mode}" if "async" in mode else f"{updates} updates on each batch"
    if declaration.in_advantage:
        return (
            f"{why}: the KL in the advantages is that of the policy before the update, and later updates descend PPO's "
            "clipped surrogate of it; placement=loss with ratio=prefix evaluates it at every update"
        )
    if declaration.term.weighting is not None:
        return None
    return (
        f"{why} trains on completions that another policy sampled, and ratio=none leaves the KL uncorrected for it; "
        "ratio=prefix corrects it at sequence level, ratio=token on the sampler's prefixes"
    )


def _per_completion(config: Any, declaration: Declaration) -> str | None:
    mode = config["actor_rollout_ref"]["actor"]["loss_agg_mode"]
    if mode != "seq-mean-token-mean" or declaration.settings.reduction != "policy":
        return None
    return (
        f"loss_agg_mode={mode} averages the KL over the tokens of each completion, so that a token of a short "
        "completion counts more, and the gradient is that of no divergence; reduction=sequence with placement=loss, or "
        "loss_agg_mode=token-mean, keeps the declared KL"
    )


def _other_samples(config: Any, declaration: Declaration) -> str | None:
    rollout = config["actor_rollout_ref"]["rollout"]
    neutral = {"top_p": (1, 1.0), "top_k": (-1, 0)}
    changed = [
        f"rollout.{name}={rollout.get(name)}" for name, ok in neutral.items() if rollout.get(name, ok[0]) not in ok
    ]
    if (config["algorithm"].get("filter_groups") or {}).get("enable"):
        changed.append("algorithm.filter_groups.enable=True")
    if not changed:
        return None
    return (
        f"{', '.join(changed)}: completions are not samples of the policy that is trained, so that the KL is an "
        "average over other completions than its own, and `ratio` does not correct for it"
    )


def _entropy(config: Any, declaration: Declaration) -> str | None:
    bonus = config["actor_rollout_ref"]["actor"]["entropy_coeff"]
    if not bonus or not declaration.task_rewards:  # without rewards the whole policy loss is dropped
        return None
    return (
        f"entropy_coeff={bonus:g}: verl adds an entropy bonus to the loss, so that the optimum is not that of the "
        "reward and the KL alone"
    )


def _temperature_of_the_teacher(config: Any, declaration: Declaration) -> str | None:
    temperature = config["actor_rollout_ref"]["rollout"]["temperature"]
    if not declaration.from_teacher or temperature == 1:
        return None
    return (
        f"rollout.temperature={temperature:g}: verl scores the student at this temperature and the teacher at 1, so "
        "that the KL is between these two; set rollout.temperature=1 for the KL of the models as they are"
    )


def _bypass(config: Any, declaration: Declaration) -> str | None:
    if declaration.from_teacher or not skips_scoring(config):
        return None
    return (
        "rollout_correction.bypass_mode=True: the driver has only the log-probs of the rollout engine, so that the KL "
        "that it logs, and by which it adapts β, is that of the engine's policy; the mismatch is not measured"
    )


NOTES: tuple[Note, ...] = (
    _old_completions,
    _per_completion,
    _other_samples,
    _entropy,
    _temperature_of_the_teacher,
    _bypass,
)

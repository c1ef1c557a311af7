"""The KL as a reward function of TRL's, and the reward of a run that has none."""

from typing import Any

from ..errors import MeaningError


def no_reward(completions: list[Any], **_: Any) -> list[float | None]:
    """0 for every completion: the KL is the whole objective, as in distillation."""
    return [0.0] * len(completions)


class KLReward:
    """The place of log π - log ref of each completion among TRL's rewards; TRL subtracts β times it.

    `KLTrainer` fills it in once TRL has called all rewards, so that TRL still sees which completions no reward scored.
    TRL logs its mean as `rewards/kl_to_reference/mean`.
    """

    __name__ = "kl_to_reference"

    def __call__(self, completions: list[Any], **_: Any) -> list[None]:
        """No number yet."""
        return [None] * len(completions)


def listed(given: Any) -> list[Any]:
    """Reward functions or their processing classes as a list, which is empty for None."""
    if given is None:
        return []
    return list(given) if isinstance(given, list) else [given]


def check_weights(weights: list[float] | None, rewards: list[Any]) -> None:
    """Raise `MeaningError` unless there is a weight for each reward function that was given, or none at all."""
    if weights is not None and len(weights) != len(rewards):
        raise MeaningError(
            f"{len(rewards)} `reward_weights`, one for each of `reward_funcs`",
            f"{len(weights)}",
            "give one for each; an environment's own reward has the weight 1"
            if rewards
            else "leave them out: there are no `reward_funcs`, and an environment's own reward has the weight 1",
        )

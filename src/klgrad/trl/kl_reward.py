"""The KL as a reward function of TRL's, and the reward of a run that has none."""

from collections.abc import Callable
from typing import Any


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    """0 for every completion: the KL is the whole objective, as in distillation."""
    return [0.0] * len(completions)


class KLReward:
    """log π - log ref of each completion, at the policy that sampled it; TRL subtracts β times it.

    TRL logs its mean as `rewards/kl_to_reference/mean`.

    Args:
        score: returns the KL of each completion that TRL has just sampled.
    """

    __name__ = "kl_to_reference"

    def __init__(self, score: Callable[[], list[float]]) -> None:
        self._score = score

    def __call__(self, **_: Any) -> list[float]:
        """One number per completion."""
        return self._score()


def listed(reward_funcs: Any) -> list[Any]:
    """Reward functions as a list, which is empty for None."""
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]

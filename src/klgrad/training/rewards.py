"""Reward functions as TRL calls them: found by name, tried before training, and held to finite numbers."""

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from ..audit.loading import find
from ..errors import KlgradError, LossImportError
from .training_errors import RewardError

Reward = Callable[..., Any]

LEFT_OUT = ("prompt", "completion", "completion_ids")
"""Columns of a dataset that TRL does not hand to reward functions."""
TAKEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's own: a column of that name makes TRL fail on its first batch, or is replaced unseen."""


def load_reward(spec: str) -> Reward:
    """`package.module:function` or `path/to/file.py:function`."""
    try:
        found = find(spec)
    except LossImportError as error:
        raise RewardError(error.expected, error.received, error.remedy) from error
    if not callable(found):
        raise RewardError("a reward function", f"{spec}, a {type(found).__name__}", "name a function")
    return found


def guarded(reward: Reward) -> Reward:
    """The same function, whose failures are told with its name, and which gives no NaN."""
    name = name_of(reward)
    if inspect.iscoroutinefunction(reward):

        @wraps(reward)
        async def asked_later(**given: Any) -> list[float | None]:
            try:
                return _checked(name, await reward(**given), given)
            except Exception as error:
                raise _told(name, error) from error

        return asked_later

    def asked(**given: Any) -> list[float | None]:
        try:
            return _checked(name, reward(**given), given)
        except Exception as error:
            raise _told(name, error) from error

    asked.__name__ = name  # TRL logs `rewards/<name>/mean`; an object with a __call__ may have no name
    return asked


def name_of(reward: Reward) -> str:
    """As TRL logs it."""
    return getattr(reward, "__name__", type(reward).__name__)


def _told(name: str, error: Exception) -> KlgradError:
    if isinstance(error, KlgradError):
        return error
    return RewardError(
        f"a number for each completion of reward function {name!r}",
        f"{type(error).__name__}: {error}",
        "mend the function; it is called as TRL does, with `prompts`, `completions`, `completion_ids` and the "
        "dataset's columns by keyword",
    )


def _checked(name: str, values: Any, given: dict[str, Any]) -> list[float | None]:
    """TRL's `None` (not applicable) stays; a tensor becomes numbers."""
    found = [None if value is None else float(value) for value in values]
    wanted = len(given["completions"])
    if len(found) != wanted:
        raise RewardError(
            f"{wanted} rewards of {name!r}", f"{len(found)}", "return one number per completion, in their order"
        )
    for value, completion in zip(found, given["completions"], strict=True):
        if value is not None and not math.isfinite(value):
            raise RewardError(
                f"a finite reward of {name!r}",
                f"{value} for {str(completion)[:80]!r}",
                "return 0, or None to leave it out",
            )
    return found


def probe(rewards: list[Reward], row: dict[str, Any]) -> None:
    """Call each once on a made-up completion of a real prompt, so that a broken one costs no training."""
    from transformers import TrainerState

    text = "0"
    completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
    for reward in rewards:
        found = guarded(reward)(**arguments([row], [completion], [[0]], TrainerState()))
        if inspect.iscoroutine(found):
            import asyncio

            asyncio.run(found)


def arguments(rows: list[dict[str, Any]], completions: list[Any], ids: list[list[int]], state: Any) -> dict[str, Any]:
    """What TRL calls a reward function with: prompts, completions, columns of the dataset, and its own."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in LEFT_OUT}
    own = {"trainer_state": state, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    return {
        **columns,
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": ids,
        **own,
    }

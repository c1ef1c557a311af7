"""Reward functions as TRL calls them: loaded by name, called once before training, checked for finite numbers.

`correct` is the reward of the built-in arithmetic tasks.
"""

import asyncio
import inspect
import math
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from ...audit.loading import find
from ...errors import KlgradError, LossImportError
from ..training_errors import RewardError

Reward = Callable[..., Any]

LEFT_OUT = ("prompt", "completion", "completion_ids")
"""Columns of a dataset that TRL does not pass to reward functions."""
TAKEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")
"""Arguments that TRL passes itself: a column with such a name makes TRL fail on its first batch, or is ignored."""

BOXED = re.compile(r"\\boxed\{\s*(-?\d[\d,]*)")
MARKED = re.compile(r"(?:####|answer\s*(?:is|:|=))\s*\$?(-?\d[\d,]*)", re.IGNORECASE)
WHOLE = re.compile(r"(?<![\w.])-?\d[\d,]*(?!\.?\d)")
"""An integer that is not a part of a word or of a decimal number."""


def text_of(completion: Any) -> str:
    """The text of a completion: a string, or the content of the last message of a chat."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def integer_in(text: str) -> int | None:
    r"""The answer in a text: the last boxed integer, else the last one announced as the answer, else the last one.

    Returns:
        The integer; None if the text has none.

    Example:
        >>> integer_in("7 + 5 = 12, so the answer is 12.")
        12
    """
    for pattern in (BOXED, MARKED, WHOLE):
        found = pattern.findall(text.replace("\u2212", "-"))
        if found:
            return int(found[-1].replace(",", ""))
    return None


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Reward 1 for the right integer and 0 otherwise.

    Example:
        >>> correct(completions=["It is 5", "4"], answer=["5", "5"])
        [1.0, 0.0]
    """
    return [float(integer_in(text_of(c)) == int(a)) for c, a in zip(completions, answer, strict=True)]


def load_reward(spec: str) -> Reward:
    """Import `package.module:function` or `path/to/file.py:function`."""
    try:
        found = find(spec)
    except LossImportError as error:
        raise RewardError(error.expected, error.received, error.remedy) from error
    if not callable(found):
        raise RewardError("a reward function", f"{spec}, a {type(found).__name__}", "name a function")
    return found


def checked(reward: Reward) -> Reward:
    """Wrap a reward function: errors name the function, and a NaN, an infinity or a wrong count is an error."""
    name = name_of(reward)
    if inspect.iscoroutinefunction(reward):

        @wraps(reward)
        async def deferred(**given: Any) -> list[float | None]:
            try:
                return _numbers(name, await reward(**given), given)
            except Exception as error:
                raise _explained(name, error) from error

        return deferred

    def immediate(**given: Any) -> list[float | None]:
        try:
            return _numbers(name, reward(**given), given)
        except Exception as error:
            raise _explained(name, error) from error

    immediate.__name__ = name  # TRL logs `rewards/<name>/mean`; an object with a __call__ may have no name
    return immediate


def name_of(reward: Reward) -> str:
    """The name under which TRL logs a reward."""
    return getattr(reward, "__name__", type(reward).__name__)


def values_of(reward: Reward, arguments: dict[str, Any]) -> list[float | None]:
    """Call a reward function outside of TRL's own loop, and wait for it if it is asynchronous."""
    found = reward(**arguments)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def _explained(name: str, error: Exception) -> KlgradError:
    if isinstance(error, KlgradError):
        return error
    return RewardError(
        f"a number for each completion of reward function {name!r}",
        f"{type(error).__name__}: {error}",
        "correct the function; it is called as TRL does, with `prompts`, `completions`, `completion_ids` and the "
        "dataset's columns by keyword",
    )


def _numbers(name: str, values: Any, given: dict[str, Any]) -> list[float | None]:
    """Convert to floats; None, which means "not applicable" in TRL, is kept."""
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
    """Call each function once on a made-up completion of a real prompt, to find errors before training."""
    from transformers import TrainerState

    text = "0"
    completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
    for reward in rewards:
        values_of(checked(reward), arguments([row], [completion], [[0]], TrainerState()))


def arguments(rows: list[dict[str, Any]], completions: list[Any], ids: list[list[int]], state: Any) -> dict[str, Any]:
    """The keyword arguments with which TRL calls a reward function: its own, and the dataset's columns."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in LEFT_OUT}
    own = {"trainer_state": state, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    return {
        **columns,
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": ids,
        **own,
    }

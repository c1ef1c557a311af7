"""From what a model wrote to the number it means, and to a reward."""

import re
from typing import Any

BOXED = re.compile(r"\\boxed\{\s*(-?\d[\d,]*)")
MARKED = re.compile(r"(?:####|answer\s*(?:is|:|=))\s*\$?(-?\d[\d,]*)", re.IGNORECASE)
WHOLE = re.compile(r"(?<![\w.])-?\d[\d,]*(?!\.?\d)")
"""An integer that is no part of a word or of a decimal number."""


def text_of(completion: Any) -> str:
    """What was written: a string, or the content of the last message."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def integer_in(text: str) -> int | None:
    """The answer meant: boxed, or the last that is announced as one, or the last integer."""
    for pattern in (BOXED, MARKED, WHOLE):
        found = pattern.findall(text.replace("\u2212", "-"))
        if found:
            return int(found[-1].replace(",", ""))
    return None


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the right integer, else 0: a reward function as TRL calls it."""
    return [float(integer_in(text_of(c)) == int(a)) for c, a in zip(completions, answer, strict=True)]

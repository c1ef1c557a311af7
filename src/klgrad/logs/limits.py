"""Limits on the memory for a log, in every format. A file beyond these limits is refused before it is decoded."""

from .log_errors import LogError

LONGEST_ROW = 2**22
"""Largest number of tokens of a completion."""

LONGEST_PROMPT = 2**22
"""Largest size of an identifier in the group column, in bytes."""

LONGEST_LINE = 2**26
"""Largest size of a line of JSON, in bytes."""

MOST_BYTES = 2**26
"""Largest size of the identifiers that are decoded at once, in bytes."""


def too_many_tokens(name: str, tokens: int, place: str) -> LogError:
    """The error for a completion with more than `LONGEST_ROW` tokens."""
    return LogError(
        f"completions of up to {LONGEST_ROW:,} tokens",
        f"{tokens:,} entries of `{name}` in {place}",
        "log one row per completion; shorten a longer one, or write it as several rows",
    )


def too_long_a_prompt(name: str, size: int, place: str) -> LogError:
    """The error for an identifier of more than `LONGEST_PROMPT` bytes."""
    return LogError(
        f"prompts of up to {LONGEST_PROMPT:,} bytes in `{name}`",
        f"{size:,} bytes in {place}",
        "log a number or a hash of the prompt, or leave the column out with --column group=",
    )

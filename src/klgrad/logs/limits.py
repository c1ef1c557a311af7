"""How much of a log is held at a time, in every format. A file beyond these limits is refused before it is decoded."""

from .log_errors import LogError

LONGEST_ROW = 2**22
"""Tokens of a completion."""

LONGEST_PROMPT = 2**22
"""Bytes of an identifier in the group column."""

LONGEST_LINE = 2**26
"""Bytes of a line of JSON."""

MOST_BYTES = 2**26
"""Bytes of identifiers that are decoded at a time."""


def too_many_tokens(name: str, tokens: int, place: str) -> LogError:
    """A completion that is longer than memory is kept for."""
    return LogError(
        f"completions of up to {LONGEST_ROW:,} tokens",
        f"{tokens:,} entries of `{name}` in {place}",
        "log one row per completion; cut a longer one, or write it as several rows",
    )


def too_long_a_prompt(name: str, size: int, place: str) -> LogError:
    """An identifier that is longer than memory is kept for."""
    return LogError(
        f"prompts of up to {LONGEST_PROMPT:,} bytes in `{name}`",
        f"{size:,} bytes in {place}",
        "log a number or a hash of the prompt, or leave the column out with --column group=",
    )

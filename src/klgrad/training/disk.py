"""Failures to write: a disk that is full says so in a different way in every library."""

import errno
import re
from collections.abc import Iterator

from ..errors import KlgradError, OutputError

CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""No space, no quota, a file that is too large, a device that fails, a file system that became read-only."""
TEXTS = re.compile(r"PytorchStreamWriter failed|iostream error|unexpected pos \d+ vs \d+|os error (28|122|27|5|30)\b")
"""How torch and safetensors say it, which raise no `OSError`; torch names no cause."""

DETAIL = 200
"""Characters of another library's message that are repeated."""


def reason(error: BaseException) -> str | None:
    """In a few words, why something could not be written; None if the error is about something else."""
    if isinstance(error, KlgradError) and not isinstance(error, OutputError):
        return None  # explained already
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in CODES:
            return f"{each.strerror} ({each.filename})" if each.filename else str(each.strerror)
        if TEXTS.search(str(each)):
            return f"a file that could not be written whole ({' '.join(str(each).split())[:DETAIL]})"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it came from: torch hides the first one behind a failure to close the file."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__

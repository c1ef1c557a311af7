"""Errors of the libraries underneath, explained in one line: refused settings, and failures to write."""

import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import KlgradError, OutputError
from .training_errors import SettingError

PACKAGE = Path(__file__).parents[1]
SHOW_TRACEBACK = "KLGRAD_TRACEBACK"
"""Environment variable that turns the one-line form off."""

WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""No space, quota exceeded, file too large, input/output error, read-only file system."""
WRITE_MESSAGES = re.compile(
    r"PytorchStreamWriter failed|iostream error|unexpected pos \d+ vs \d+|os error (28|122|27|5|30)\b"
)
"""Messages of torch and safetensors for the same failures, which are not `OSError`s; torch gives no cause."""
DETAIL = 200
"""Characters of another library's message that are repeated."""


@contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """Turn an error raised inside another library into a `SettingError`; errors of this package's code pass through."""
    try:
        yield
    except KlgradError:
        raise
    except Exception as error:
        refused = refusal(error)
        if refused is None:
            raise
        raise refused from error


def refusal(error: Exception) -> SettingError | None:
    """One line for an error that another library raised.

    Returns:
        The error to raise instead; None if this package's own code raised it, or if `KLGRAD_TRACEBACK` is set.
    """
    if isinstance(error, KlgradError) or os.environ.get(SHOW_TRACEBACK):
        return None
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    known = [path for path in frames if "site-packages" in path.parts or path.is_relative_to(PACKAGE)]
    if not known or known[-1].is_relative_to(PACKAGE):
        return None
    parts = known[-1].parts
    library = parts[parts.index("site-packages") + 1].removesuffix(".py")
    text = " ".join(str(error).split())
    return SettingError(
        "settings, a model and data that the libraries underneath accept",
        f"{type(error).__name__} from {library}: {text[:400]}",
        f"change what the message names; {SHOW_TRACEBACK}=1 shows the traceback",
    )


def write_failure(error: BaseException) -> str | None:
    """Why a file could not be written, in a few words; None if the error has another cause."""
    if isinstance(error, KlgradError) and not isinstance(error, OutputError):
        return None  # it has an explanation of its own
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in WRITE_ERRORS:
            return f"{each.strerror} ({each.filename})" if each.filename else str(each.strerror)
        if WRITE_MESSAGES.search(str(each)):
            return f"a file that could not be written whole ({' '.join(str(each).split())[:DETAIL]})"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes: torch hides the first one behind a failure to close the file."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__

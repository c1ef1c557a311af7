"""What TRL, transformers or datasets refuse before a run has trained, as one line instead of a traceback."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import KlgradError
from .training_errors import SettingError

PACKAGE = Path(__file__).parents[1]
SHOW_TRACEBACK = "KLGRAD_TRACEBACK"
"""Environment variable that shows where such an error was raised."""


@contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """Turn an error that a library raises into a `SettingError`. An error raised by this package's own code stays."""
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
    """What to say about a library's error; None if this package raised it, or if a traceback was asked for."""
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
        f"change what it names; {SHOW_TRACEBACK}=1 shows where it was raised",
    )

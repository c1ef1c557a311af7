"""What is done about other libraries: random numbers, errors and messages."""

import errno
import logging
import os
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy
import torch

from ..errors import KlgradError, OutputError, SettingError
from ..support import Json

# Save and restore the global random number generators of Python, NumPy and torch.


def rng_states() -> Json:
    """The state of every generator that training, sampling and reward functions may use."""
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: Json) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def apart_from_rng(seed: int) -> Iterator[None]:
    """Seed all generators inside the block, and restore their states after it.

    Example:
        >>> random.seed(0)
        >>> with apart_from_rng(seed=1):
        ...     inside = random.random()
        >>> first = random.random()
        >>> random.seed(0)
        >>> first == random.random()
        True
    """
    before = rng_states()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_rng_states(before)


# Errors of the libraries underneath, explained in one line: refused settings, and failures to write.

PACKAGE = Path(__file__).parents[1]
SHOW_TRACEBACK = "KLGRAD_TRACEBACK"
"""Environment variable that turns the one-line form off."""

WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""No space, quota exceeded, file too large, input/output error, read-only file system."""
WRITE_MESSAGES = re.compile(
    r"PytorchStreamWriter failed|iostream error|unexpected pos \d+ vs \d+|os error (28|122|27|5|30)\b"
)
"""Messages of torch and safetensors for the same failures, which are not `OSError`s; torch gives no cause."""


def refusal(error: Exception) -> SettingError | None:
    """One line for an error of another library; None for one of this package, or if `KLGRAD_TRACEBACK` is set."""
    if isinstance(error, KlgradError) or os.environ.get(SHOW_TRACEBACK):
        return None
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    known = [path for path in frames if "site-packages" in path.parts or path.is_relative_to(PACKAGE)]
    if not known or known[-1].is_relative_to(PACKAGE):
        return None
    library = known[-1].parts[known[-1].parts.index("site-packages") + 1].removesuffix(".py")
    return SettingError(
        "settings, a model and data that the libraries underneath accept",
        f"{type(error).__name__} from {library}: {' '.join(str(error).split())[:400]}",
        f"change what the message names; {SHOW_TRACEBACK}=1 shows the traceback",
    )


def write_failure(error: BaseException) -> str | None:
    """Why a file could not be written, in a few words; None if the error has another cause."""
    if isinstance(error, KlgradError) and not isinstance(error, OutputError):
        return None  # it has an explanation of its own
    cause: BaseException | None = error
    while cause is not None:  # torch hides the first error behind a failure to close the file
        if isinstance(cause, OSError) and cause.errno in WRITE_ERRORS:
            return f"{cause.strerror} ({cause.filename})" if cause.filename else str(cause.strerror)
        if WRITE_MESSAGES.search(str(cause)):
            return f"a file that could not be written whole ({' '.join(str(cause).split())[:200]})"
        cause = cause.__cause__ or cause.__context__
    return None


# Warnings and log lines of the libraries underneath: each text is shown once, progress bars are switched off.

LIBRARIES = ("transformers", "trl", "accelerate", "torch", "datasets", "huggingface_hub", "peft")
NOT_FOR_USERS = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Python hides these by default: they concern a library's code, and not a run."""
KNOWN = (
    "The tokenizer has new PAD/BOS/EOS tokens",  # transformers aligns the model with the tokenizer, as intended
    "There were missing keys in the checkpoint model loaded: ['lm_head.weight'].",  # tied to the embeddings, not saved
    "`use_cache=True` is incompatible with gradient checkpointing",  # transformers switches the cache off itself
)
"""Beginnings of texts that every run produces, and that need no action by the user."""


@contextmanager
def messages_once(say: Callable[[str], None]) -> Iterator[None]:
    """Pass each distinct warning or log line (from level WARNING on) to `say` once, and show no progress bars."""
    import datasets
    from transformers.utils import logging as transformers_logging

    shown: set[str] = set()

    def once(text: str) -> None:
        text = " ".join(text.split())
        if text not in shown and not text.startswith(KNOWN):
            shown.add(text)
            say(text)

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: once(record.getMessage())
    with warnings.catch_warnings(), ExitStack() as restore:
        warnings.simplefilter("always")
        for category in NOT_FOR_USERS:
            warnings.simplefilter("ignore", category)
        warnings.showwarning = lambda message, *_, **__: once(str(message))
        for logger in map(logging.getLogger, LIBRARIES):
            restore.callback(logger.__dict__.update, handlers=logger.handlers, propagate=logger.propagate)
            restore.callback(logger.setLevel, logger.level)
            logger.handlers, logger.propagate = [handler], False
            logger.setLevel(logging.WARNING)
        if transformers_logging.is_progress_bar_enabled():
            restore.callback(transformers_logging.enable_progress_bar)
        if not datasets.are_progress_bars_disabled():
            restore.callback(datasets.enable_progress_bars)
        transformers_logging.disable_progress_bar()
        datasets.disable_progress_bars()
        yield

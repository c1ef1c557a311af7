"""What is done about other libraries: random numbers, errors and messages."""

import logging
import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy
import torch

from ..errors import KlgradError, SettingError


@contextmanager
def apart_from_rng(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch inside the block, and restore their states after it.

    Example:
        >>> random.seed(0)
        >>> with apart_from_rng(seed=1):
        ...     inside = random.random()
        >>> first = random.random()
        >>> random.seed(0)
        >>> first == random.random()
        True
    """
    python, arrays = random.getstate(), numpy.random.get_state()
    device = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(device):
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


PACKAGE = Path(__file__).parents[1]
SHOW_TRACEBACK = "KLGRAD_TRACEBACK"
"""Environment variable that turns the one-line form of `refusal` off."""


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
            transformers_logging.disable_progress_bar()
        if not datasets.are_progress_bars_disabled():
            restore.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        yield

"""Warnings and log lines of the libraries underneath: each text is shown once, progress bars are switched off."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    shown: set[str] = set()

    def once(text: str) -> None:
        text = " ".join(text.split())
        if text not in shown and not text.startswith(KNOWN):
            shown.add(text)
            say(text)

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        once(str(message))

    with _no_bars(), _logs_to(once), warnings.catch_warnings():
        warnings.simplefilter("always")
        for category in NOT_FOR_USERS:
            warnings.simplefilter("ignore", category)
        warnings.showwarning = show
        yield


class _Handler(logging.Handler):
    def __init__(self, once: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.once = once

    def emit(self, record: logging.LogRecord) -> None:
        self.once(record.getMessage())


@contextmanager
def _logs_to(once: Callable[[str], None]) -> Iterator[None]:
    """Replace the handlers of the libraries' loggers, and restore them afterwards."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    handler = _Handler(once)
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level, propagate, handlers in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


@contextmanager
def _no_bars() -> Iterator[None]:
    import datasets
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown[0]:
            transformers_logging.enable_progress_bar()
        if not shown[1]:
            datasets.enable_progress_bars()

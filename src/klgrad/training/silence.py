"""One voice: what the libraries underneath warn of is said once each, as lines like any other; the rest is silent."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LIBRARIES = ("transformers", "trl", "accelerate", "torch", "datasets", "huggingface_hub", "peft")
NOT_FOR_USERS = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Python hides them outside of tests: they are about code, and not about a run."""
KNOWN = (
    "The tokenizer has new PAD/BOS/EOS tokens",  # transformers aligns the model with the tokenizer, which is meant
    "`use_cache=True` is incompatible with gradient checkpointing",  # transformers switches it off itself
)
"""How texts begin that are right for every run of a command, and that a user can do nothing about."""


@contextmanager
def one_voice(say: Callable[[str], None]) -> Iterator[None]:
    """No progress bars and no log lines while this holds; warnings of ours and of others, each once, through `say`."""
    said: set[str] = set()

    def once(text: str) -> None:
        text = " ".join(text.split())
        if text not in said and not text.startswith(KNOWN):
            said.add(text)
            say(text)

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        once(str(message))

    with _no_bars(), _logs_through(once), warnings.catch_warnings():
        warnings.simplefilter("always")
        for category in NOT_FOR_USERS:
            warnings.simplefilter("ignore", category)
        warnings.showwarning = show
        yield


class _Told(logging.Handler):
    """Warnings of a library's log, as lines."""

    def __init__(self, once: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.once = once

    def emit(self, record: logging.LogRecord) -> None:
        self.once(record.getMessage())


@contextmanager
def _logs_through(once: Callable[[str], None]) -> Iterator[None]:
    """Let the libraries' loggers speak through one handler, from warnings on; then as before."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    handler = _Told(once)
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

"""The surroundings in which TRL's trainers are built and run for an audit: offline, on one thread, without logs."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def restore_accelerate() -> None:
    """Set up accelerate's state where a later configuration of transformers has reset it: all trainers share it."""
    from accelerate import Accelerator
    from accelerate.state import is_initialized

    if not is_initialized():
        Accelerator(cpu=True)


@contextmanager
def offline() -> Iterator[None]:
    """Switch off access to the hub: everything is loaded from a local folder.

    This sets the constant that the hub's client checks. The client reads the environment variable only when it is
    imported, and setting that would affect child processes.
    """
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def one_thread() -> Iterator[None]:
    """Switch off the threads of the tokenizer, which do not help for short prompts, unless the user has set them."""
    name = "TOKENIZERS_PARALLELISM"
    chosen = name in os.environ
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if not chosen:
            del os.environ[name]


@contextmanager
def quietly() -> Iterator[None]:
    """Switch off progress bars, and warnings and logs about settings that are only audited."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    shown, disabled = is_progress_bar_enabled(), logging.root.manager.disable
    disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if shown:
            enable_progress_bar()

"""One voice: the libraries underneath keep silent, and warnings of ours are lines like any other."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def one_voice(say: Callable[[str], None]) -> Iterator[None]:
    """No progress bars, no log lines, no warnings of others while this holds."""
    import datasets
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for name in ("trl", "accelerate", "torch", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        say(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", module=r"klgrad\.", category=UserWarning)
        warnings.showwarning = show
        yield

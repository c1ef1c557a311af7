"""Save and restore the global random number generators of Python, NumPy and torch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def states() -> dict[str, Any]:
    """The state of every generator that training, sampling and reward functions may use."""
    found = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_states(known: dict[str, Any]) -> None:
    """Restore what `states` returned."""
    random.setstate(known["python"])
    numpy.random.set_state(known["numpy"])
    torch.set_rng_state(known["torch"])
    if "cuda" in known:
        torch.cuda.set_rng_state(known["cuda"])


@contextmanager
def apart(seed: int) -> Iterator[None]:
    """Seed all generators inside the block, and restore their states after it.

    Example:
        >>> random.seed(0)
        >>> with apart(seed=1):
        ...     inside = random.random()
        >>> first = random.random()
        >>> random.seed(0)
        >>> first == random.random()
        True
    """
    before = states()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_states(before)

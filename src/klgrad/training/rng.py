"""Random numbers that somebody else may not disturb."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def states() -> dict[str, Any]:
    """Of everything that training, sampling and reward functions draw from."""
    found = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_states(known: dict[str, Any]) -> None:
    """Go on where `states` was called."""
    random.setstate(known["python"])
    numpy.random.set_state(known["numpy"])
    torch.set_rng_state(known["torch"])
    if "cuda" in known:
        torch.cuda.set_rng_state(known["cuda"])


@contextmanager
def apart(seed: int) -> Iterator[None]:
    """Random numbers of their own, from a seed; after it all is as if none had been drawn."""
    before = states()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_states(before)

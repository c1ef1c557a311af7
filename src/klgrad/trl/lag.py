"""Completions that are trained on later than they were sampled, as asynchronous training does."""

import math
from collections import deque
from typing import Any

from .config import KLConfig
from .seam.batch import Batch


class LagQueue:
    """Generation batches that wait until they are `generations` generations old.

    Attributes:
        generations: how many generations a batch waits; 0 for no lag.
    """

    def __init__(self, args: KLConfig) -> None:
        steps = (args.steps_per_generation or 1) * args.num_iterations
        self.generations = math.ceil(args.rollout_lag * args.gradient_accumulation_steps / steps)
        self._waiting: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def exchange(self, fresh: Batch) -> Batch:
        """Add a batch, and return the one to train on: the oldest, once it is old enough.

        Until then the first batch is trained on again, because no other is older.
        """
        self._waiting.append(fresh)
        return self._waiting[0] if len(self._waiting) <= self.generations else self._waiting.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The batches that wait."""
        return {"waiting": list(self._waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these batches."""
        self._waiting = deque(state["waiting"])

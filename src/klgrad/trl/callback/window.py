"""The KL and the mismatch to the sampler on the completions since the last logged row."""

import math

import torch
from torch import Tensor

from ...core.rollout import Rollout
from ...reports.divergence import KLSums, MismatchSums


class Window:
    """Sums over measured steps, so that the standard errors are those of all completions together."""

    def __init__(self) -> None:
        self._sums = KLSums()
        self._mismatch = MismatchSums(ratios=self._sums.ratios)  # the same ratios, accumulated once
        self._numbers: dict[tuple[int, int], int] = {}
        self._last: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self._sums.lengths.rows

    def add(self, step: int, rollout: Rollout, prompt: Tensor, *, of_the_sampler: bool) -> None:
        """Add the completions of one micro-batch of all processes.

        Args:
            step: the number of the update.
            rollout: the completions.
            prompt: (B,) the keys of their prompts; the same prompt at another step is another draw.
            of_the_sampler: whether `behavior_logp` is the sampler's own, and not the policy's before an update.
        """
        keys = ((step, key) for key in prompt.tolist())
        group = torch.tensor([self._numbers.setdefault(key, len(self._numbers)) for key in keys])
        self._sums.add(rollout, group)
        if of_the_sampler and rollout.behavior_logp is not None:
            ends = {"behavior_logp": rollout.behavior_logp}
            self._mismatch.add(Rollout(rollout.logp, rollout.behavior_logp, rollout.mask, **ends), group)
        self._last = {"kl/measured_step": float(step)}

    def metrics(self) -> dict[str, float]:
        """Finite numbers by name; a single prompt has no standard error."""
        found = self._sums.report().metrics()
        if self._mismatch.lengths.rows:
            wanted = ("kl/mismatch", "ratio/token/share_outside_band")
            found |= {name: x for name, x in self._mismatch.report().metrics().items() if name.startswith(wanted)}
        return {name: x for name, x in {**found, **self._last}.items() if math.isfinite(x)}

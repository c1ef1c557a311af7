"""The divergences that a loss may be the gradient of, by name."""

from typing import Literal, NamedTuple

Verdict = Literal[
    "reverse-kl-sequence",
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    "forward-kl-token",
    "forward-kl-sequence",
    "squared-sequence",
    "nothing",
    "unknown",
]
"""The name of a target, `nothing` for a gradient that is zero, or `unknown` for one that is no target's."""


class Descends(NamedTuple):
    """Which target's gradient a loss is, with samples of π and with samples of another policy."""

    on_policy: Verdict
    off_policy: Verdict

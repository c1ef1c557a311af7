"""The names of the verdicts. `klgrad.targets.table` has the record of each."""

from typing import Literal, NamedTuple

TargetName = Literal[
    "reverse-kl-sequence",
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    "forward-kl-token",
    "forward-kl-token-sampler",
    "forward-kl-sequence",
    "k3-token",
    "squared-token",
    "squared-sequence",
    "forward-kl-sampler-sequence",
    "forward-kl-sampler-token",
    "reverse-kl-sampler-sequence",
    "reverse-kl-sampler-token",
    "reverse-kl-sampler-token-sampler",
]
"""The objectives whose gradient a loss may have.

A name has up to four parts: the divergence; `sampler` for one between π and the sampler instead of π and ref; the
level; and again `sampler` for the token level at the prefixes that the sampler visits instead of those of π.
"""

Verdict = Literal[
    TargetName,
    "climbs reverse-kl-sequence",
    "climbs reverse-kl-token",
    "climbs reverse-kl-token-sampler",
    "climbs forward-kl-token",
    "climbs forward-kl-token-sampler",
    "climbs forward-kl-sequence",
    "climbs k3-token",
    "climbs squared-token",
    "climbs squared-sequence",
    "climbs forward-kl-sampler-sequence",
    "climbs forward-kl-sampler-token",
    "climbs reverse-kl-sampler-sequence",
    "climbs reverse-kl-sampler-token",
    "climbs reverse-kl-sampler-token-sampler",
    "nothing",
    "sum-of-targets",
    "unknown",
]
"""What a loss does: it descends a target (the name alone), or it climbs one. `nothing` is a zero gradient,
`sum-of-targets` the sum of two targets, which the audit names beside it, and `unknown` none of these."""

Role = Literal["reverse", "forward", "sampler", "climbs", "nothing", "sum", "unknown"]
"""Decides how a target is drawn: `klgrad.audit.render.roles` has the colour, icon and terminal style of each role."""


class Descends(NamedTuple):
    """The targets whose gradient a loss has, with samples from π and with samples from another policy."""

    on_policy: Verdict
    off_policy: Verdict

"""Read what a docstring claims its gradient to be."""

import re
from typing import NamedTuple

SECTIONS = ("Estimates:", "Gradient:", "Requires:")


class Claim(NamedTuple):
    on_policy: str
    off_policy: str
    scale: float | None
    holds: str


def gradient_section(doc: str) -> str:
    """The text between `Gradient:` and `Requires:`, on one line."""
    missing = [section for section in SECTIONS if section not in doc]
    assert not missing, f"docstring lacks {missing}:\n{doc}"
    return " ".join(doc.split("Gradient:")[1].split("Requires:")[0].split())


def on_and_off_policy(doc: str) -> Claim:
    """A Gradient line of the form "`x` on-policy[ (in large batches)][, at scale s]; `y` off-policy"."""
    line = gradient_section(doc)
    verdict = r"`([a-z0-9 -]+)`"
    found = re.match(rf"{verdict} on-policy( \(in large batches\))?(?:, at scale ([^;]+))?; {verdict} off-policy", line)
    assert found, f"cannot read: {line}"
    on, large, scale, off = found.groups()
    number = {None: 1.0, "1/2": 0.5, "1 - 1/n": None}[scale]
    return Claim(on, off, None if large else number, "large-batches" if large else "always")


def as_a_loss(doc: str) -> str:
    """A Gradient line of the form "as a loss `x` ..."."""
    found = re.match(r"as a loss `([a-z0-9 -]+)`", gradient_section(doc))
    assert found, f"cannot read: {gradient_section(doc)}"
    return found.group(1)

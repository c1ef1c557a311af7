"""Read what a docstring claims its gradient to be."""

import re
from typing import NamedTuple

SECTIONS = ("Estimates:", "Gradient:", "Requires:")


class Claim(NamedTuple):
    on_policy: str
    off_policy: str
    scale: float | None


def gradient_section(doc: str) -> str:
    """The text between `Gradient:` and `Requires:`, on one line."""
    missing = [section for section in SECTIONS if section not in doc]
    assert not missing, f"docstring lacks {missing}:\n{doc}"
    return " ".join(doc.split("Gradient:")[1].split("Requires:")[0].split())


def on_and_off_policy(doc: str) -> Claim:
    """A Gradient line of the form "`x` on-policy[, at scale s]; `y` off-policy"."""
    line = gradient_section(doc)
    found = re.match(r"`([a-z-]+)` on-policy(?:, at scale ([^;]+))?; `([a-z-]+)` off-policy", line)
    assert found, f"cannot read: {line}"
    on, scale, off = found.groups()
    return Claim(on, off, {None: 1.0, "1/2": 0.5, "1 - 1/n": None}[scale])


def as_a_loss(doc: str) -> str:
    """A Gradient line of the form "as a loss `x` ..."."""
    found = re.match(r"as a loss `([a-z-]+)`", gradient_section(doc))
    assert found, f"cannot read: {gradient_section(doc)}"
    return found.group(1)

"""The Jinja environment of the HTML page: templates with autoescape, and filters for text that may break over lines."""

import math
import re
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ...targets import TARGETS
from .roles import LOOKS

SEAMS = re.compile(r"(?<=[_=.:])(?=\w)")
"""Where a name of a setting or a function may break over lines."""

CODE_SEAMS = re.compile(r"(?<=[=.])(?=\w)")
"""Where a word of configuration may break."""

PHONE = 36
"""Characters of code that fit a phone; only longer words are broken."""


@cache
def environment() -> Environment:
    """The environment, loaded once."""
    found = Environment(
        loader=PackageLoader("klgrad.audit.render"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters.update(breakable=breakable, code_words=code_words, number=number)
    found.globals.update(LOOKS=LOOKS, TARGETS=TARGETS)
    return found


def number(x: float | None, digits: int = 3) -> str:
    """A number for a reader; a dash for what is not a finite number."""
    if x is None or not math.isfinite(x):
        return "–"
    return f"{x:.{digits}g}".replace("-", "−")


def breakable(text: str) -> Markup:
    """The escaped text, with optional line breaks inside long names."""
    return Markup("<wbr>").join(SEAMS.split(text))


def code_words(lines: str) -> Markup:
    """Escaped lines to copy; a narrow page breaks them between words, and long words at `=` and dots."""
    return Markup("").join(_code_word(word) for word in re.split(r"([ \n]+)", lines))


def _code_word(word: str) -> Markup:
    parts = CODE_SEAMS.split(word) if len(word) > PHONE else [word]
    return Markup("<wbr>").join(map(_unbroken, parts))


def _unbroken(part: str) -> Markup:
    """A browser would break `--flag` after its hyphens."""
    if "-" in part and len(part) <= PHONE:
        return Markup('<span class="whole">{}</span>').format(part)
    return escape(part)

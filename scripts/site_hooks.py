"""Hooks of mkdocs: formulae become MathML, which browsers draw by themselves, and nothing comes from other hosts."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
"""What pymdownx.arithmatex makes of `$...$` and of `$$...$$`."""

FOREIGN = re.compile(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//|<link[^>]* href="(?:https?:)?//[^>]*stylesheet')


def on_page_content(html: str, **_: Any) -> str:
    """Replace every formula of a page. One that is not understood is an error, and the build fails."""
    return FORMULA.sub(_mathml, html)


def _mathml(found: re.Match[str]) -> str:
    formula, display = unescape(found[3]).strip(), "block" if found[2] == "[" else "inline"
    mathml = convert(formula, display=display)
    if "\\" in mathml or formula.count("{") != formula.count("}"):  # the converter copies what it does not know
        raise ValueError(f"a formula that cannot be converted: {formula}")
    return mathml


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads a file from another host: the site must work without a network."""
    if found := FOREIGN.search(output):
        raise ValueError(f"{page.file.src_uri} loads a file from another host: {found[0]}")
    return output

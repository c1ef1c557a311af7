"""Hooks of mkdocs: formulae become MathML, which browsers draw by themselves, and nothing comes from other hosts."""

import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path

import notebooks
import playground

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
"""What pymdownx.arithmatex makes of `$...$` and of `$$...$$`."""

CELL = re.compile(r"<t([dh])[ >].*?</t\1>", re.DOTALL)
NUMBER = re.compile(r"<td>(?=(?:<strong>)?(?:[+-]?\d[^<a-z]{0,16}[a-z%]{0,3})?(?:</strong>)?</td>)")
"""The begin of a cell with nothing but a number, or with nothing."""
CODE = re.compile(r"(?<=<code>)[^<]*")
EXPONENT = re.compile(r"(?<=\de)-(?=\d)")
PARTED = re.compile(r"(?<=±) |(?<=\d) (?=ms|s\b|GiB|MiB)")

MOVED = {
    "callback": "logs.html#klcallback",
    "convert": "terms.html#convert-a-coefficient",
    "policy-losses": "frameworks.html#whole-policy-losses",
    "statistics": "logs.html#standard-errors",
    "experiments/baselines": "reward-and-kl.html#the-untrained-model",
    "experiments/degenerate-distillation": "distillation.html#when-distillation-is-degenerate",
    "experiments/discount": "distillation.html#a-discounted-future",
    "experiments/distillation-far": "distillation.html#far-from-the-teacher",
    "experiments/groups-without-spread": "division.html#what-the-division-breaks",
    "experiments/grpo-losses": "places.html#grpos-losses",
    "experiments/k1-on-stale-samples": "stale-completions.html#a-law-for-k1-as-a-loss",
    "experiments/long-runs": "reward-and-kl.html#long-runs",
    "experiments/reuse": "stale-distillation.html#repeated-batches",
    "experiments/reward-at-equal-kl": "reward-and-kl.html#reward-at-equal-kl",
}
"""Pages that became a part of another one: from the old address, without its ending, to the new one beside it."""

FOREIGN = re.compile(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//|<link[^>]* href="(?:https?:)?//[^>]*stylesheet')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the playground needs beside its own files, and the notebooks as pages."""
    generated = {"data.js": playground.data_script().encode(), **playground.plotting_files()}
    for name, content in generated.items():
        files.append(File.generated(config, f"assets/playground/{name}", content=content))
    for name, text in notebooks.pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link to the page of a notebook, where a repository shows the notebook itself."""
    return markdown.replace(".ipynb)", ".md)")


def on_page_content(html: str, **_: Any) -> str:
    """Replace every formula of a page, and say where the cells of its tables may break.

    A formula that is not understood is an error, and the build fails.
    """
    return CELL.sub(_breakable, FORMULA.sub(_mathml, html))


def _breakable(cell: re.Match[str]) -> str:
    """A number keeps its error or its unit beside it, a divergence breaks after its bars, and code after = and _."""
    text = NUMBER.sub('<td class="number">', PARTED.sub("\u00a0", cell[0])).replace("‖", "‖<wbr>")
    text = EXPONENT.sub("-\u2060", text)
    return CODE.sub(lambda code: re.sub("([=_])", r"\1<wbr>", code[0]), text)


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


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Leave at the address of a page that moved a page that leads to its new place."""
    for old, new in MOVED.items():
        page, anchor = new.split("#")
        target = Path(config.site_dir, old).parent / page
        if f'id="{anchor}"' not in target.read_text(encoding="utf-8"):
            raise ValueError(f"{old} has moved to {new}, which does not exist")
        refresh = f'<meta http-equiv="refresh" content="0; url={new}">'
        text = f'<!doctype html><title>Moved</title>{refresh}<a href="{new}">Moved</a>\n'
        Path(config.site_dir, f"{old}.html").write_text(text, encoding="utf-8")

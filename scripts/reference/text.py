"""Markdown that several of the generated pages share."""

import ast
import inspect
import re
from collections.abc import Iterable
from functools import cache
from textwrap import dedent
from types import ModuleType

from klgrad.audit import AuditResult, audit, catalogue
from klgrad.audit.advice import findings
from klgrad.audit.sentences import report
from klgrad.core.term import Piece
from klgrad.targets import TARGETS, Verdict

GENERATED = (
    "*`make readme` writes this page from the docstring and the audit. The sums are exact: no seeds, no spread.*"
)


@cache
def audited(name: str) -> AuditResult:
    """The audit of a loss of the catalogue."""
    return audit(catalogue()[name])


def sections(doc: str) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and the texts of Estimates, Gradient and Requires."""
    text = inspect.cleandoc(doc)
    found = re.findall(r"^(Estimates|Gradient|Requires):(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(text.split("\n\n")[0].split()), {name: " ".join(body.split()) for name, body in found}


def definition(doc: str) -> str:
    """What is estimated, which gradient it has, and what it requires, as a table."""
    _, found = sections(doc)
    return table(("", ""), ((f"**{name}**", text) for name, text in found.items()))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    cells = (" | ".join(map(_cell, row)) for row in rows)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {row} |" for row in cells)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """The text with its bars escaped, except in code: the |l| of a formula would end the cell."""
    return re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or r"\|", text)


def source_of(function: str, module: ModuleType) -> str:
    """The code of a function of a module, without decorators and docstring."""
    tree = ast.parse(inspect.getsource(module))
    node = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == function)
    lines = inspect.getsource(module).splitlines()
    body = node.body[1].lineno - 1
    return dedent("\n".join([*lines[node.lineno - 1 : node.body[0].lineno - 1], *lines[body : node.end_lineno]]))


def link_to_target(verdict: Verdict, folder: str = "../targets/") -> str:
    """A link to the page of a verdict; one that climbs has the page of its target."""
    target = TARGETS[verdict]
    return f"[{target.phrase}]({folder}{target.climbed or target.name}.md)"


def verdict_table(name: str) -> str:
    """What the audit finds, a row for each column of its table that is not empty."""
    result = audited(name)
    rows = [
        (label.capitalize(), f"`{text}`" if label == "coefficient" else text) for label, text in report(result.anatomy)
    ]
    if result.variance is not None and result.variance_near is not None:
        rows.append(("Variance", f"{result.variance:.3g}; {result.variance_near:.3g} near ref"))
    rows += [("Notes", "; ".join(findings(result)))] if findings(result) else []
    return table(("", f"`klgrad audit {name}`"), rows)


def as_markdown(pieces: Iterable[Piece]) -> str:
    """Pieces of a text, with code between backticks."""
    return "".join(f"`{piece.text}`" if piece.is_code else piece.text for piece in pieces)

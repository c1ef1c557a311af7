"""What the README and the pages of docs/ contain: blocks of code, inline code and commands."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^(<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:[^`\n]|\n(?!\n))+)`")
NOT_RUN = "not run here: "
"""Begins the comment before a block that is not run, and is followed by the place where it is."""


class Fence(NamedTuple):
    page: str
    line: int
    language: str
    mark: str
    code: str


def name_of(path):
    return str(path.relative_to(ROOT))


def fences(path):
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Fence(name_of(path), line, found["language"], found["mark"] or "", found["code"])


def inline(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return [" ".join(span.split()) for span in INLINE.findall(text)]


def lines_of_code(path):
    """Lines of blocks that are no Python, and inline code; without prompts."""
    for fence in fences(path):
        if fence.language != "python":
            yield from (line.removeprefix("$ ") for line in fence.code.splitlines())
    yield from inline(path)


def commands(program, pages=PAGES):
    """Calls of a program, as lists of arguments, with the pages that have them."""
    found = {}
    for path in pages:
        for line in lines_of_code(path):
            for part in re.split(r" && | \| ", line):
                if part == program or part.startswith(f"{program} "):
                    plain = part.replace("[", "").replace("]", "").removesuffix("\\")  # continued on the next line
                    arguments = tuple(shlex.split(plain, comments=True)[1:])
                    found.setdefault(arguments, []).append(name_of(path))
    return found

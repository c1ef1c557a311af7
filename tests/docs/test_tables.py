"""Every row of a table has as many cells as its heading: a bar in a formula would end a cell."""

import re

import pytest
from docs.pages import PAGES, name_of

CODE = re.compile(r"`[^`]*`")
BAR = re.compile(r"(?<!\\)\|")
RULE = re.compile(r"\|[-:| ]+\|")


def uneven(text):
    """The rows whose number of bars differs from that of the rule below the heading."""
    bars, found = None, []
    for line in text.splitlines():
        if RULE.fullmatch(line):
            bars = line.count("|")
        elif not line.startswith("|"):
            bars = None
        elif bars is not None and len(BAR.findall(CODE.sub("", line))) != bars:
            found.append(line)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_rows_of_a_table_have_the_cells_of_its_heading(page):
    assert not uneven(page.read_text(encoding="utf-8"))


def test_a_bar_in_a_cell_is_found():
    table = "| a | b |\n|---|---|\n| 1 | {} |\n"
    assert not uneven(table.format(r"\|l\| and `x|y`"))
    assert uneven(table.format("|l|"))

"""The overview in a terminal: nothing is cut off, at any width."""

from io import StringIO

import pytest
from rich.console import Console

from klgrad import zoo
from klgrad.audit import audit
from klgrad.audit.terminal import by_standing, cells_of, overview

NAMES = ("k1-loss", "k2-loss-token-mean", "k3-loss-clamped", "k3-reward", "k1-reward-leave-one-out")


@pytest.fixture(scope="module")
def results():
    return [audit(zoo.get(name)) for name in NAMES]


def printed(report, width):
    file = StringIO()
    Console(width=width, file=file, color_system=None).print(report)
    return file.getvalue()


def words(text):
    return "".join(text.split())


@pytest.mark.parametrize("width", [80, 120, 160])
@pytest.mark.parametrize("layout", [by_standing, overview])
def test_every_name_verdict_and_note_is_there(results, layout, width):
    text = printed(layout(results, width), width)
    assert max(map(len, text.splitlines())) <= width
    for r in results:
        alone = words(printed(layout([r], width), width))
        for column in cells_of(r):
            # A cell may continue on the next line, beside other cells: so its words are looked for one by one.
            assert all(word in alone for word in column.split()), column
        assert r.name in text


def test_a_tag_stands_beside_its_name(results):
    assert "k1-loss (default)" in printed(overview(results, 160, tags={"k1-loss": "default"}), 160)

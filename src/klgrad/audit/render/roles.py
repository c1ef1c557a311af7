"""How a target is drawn: colour, icon and terminal style, by role."""

from dataclasses import dataclass

from ...targets import TARGETS, Role, Verdict


@dataclass(frozen=True)
class Look:
    """The look of a role. Its colour on the page is the CSS variable of the same name in `page.css`.

    Attributes:
        label: the heading of its column.
        icon: SVG paths in a box of 16 x 16; the shapes differ, so that they can be read without colour.
        style: the rich style of its name in a terminal.
    """

    label: str
    icon: tuple[str, str]
    style: str


LOOKS: dict[Role, Look] = {
    # A tick in a circle.
    "reverse": Look(
        "reverse KL", ("M8 .5a7.5 7.5 0 1 0 0 15a7.5 7.5 0 1 0 0-15z", "M4.4 8.3l2.5 2.5 4.7-5.4"), "green"
    ),
    # An arrow in a diamond.
    "forward": Look("forward KL", ("M8 .3L15.7 8 8 15.7.3 8z", "M4.8 8h6M8.4 5.4L11 8l-2.6 2.6"), "magenta"),
    # A clock: the sampler is an older policy.
    "sampler": Look("to the sampler", ("M8 .5a7.5 7.5 0 1 0 0 15a7.5 7.5 0 1 0 0-15z", "M8 4v4.4l3 1.8"), "cyan"),
    # An arrow up in a house.
    "climbs": Look("climbs", ("M8 .6L15 6v9.4H1V6z", "M8 12.4V6M5.2 8.6L8 5.8l2.8 2.8"), "red"),
    # A cross in a square with round corners.
    "nothing": Look(
        "nothing",
        ("M3 1h10a2 2 0 0 1 2 2v10a2 2 0 0 1-2 2H3a2 2 0 0 1-2-2V3a2 2 0 0 1 2-2z", "M5 5l6 6M11 5l-6 6"),
        "bold red",
    ),
    # A plus sign in a hexagon.
    "sum": Look("a sum of two", ("M4.2 1.2h7.6L15.6 8l-3.8 6.8H4.2L.4 8z", "M8 4.6v6.8M4.6 8h6.8"), "yellow"),
    # An exclamation mark in a triangle.
    "unknown": Look("unknown", ("M8 .8L15.8 15H.2z", "M8 5.6v4.6M8 12v1.2"), "bold yellow"),
}


def look_of(verdict: Verdict) -> Look:
    """How a verdict is drawn."""
    return LOOKS[TARGETS[verdict].role]

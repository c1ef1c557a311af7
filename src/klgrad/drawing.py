"""Figures as files, and the colours and markers of all figures."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .support import write_whole

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


# Write figures: one resolution, one look and one set of formats for every command and page.

DPI = 200
KINDS = ("png", "svg")
SALT: dict[Any, Any] = {"svg.hashsalt": "klgrad"}
"""A setting of matplotlib that makes the names in an SVG file the same each time."""
UNDATED = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def look(font_size: float) -> dict[Any, Any]:
    """Settings of matplotlib, to draw with."""
    return {"font.size": font_size, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG and as SVG, beside each other.

    Args:
        figure: what to write.
        path: the file of one of the formats; the other has the same name with its own ending.
    """
    for kind in KINDS:
        write_whole(path.with_name(f"{path.stem}.{kind}"), content(figure, kind))


def content(figure: "Figure", kind: str) -> bytes:
    """The file of a figure, the same bytes for the same figure: without the date.

    Args:
        figure: what to write; its ticks are labelled by plain numbers, where it has no labels of its own.
        kind: `png`, `svg` or `pdf`.

    Returns:
        The bytes of the file.
    """
    from matplotlib import rc_context

    for axes in figure.get_axes():
        _label_ticks(axes.xaxis)
        _label_ticks(axes.yaxis)
    with rc_context(SALT):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=UNDATED[kind])
    return _with_few_colours(buffer) if kind == "png" else buffer.getvalue()


def _label_ticks(axis: "Axis") -> None:
    """Plain numbers: 0.001, and not 10⁻³ or 1 with 1e-3 above the axis."""
    from matplotlib.ticker import LogFormatter, LogFormatterSciNotation, ScalarFormatter

    base = getattr(axis.get_transform(), "base", 10)

    class Plain(LogFormatter):
        """LogFormatter decides which ticks have a label, which matters for those between the powers."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return plain_number(x, base=base) if super().__call__(x, pos) else ""

    for formatter, use in (
        (axis.get_major_formatter(), axis.set_major_formatter),
        (axis.get_minor_formatter(), axis.set_minor_formatter),
    ):
        if isinstance(formatter, LogFormatterSciNotation):  # the default of a logarithmic axis
            use(Plain(base=base, labelOnlyBase=formatter.labelOnlyBase))
        elif isinstance(formatter, ScalarFormatter):
            formatter.set_scientific(False)
            formatter.set_useOffset(False)


def plain_number(x: float, *, base: float = 10) -> str:
    """A number as a reader would write it.

    Args:
        x: the number.
        base: of the axis; powers of two below 1 are written as fractions.

    Returns:
        The text.

    Example:
        >>> [plain_number(x) for x in (0.001, 30, 10_000, 1e-16)], plain_number(2**-8, base=2)
        (['0.001', '30', '10,000', '1e-16'], '1/256')
    """
    if base == 2 and 0 < x < 1 and (1 / x).is_integer():
        return f"1/{1 / x:.0f}"
    if x == 0 or 1e-5 < abs(x) < 1e7:
        return f"{x:,.10f}".rstrip("0").rstrip(".")
    mantissa, _, exponent = f"{x:.5e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _with_few_colours(picture: io.BytesIO) -> bytes:
    """The PNG with a palette of 256 colours: a third of the size, and the same to the eye."""
    from PIL import Image

    small = io.BytesIO()
    colours = Image.open(picture).convert("RGB")
    # Not MAXCOVERAGE, which gives two pale bands one colour; `kmeans` moves each colour to the mean of its pixels.
    colours = colours.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.NONE)
    colours.save(small, "PNG", optimize=True, dpi=(DPI, DPI))
    return small.getvalue()


# The colour and line style of each estimator, the same in every figure.
#
# The colours are those of Okabe and Ito, which people with colour blindness can distinguish; the line styles differ for
# prints in grey.

BLACK, GREY = "#000000", "#7F7F7F"
ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"

STYLES: dict[str, tuple[str, str, str]] = {
    "exact": (BLACK, "-", "analytic"),
    "k1-reward": (GREEN, "-", "vanilla (k1 in reward)"),
    "k1-reward-leave-one-out": (BLUE, "-", "vanilla, leave-one-out"),
    "k1-reward-optimal-baseline": (PURPLE, "-", "vanilla, baseline v*"),
    "k1-advantage": (PURPLE, "-", "k1 advantage"),
    "k2-loss": (SKY, "--", "squared (k2 as loss)"),
    "k1-loss": (GREY, ":", "vanilla incorrect (k1 as loss)"),
    "k3-loss": (ORANGE, "-", "variance reduced incorrect (k3 as loss)"),
    "k3-loss-clamped": (VERMILION, "--", "k3 loss clamped"),
    "k3-reward": (VERMILION, "-.", "k3 in reward"),
    "k1-both": (BLUE, ":", "k1 in both"),
    "k3-both": (PURPLE, ":", "k3 in both"),
    "token": (SKY, "--", "token"),
    "to-go": (PURPLE, "-", "to go"),
    "to-go-leave-one-out": (BLUE, "--", "to go leave one out"),
    "k1-k3": (PURPLE, "--", "k1 k3"),
    "exact-leave-one-out": (BLACK, "--", "exact leave one out"),
    "discount": (VERMILION, "-", "discount"),
    "ratio-k3-loss": (PURPLE, "-", "ratio k3 loss"),
    "influence-bound": (BLUE, "-", "influence bound"),
    "k1": (GREEN, "-", "vanilla (k1)"),
    "k2": (SKY, "--", "squared (k2)"),
    "k3": (ORANGE, "-", "variance reduced (k3)"),
}
"""Colour, line and name in the legend."""


def style(name: str) -> dict[str, Any]:
    """The look of an estimator.

    Returns:
        Keyword arguments for matplotlib's `plot`.

    Example:
        >>> style("k1")
        {'color': '#009E73', 'linestyle': '-', 'label': 'vanilla (k1)'}
    """
    colour, line, label = STYLES[name]
    return {"color": colour, "linestyle": line, "label": label}

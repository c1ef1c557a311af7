"""Every figure has one resolution, two formats and plain numbers at its ticks."""

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from klgrad.drawing import DPI, content, plain_number, write_figure


def drawn(scale="log", base=10, top=1e-6):
    figure = Figure(figsize=(4, 3), layout="constrained")
    axis = figure.subplots()
    axis.plot([1, 2, 3], [top, 10 * top, 100 * top])
    axis.set_yscale(scale, **({"base": base} if scale == "log" else {}))
    return figure


def labels(figure):
    content(figure, "png")
    return [text.get_text() for text in figure.get_axes()[0].get_yticklabels()]


def test_both_formats_lie_beside_each_other_and_are_the_same_each_time(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_figure(drawn(), tmp_path / folder / "theorem-5.1.png")
    files = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in "ab"]
    assert files == [["theorem-5.1.png", "theorem-5.1.svg"]] * 2
    for name in files[0]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with Image.open(tmp_path / "a" / "theorem-5.1.png") as picture:
        assert picture.size == (4 * DPI, 3 * DPI)


def test_ticks_are_plain_numbers():
    found = labels(drawn(top=0.001))
    assert {"0.001", "0.01", "0.1"} <= set(found)
    assert not any("$" in text or "10^" in text for text in found)
    assert "1/64" in labels(drawn(base=2, top=1 / 64))


def test_a_linear_axis_has_no_factor_above_it():
    figure = drawn(scale="linear", top=1e-6)
    assert "0.0001" in "".join(labels(figure))
    assert figure.get_axes()[0].yaxis.get_offset_text().get_text() == ""


def test_labels_of_a_figure_are_kept():
    figure = drawn()
    figure.get_axes()[0].set_yticks([1e-6, 1e-5], ["low", "high"])
    assert labels(figure) == ["low", "high"]


@pytest.mark.parametrize(
    ("x", "text"), [(0, "0"), (1e6, "1,000,000"), (0.25, "0.25"), (1e-4, "0.0001"), (3e-16, "3e-16"), (2e8, "2e8")]
)
def test_a_number_in_plain_text(x, text):
    assert plain_number(x) == text


def test_a_pale_band_keeps_its_colour():
    figure = Figure(figsize=(4, 3))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()
    for i, colour in enumerate(("#0072B2", "#009E73", "#56B4E9")):
        axis.axhspan(i, i + 1, color=colour, alpha=0.15, lw=0)
    axis.scatter(range(300), [x % 3 for x in range(300)], c=range(300), cmap="turbo", s=2)  # hundreds of colours
    axis.set(ylim=(0, 3), xlim=(0, 299))
    exact = io.BytesIO()
    figure.savefig(exact, dpi=DPI)
    pictures = [np.asarray(Image.open(x).convert("RGB"), int) for x in (io.BytesIO(content(figure, "png")), exact)]
    given, wanted = (picture[[100, 300, 500], 333] for picture in pictures)
    assert abs(given - wanted).max() <= 2

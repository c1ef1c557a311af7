"""The colour and line style of each estimator, the same in every figure.

The colours are those of Okabe and Ito, which people with colour blindness can distinguish; the line styles differ for
prints in grey.
"""

from typing import Any

BLACK, GREY = "#000000", "#7F7F7F"
ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"

STYLES: dict[str, tuple[str, Any]] = {
    "exact": (BLACK, "-"),
    "k1-reward": (GREEN, "-"),
    "k1-reward-leave-one-out": (BLUE, "-"),
    "k1-reward-optimal-baseline": (PURPLE, "-"),
    "k1-advantage": (PURPLE, "-"),
    "k2-loss": (SKY, "--"),
    "k1-loss": (GREY, ":"),
    "k3-loss": (ORANGE, "-"),
    "k3-loss-clamped": (VERMILION, "--"),
    "k3-reward": (VERMILION, "-."),
    "k1-both": (BLUE, ":"),
    "k3-both": (PURPLE, ":"),
    "token": (SKY, "--"),
    "to-go": (PURPLE, "-"),
    "to-go-leave-one-out": (BLUE, "--"),
    "k1-k3": (PURPLE, "--"),
    "exact-leave-one-out": (BLACK, "--"),
    "discount": (VERMILION, "-"),
    "ratio-k3-loss": (PURPLE, "-"),
    "influence-bound": (BLUE, "-"),
    "k1": (GREEN, "-"),
    "k2": (SKY, "--"),
    "k3": (ORANGE, "-"),
}

NAMES = {
    "exact": "analytic",
    "k1-reward": "vanilla (k1 in reward)",
    "k1-reward-leave-one-out": "vanilla, leave-one-out",
    "k1-reward-optimal-baseline": "vanilla, baseline v*",
    "k2-loss": "squared (k2 as loss)",
    "k1-loss": "vanilla incorrect (k1 as loss)",
    "k3-loss": "variance reduced incorrect (k3 as loss)",
    "k3-reward": "k3 in reward",
    "k1-both": "k1 in both",
    "k3-both": "k3 in both",
    "k1": "vanilla (k1)",
    "k2": "squared (k2)",
    "k3": "variance reduced (k3)",
}


def style(name: str) -> dict[str, Any]:
    """The look of an estimator.

    Returns:
        Keyword arguments for matplotlib's `plot`.

    Example:
        >>> style("k1")
        {'color': '#009E73', 'linestyle': '-', 'label': 'vanilla (k1)'}
    """
    colour, line = STYLES[name]
    return {"color": colour, "linestyle": line, "label": NAMES.get(name, name.replace("-", " "))}

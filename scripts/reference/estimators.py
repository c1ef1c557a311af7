"""A page for each estimator: its value and its slope, and what it descends in each place."""

import torch

from klgrad.audit.sentences import summary
from klgrad.core import estimators
from klgrad.core.estimators import Estimator
from klgrad.zoo import CELLS

from .text import GENERATED, audited, definition, sections, table

SHOWN: dict[str, tuple[Estimator, str, str]] = {
    "k1": (estimators.k1, "l", "1"),
    "k2": (estimators.k2, r"\frac{1}{2} l^2", "l"),
    "k3": (estimators.k3, "e^{-l} - 1 + l", "1 - e^{-l}"),
    "k_lambda": (estimators.k_lambda(0.5), r"l + \lambda (e^{-l} - 1)", r"1 - \lambda e^{-l}"),
    "forward_k3": (estimators.forward_k3, "e^{-l} (e^{l} - 1 - l)", "l e^{-l}"),
}
"""Each estimator with its value and its slope as formulae. `k_lambda` is shown at λ = 1/2."""

AT = (-4.0, -1.0, -0.1, 0.0, 0.1, 1.0, 4.0)
"""The log-ratios of the table."""

INDEX = """# Estimators

An estimator is a function of the log-ratio l = log π - log ref of one sampled token. Its *value* estimates a
divergence. Its *slope* is the factor that autograd puts on the score ∇log π of the token. The slope decides what the
estimator descends as a loss, and that is usually another divergence than the one that the value estimates.

"""


def pages() -> dict[str, str]:
    """The index and a page for each estimator."""
    rows = [
        (f"[{name}]({name}.md)", f"${value}$", f"${slope}$", sections(one.__doc__ or "")[1]["Estimates"])
        for name, (one, value, slope) in SHOWN.items()
    ]
    index = f"{INDEX}{table(('estimator', 'value', 'slope', 'the value estimates'), rows)}\n{GENERATED}\n"
    return {"estimators/index.md": index} | {f"estimators/{name}.md": _page(name) for name in SHOWN}


def _page(name: str) -> str:
    one, value, slope = SHOWN[name]
    doc = one.__doc__ or ""
    at = "at $\\lambda = 1/2$ " if name == "k_lambda" else ""
    used = [
        (f"[{loss}](../zoo/{loss}.md)", CELLS[loss].summary, summary(audited(loss).anatomy)) for loss in _losses(name)
    ]
    uses = table(("loss", "what it is", "on-policy it descends"), used) if used else "None: it is a value to report.\n"
    return (
        f"# {name}\n\n{sections(doc)[0]}\n\n"
        f"With $l = \\log\\,\\pi - \\log\\,\\mathrm{{ref}}$ of a sampled token, value and slope are\n\n"
        f"$$k(l) = {value}, \\qquad k'(l) = {slope}.$$\n\n{definition(doc)}\n"
        f"## Value and slope\n\nThe numbers {at}are computed by `klgrad.estimators.{name}`.\n\n{_numbers(one)}\n"
        f"## In the zoo\n\n{uses}\n{GENERATED}\n"
    )


def _losses(name: str) -> list[str]:
    """The losses of the zoo that use an estimator, by their names."""
    return ["k-half-loss"] if name == "k_lambda" else [loss for loss in CELLS if name in loss.split("-")]


def _numbers(one: Estimator) -> str:
    at = torch.tensor(AT, dtype=torch.float64)
    rows = [
        (word, *(f"{float(x):.4g}" for x in found))
        for word, found in (("value", one.value(at)), ("slope", one.slope(at)))
    ]
    return table(("l", *(f"{x:g}" for x in AT)), rows)

"""Figures of one or several runs: reward, KL, reward against KL, lengths."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError
from ...support import palette
from ...support.atomic_files import write_whole
from ..run_folder.history import evaluations, kl_of, length_of, training

COLOURS = (palette.BLUE, palette.ORANGE, palette.GREEN, palette.PURPLE, palette.SKY, palette.VERMILION, palette.BLACK)
Row = dict[str, Any]
Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Drawn:
    """A run's name and history."""

    name: str
    rows: list[Row]


def draw(runs: list[Drawn], path: Path) -> None:
    """Draw the runs to a PNG file."""
    write_whole(path, drawn(runs))


def drawn(runs: list[Drawn]) -> bytes:
    """The figure as PNG: thin lines for updates; markers for held-out prompts, filled in the domain, hollow outside."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError("matplotlib, to draw", "no such package", "pip install 'klgrad[plot]'") from None
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = _axes()
        for i, run in enumerate(runs):
            _draw_run(axes, run, COLOURS[i % len(COLOURS)])
        _label(axes)
        _legend(figure, runs)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _axes() -> tuple[Any, dict[str, Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2)
    return figure, dict(zip(("reward", "kl", "frontier", "length"), grid.flat, strict=True))


def _draw_run(axes: dict[str, Any], run: Drawn, colour: str) -> None:
    trained, evaluated = training(run.rows), evaluations(run.rows)
    look = {"color": colour}
    thin = {**look, "linewidth": 0.8, "alpha": 0.6}
    _line(axes["reward"], trained, _step, _task_reward, **thin)
    _line(axes["kl"], trained, _step, kl_of, **thin)
    _line(axes["frontier"], trained, kl_of, _task_reward, **look, linestyle="", marker=".", markersize=3, alpha=0.5)
    _line(axes["length"], trained, _step, length_of, **thin)
    filled = {**look, "marker": "o", "markersize": 5, "linewidth": 1.2}
    hollow = {**filled, "markerfacecolor": "white", "linestyle": ":"}
    for domain, style in (("in", filled), ("out", hollow)):
        _line(axes["reward"], evaluated, _step, _domain(domain), **style)
        _line(axes["frontier"], evaluated, _evaluated_kl, _domain(domain), **style)
    _line(axes["kl"], evaluated, _step, _evaluated_kl, **filled)
    _line(axes["length"], evaluated, _step, lambda row: row["evaluation"]["length"], **filled)


def _line(ax: Any, rows: list[Row], x: Value, y: Value, **style: Any) -> None:
    points = [(x(row), y(row)) for row in rows]
    points = [point for point in points if None not in point]
    if points:
        ax.plot(*zip(*points, strict=True), **style)


def _step(row: Row) -> float:
    return row["step"]


def _task_reward(row: Row) -> float | None:
    return row.get("task_reward")


def _evaluated_kl(row: Row) -> float | None:
    kl = row["evaluation"]["kl"]  # None for greedy completions
    return None if kl is None else kl["per_sequence"]["mean"]


def _domain(name: str) -> Value:
    return lambda row: row["evaluation"]["domains"].get(name, {}).get("reward")


def _label(axes: dict[str, Any]) -> None:
    kl = "KL(π‖ref), nats per completion"
    for name, title, x, y in (
        ("reward", "Reward", "update", "mean reward"),
        ("kl", "KL to the reference", "update", kl),
        ("frontier", "Reward against KL", kl, "mean reward"),
        ("length", "Lengths", "update", "tokens per completion"),
    ):
        axes[name].set(title=title, xlabel=x, ylabel=y)
        axes[name].grid(alpha=0.25)
        if not axes[name].lines:
            axes[name].text(0.5, 0.5, "no reward in this run", ha="center", va="center", transform=axes[name].transAxes)
    axes["length"].set_ylim(0, 1.05 * axes["length"].get_ylim()[1])


def _legend(figure: Any, runs: list[Drawn]) -> None:
    from matplotlib.lines import Line2D

    colours = zip(COLOURS * len(runs), runs, strict=False)
    names = [Line2D([], [], color=colour, linewidth=2, label="run") for colour, _ in colours]
    grey: dict[str, Any] = {"color": palette.GREY}
    mark = {**grey, "marker": "o", "markersize": 5}
    marks = [
        Line2D([], [], **grey, linewidth=0.8, label="training completions"),
        Line2D([], [], **mark, label="held out"),
        Line2D([], [], **mark, markerfacecolor="white", linestyle=":", label="held out, out of domain"),
    ]
    legend = figure.legend(handles=names, loc="outside upper center", ncols=min(4, len(names)), frameon=False)
    for text, run in zip(legend.get_texts(), runs, strict=True):
        text.set_parse_math(False)  # a $ in a name does not start a formula
        text.set_text(run.name)  # set afterwards: matplotlib leaves out labels that begin with _
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)

"""Figures of one run, and the comparison of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .. import drawing
from ..drawing import content, look
from ..errors import MissingExtraError, RunError
from ..support import Json, text_table, write_whole
from . import run_folder
from .report import format_estimate, score, summarise
from .run_folder import FIGURES, History, evaluations, kl_of, length_of, training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Figures of one or several runs: reward, KL, reward against KL, lengths.

COLOURS = (drawing.BLUE, drawing.ORANGE, drawing.GREEN, drawing.PURPLE, drawing.SKY, drawing.VERMILION, drawing.BLACK)
PANELS = ("reward", "kl", "frontier", "length")
Value = Callable[[Json], float | None]


@dataclass(frozen=True)
class RunHistory:
    """A run's name, its history, and what it maximises."""

    name: str
    rows: list[Json]
    objective: str = ""


def draw(runs: list[RunHistory], folder: Path) -> None:
    kinds = [name.rpartition(".")[2] for name in FIGURES]
    for name, picture in zip(FIGURES, render_figure(runs, *kinds), strict=True):
        write_whole(folder / name, picture)


def render_figure(runs: list[RunHistory], *kinds: str) -> list[bytes]:
    """The figure of runs in each format, `png`, `svg` or `pdf`; each run has a colour of its own.

    Thin lines are updates; markers are held-out prompts, with bars of one standard error.
    """
    try:
        import matplotlib.colors
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib, to draw", "no such package", "pip install 'klgrad[plot]'") from None
    with matplotlib.rc_context(look(9)):
        figure = Figure(figsize=(10, 7.4), layout="constrained")
        axes: dict[str, Axes] = dict(zip(PANELS, figure.subplots(2, 2).flat, strict=True))
        colours: list[str] = list(COLOURS[: len(runs)])
        if len(runs) > len(COLOURS):
            shades = (matplotlib.colormaps["turbo"](i / len(runs)) for i in range(len(runs)))
            colours = [matplotlib.colors.to_hex(shade) for shade in shades]
        for run, colour in zip(runs, colours, strict=True):
            draw_run(axes, run, colour)
        _label(axes)
        _legend(figure, runs, colours)
        return [content(figure, kind) for kind in kinds]


def draw_run(axes: dict[str, Axes], run: RunHistory, colour: str) -> None:
    trained, evaluated = training(run.rows), evaluations(run.rows)
    plain: Json = {"color": colour}
    thin = {**plain, "linewidth": 0.8, "alpha": 0.6}
    _line(axes["reward"], trained, _step, _task_reward, **thin)
    _line(axes["kl"], trained, _step, kl_of, **thin)
    _line(axes["frontier"], trained, kl_of, _task_reward, **plain, linestyle="", marker=".", markersize=3, alpha=0.5)
    _line(axes["length"], trained, _step, length_of, **thin)
    filled: Json = {**plain, "marker": "o", "markersize": 5, "linewidth": 1.2}
    hollow = {**filled, "markerfacecolor": "white", "linestyle": ":"}
    kl, kl_error = _kl("mean"), _kl("standard_error")
    for domain, style in (("in", filled), ("out", hollow)):
        reward, reward_error = _domain(domain, "reward"), _domain(domain, "standard_error")
        _line(axes["reward"], evaluated, _step, reward, y_error=reward_error, **style)
        _line(axes["frontier"], evaluated, kl, reward, x_error=kl_error, y_error=reward_error, **style)
    _line(axes["kl"], evaluated, _step, kl, y_error=kl_error, **filled)
    _line(axes["length"], evaluated, _step, lambda row: row["evaluation"]["length"], **filled)


def _line(
    ax: Axes,
    rows: list[Json],
    x: Value,
    y: Value,
    x_error: Value | None = None,
    y_error: Value | None = None,
    **style: Any,
) -> None:
    """Draw the rows that have both values, with bars for the errors that are known."""
    drawable = [row for row in rows if x(row) is not None and y(row) is not None]
    if not drawable:
        return
    points: Any = [(x(row), y(row)) for row in drawable]
    ax.plot(*zip(*points, strict=True), **style)
    for name, error in (("xerr", x_error), ("yerr", y_error)):
        bars = [(x(row), y(row), error(row)) for row in drawable if error and error(row) is not None]
        if bars:
            across, up, sizes = zip(*bars, strict=True)
            bar: Json = {name: sizes, "ecolor": style["color"], "elinewidth": 0.9, "capsize": 2}
            ax.errorbar(across, up, fmt="none", **bar)


_step: Value = itemgetter("step")
_task_reward: Value = methodcaller("get", "task_reward")


def _kl(value: str) -> Value:
    return lambda row: row["evaluation"]["kl"]["per_sequence"][value]


def _domain(name: str, value: str) -> Value:
    return lambda row: row["evaluation"]["domains"].get(name, {}).get(value)


def _label(axes: dict[str, Axes]) -> None:
    from matplotlib.ticker import MaxNLocator

    kl = "KL(π‖ref), nats per completion"
    for name, title, x, y in (
        ("reward", "Reward", "update", "mean reward"),
        ("kl", "KL to the reference", "update", kl),
        ("frontier", "Reward against KL", kl, "mean reward"),
        ("length", "Lengths", "update", "tokens per completion"),
    ):
        axes[name].set(title=title, xlabel=x, ylabel=y)
        axes[name].grid(alpha=0.25)
        if x == "update":
            axes[name].xaxis.set_major_locator(MaxNLocator(integer=True))
        if not axes[name].lines:
            axes[name].text(0.5, 0.5, "no reward in this run", ha="center", va="center", transform=axes[name].transAxes)
    axes["length"].set_ylim(0, 1.05 * axes["length"].get_ylim()[1])


def _legend(figure: Figure, runs: list[RunHistory], colours: list[str]) -> None:
    from matplotlib.lines import Line2D

    names = [Line2D([], [], color=colour, linewidth=2, label="run") for colour in colours]
    grey: Json = {"color": drawing.GREY}
    mark = {**grey, "marker": "o", "markersize": 5}
    marks = [
        Line2D([], [], **grey, linewidth=0.8, label="training completions"),
        Line2D([], [], **mark, label="held out, ± one standard error"),
        Line2D([], [], **mark, markerfacecolor="white", linestyle=":", label="held out, out of domain"),
    ]
    legend = figure.legend(handles=names, loc="outside upper center", ncols=min(4, len(names)), frameon=False)
    for text, run in zip(legend.get_texts(), runs, strict=True):
        text.set_parse_math(False)  # a $ in a name does not start a formula
        text.set_text(run.name)  # set afterwards: matplotlib leaves out labels that begin with _
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)


# Compare runs from their folders: a table and a figure.


def load(folders: list[Path]) -> list[RunHistory]:
    """Read the runs, finished or not."""
    runs = []
    for folder in folders:
        recorded, rows = run_folder.read(folder, run_folder.RUN).get("objective") or {}, History(folder).rows()
        if not rows:
            raise RunError("a run with a history", f"{folder} without one", "train it for at least one update")
        runs.append(RunHistory(str(folder), rows, recorded.get("objective", "")))
    return runs


def table(runs: list[RunHistory]) -> Table:
    rows = []
    for run in runs:
        summary = summarise(run.rows)
        rows.append([run.name, run.objective, str(summary["updates"]), *_results(summary)])
    heads = ("run", "maximises", "updates", "in-domain", "out-of-domain", "KL per completion", "length")
    table = text_table(rows, heads, numbers=2, fold=True)
    for column in table.columns[2:]:
        column.no_wrap = True
    return table


def _results(summary: Json) -> list[str]:
    """Rewards in and out of the domain, KL, length: before and after, or only after if the start is lost."""
    before, after = summary["before"], summary["after"]
    if after is None:
        return ["", "", f"{summary['last_updates']['kl_per_sequence'] or 0:.4g}", ""]
    cells = [score(after["domains"].get(domain)) for domain in ("in", "out")]
    cells += [format_estimate(after["kl"]["per_sequence"]), f"{after['length']:.1f}"]
    if before is None:
        return cells
    starts = [score(before["domains"].get(domain)).partition(" ")[0] for domain in ("in", "out")]
    starts += [f"{before['kl']['per_sequence']['mean'] or 0:.3g}", f"{before['length']:.1f}"]
    return [f"{start} -> {end}" if start else end for start, end in zip(starts, cells, strict=True)]

"""The report on a log: its numbers, what to change, and both as tables, as JSON and as one HTML page with figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..reports import Report
from ..support import finite
from ..targets import TARGETS, UNCORRECTED
from .mismatch import Cause, Lags
from .reader import LONGEST_IDENTIFIER

if TYPE_CHECKING:
    from ..zoo import Cell
    from .examination import Padding

# The report on a log, and on each part of it.

HARDLY = 0.05
"""Relative difference of coefficients below which an unsound cell makes little difference on this data."""

STALE = 0.5
"""Effective sample size of sequence ratios, as a share, below which the tokens count as sampled from another policy."""

RARE = 1e-4
"""Smallest share of tokens in a dead zone that is mentioned."""

APART = 0.5
"""Relative difference from the sequence-level coefficients above which the report explains it."""


@dataclass(frozen=True)
class CoefficientComparison:
    """The coefficients c of a cell compared with the coefficients s of a term, over all tokens.

    `relative_difference` is ‖c - s‖ / ‖s‖; `correlation` is NaN if c or s is constant; `scale` is the multiple of s
    nearest to c.
    """

    term: str
    relative_difference: float
    correlation: float
    scale: float
    largest: float
    largest_sound: float


@dataclass(frozen=True, eq=False)
class LogPart:
    """The completions with one value in the column; there is no `mismatch` without log-probs of the sampler."""

    label: object
    rows: int
    tokens: int
    kl: Report
    mismatch: Report | None

    def to_dict(self) -> dict[str, object]:
        return {
            "value": self.label,
            "rows": self.rows,
            "tokens": self.tokens,
            "report": self.kl.metrics(),
            "intervals": self.kl.intervals(),
            "mismatch": None if self.mismatch is None else self.mismatch.metrics(),
        }


@dataclass(frozen=True, eq=False)
class LogReport:
    """The result of `examine`.

    Attributes:
        file: the path of the log, or what was given and how many files that is.
        columns: role to the name of the column that was read.
        rows: number of completions.
        tokens: number of live tokens.
        kl: the `kl_report` of the whole file.
        cell: the KL loss in use.
        comparisons: its coefficients compared with the sound ones, by level.
        dead_share: share of tokens in a dead zone: the sound coefficient is not zero, but that of the cell is.
        mismatch: the `mismatch_report`; None without log-probs of the sampler.
        cause: the likely cause of the mismatch; None without log-probs of the sampler.
        reference: how well π and ref are aligned.
        padding: rows that look padded.
        parts: the same KLs for each value of the column `by`; empty without one.
        cell_is_assumed: whether `cell` was not named.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from klgrad.logs import examine
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "log.jsonl"
        ...     _ = path.write_text('{"log_prob": [-1.0, -0.5], "ref_log_prob": [-1.1, -0.4]}')
        ...     report = examine(path)
        >>> report.columns
        {'logp': 'log_prob', 'ref_logp': 'ref_log_prob'}
        >>> sorted(report.to_dict())[:3]
        ['advice', 'cell', 'columns']
    """

    file: str
    columns: dict[str, str]
    rows: int
    tokens: int
    kl: Report
    cell: Cell
    comparisons: dict[str, CoefficientComparison]
    dead_share: float
    mismatch: Report | None
    cause: Cause | None
    reference: Lags
    padding: Padding
    parts: list[LogPart] = field(default_factory=list)
    cell_is_assumed: bool = False

    @property
    def notes(self) -> list[str]:
        """Remarks on how the file was read, and on the limits of its numbers."""
        notes = []
        if "logp" in self.columns and self.columns["logp"].lower().startswith(
            ("old", "prev", "prox", "pi_old", "b_log")
        ):
            notes.append(f"`{self.columns['logp']}` is used as logp: at the start of an update π is the old policy.")
        if self.padding.share > 0.01:
            notes.append(
                f"There is no mask, and {self.padding.share:.0%} of the rows end in log-probs of exactly 0. If these "
                "are padding, every mean per token is too small: log the completion mask."
            )
        if "behavior_logp" not in self.columns and "old_logp" in self.columns:
            notes.append("Ratios are π/old; the sampler's own log-probs are not in the file.")
        if self._is_at_the_reference:
            notes.append(
                "π equals ref at every token: this is expected before the first update; later it means that ref is "
                "not held fixed."
            )
        elif self._is_stale:
            notes.append("The tokens are not sampled from π, and the KLs to the reference are not corrected for this.")
        if self.cell_is_assumed and not self._is_at_the_reference:
            notes.append(
                f"The log does not say which KL loss the run has: {self.cell.name} is assumed. Name yours by --cell; "
                "if β is 0 there is none, and what follows about its coefficients does not apply."
            )
        return notes

    @property
    def _is_at_the_reference(self) -> bool:
        return float(self.kl.scalars["log_ratio/abs_max"]) == 0

    @property
    def _is_stale(self) -> bool:
        return float(self.kl.scalars.get("ratio/sequence/effective_sample_size", 1.0)) < STALE

    @property
    def explanation(self) -> str:
        """Why a token-level loss is far from the sequence-level KL; empty if it is not."""
        token, sequence = (self.comparisons[level].relative_difference for level in ("token", "sequence"))
        if not sequence > max(APART, token):
            return ""
        return (
            "Whole completions: here the coefficient of a token also contains the KL of all later tokens. A "
            "token-level loss always differs much from this, so a large difference in this column is no error: compare "
            "such a loss token by token."
        )

    @property
    def advice(self) -> list[str]:
        """What to change, most important first. Findings that depend on misaligned columns are left out."""
        advice = self._advise_on_alignment()
        after = " Then log again: there is another cause." if self.cause and self.cause.alone is False else ""
        cause = [f"{self.cause.remedy}{after}"] if self.cause is not None and self.cause.remedy else []
        advice = [*advice, *cause, *([] if advice else self._advise_on_loss()), *self._advise_on_staleness()]
        if advice:
            return advice
        if self._is_at_the_reference:
            return ["The KL term cannot be examined: π equals ref at every token."]
        if self.cause is None:
            return ["Nothing to change in reference and KL term; whether trainer and sampler agree is unknown."]
        return ["Nothing to change: no fault of trainer, reference or KL term was found in these data."]

    def _advise_on_alignment(self) -> list[str]:
        shift = self.reference.shift()
        if not shift:
            return []
        where = "next" if shift > 0 else "previous"
        return [
            f"Align `{self.columns['ref_logp']}`: its entry for the {where} token fits `{self.columns['logp']}` better "
            f"(root mean square difference {self.reference.rms(shift):.3g}, {self.reference.rms(0):.3g} as logged)."
        ]

    def _advise_on_loss(self) -> list[str]:
        off = self.comparisons["token"].relative_difference
        does = TARGETS[self.cell.descends.on_policy].does
        if self.cell.instead is None or off != off:  # if π equals ref, there is nothing to compare
            return []
        dead_zone = self.dead_share >= RARE
        if off < HARDLY and not dead_zone and self.cell.descends.on_policy == "reverse-kl-token":
            return []
        if off < HARDLY and not dead_zone:
            return [
                f"{self._named} {does}. This near to ref, its coefficients differ from those of the "
                f"token-level reverse KL by only {off:.1%}; the difference grows when π moves away from ref. "
                f"{self.cell.instead}"
            ]
        dead = f", and are zero on {self.dead_share:.2%} of the tokens" if dead_zone else ""
        return [
            f"{self._named} {does}: on these tokens its coefficients differ from those of the token-level "
            f"reverse KL by {off:.0%}{dead}. {self.cell.instead}"
        ]

    @property
    def _named(self) -> str:
        return f"If the KL loss of the run is {self.cell.name}: it" if self.cell_is_assumed else self.cell.name

    def _advise_on_staleness(self) -> list[str]:
        has_cause = self.cause is not None and self.cause.name not in ("none", "systematic", "unexplained")
        off_policy = self.cell.descends.off_policy
        if not self._is_stale or has_cause or (TARGETS[off_policy].has_gradient and off_policy not in UNCORRECTED):
            return []
        left = float(self.kl.scalars["ratio/sequence/effective_sample_size"])
        return [
            f"The tokens are sampled from another policy (effective sample size {left:.0%} of the completions): use "
            f"importance weights in the KL term, {self.comparisons['sequence'].term}."
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        mismatch = None
        if self.mismatch is not None and self.cause is not None:
            mismatch = {
                "metrics": self.mismatch.metrics(),
                "intervals": self.mismatch.intervals(),
                "cause": asdict(self.cause),
            }
        return {
            "file": self.file,
            "columns": self.columns,
            "rows": self.rows,
            "tokens": self.tokens,
            "report": self.kl.metrics(),
            "intervals": self.kl.intervals(),
            "cell": {
                "name": self.cell.name,
                "descends_on_policy": self.cell.descends.on_policy,
                "descends_off_policy": self.cell.descends.off_policy,
                "share_in_dead_zone": self.dead_share,
                "against": {level: asdict(x) for level, x in self.comparisons.items()},
            },
            "mismatch": mismatch,
            **({"by": [part.to_dict() for part in self.parts]} if "by" in self.columns else {}),
            "notes": self.notes,
            "advice": self.advice,
        }


def to_json(report: LogReport) -> str:
    """The report as JSON; numbers that are not finite are null."""
    return json.dumps(finite(report.to_dict()), indent=2, ensure_ascii=False) + "\n"


# The tables of the report.

MEANINGS = {
    "kl/reverse/exact": "KL(π‖ref), exact",
    "kl/forward/exact": "KL(ref‖π), exact",
    "kl/reverse/k1": "KL(π‖ref) by k1",
    "kl/reverse/k2": "KL(π‖ref) by k2 (biased)",
    "kl/reverse/k3": "KL(π‖ref) by k3",
    "kl/forward/k3": "KL(ref‖π) by k3",
    "kl/mismatch/k1": "KL(sampler‖trainer) by k1",
    "kl/mismatch/k2": "KL(sampler‖trainer) by k2 (biased)",
    "kl/mismatch/k3": "KL(sampler‖trainer) by k3",
    "kl/mismatch_of_trainer/k3": "KL(trainer‖sampler) by k3",
}
"""What the estimates of both reports mean, in the order of the tables."""


class Quantity(NamedTuple):
    """A quantity of each part: the title of its figure, the head of its column, its report and its name there."""

    title: str
    head: str
    report: str
    name: str


QUANTITIES = (
    Quantity("KL(π‖ref) by k3, nats per token", "KL(π‖ref) by k3, per token", "kl", "kl/reverse/k3/per_token"),
    Quantity("KL(π‖ref) by k1, nats per completion", "by k1, per completion", "kl", "kl/reverse/k1/per_sequence"),
    Quantity(
        "KL(sampler‖trainer) by k3, nats per token",
        "KL(sampler‖trainer) by k3, per token",
        "mismatch",
        "kl/mismatch/k3/per_token",
    ),
    Quantity(
        "Effective sample size, share of the completions",
        "effective sample size",
        "mismatch",
        "ratio/sequence/effective_sample_size",
    ),
)
LENGTH = Quantity("Tokens per completion", "", "kl", "length/mean")
"""The table has the mean length in a column of its own."""


def estimate_rows(report: Report) -> list[list[str]]:
    """Meaning, value per token and value per completion of each estimate."""
    units = ("per_token", "per_sequence")
    named = [(name, text) for name, text in MEANINGS.items() if f"{name}/per_token" in report.estimates]
    return [[text, *(str(report.estimates[f"{name}/{unit}"]) for unit in units)] for name, text in named]


def part_heads(report: LogReport) -> list[str]:
    heads = [quantity.head for quantity in _quantities_of(report)]
    return [report.columns.get("by", ""), "completions", "tokens each", *heads]


def part_rows(report: LogReport) -> list[list[str]]:
    rows = []
    for part in report.parts:
        reports = {"kl": part.kl, "mismatch": part.mismatch}
        label = str(part.label)
        if len(label) > LONGEST_IDENTIFIER:  # JSON has it whole
            label = f"{label[: LONGEST_IDENTIFIER - 1]}…"
        cells = [_cell(reports[quantity.report], quantity.name) for quantity in _quantities_of(report)]
        rows.append([label, f"{part.rows:,}", f"{part.tokens / part.rows:.4g}", *cells])
    return rows


def _quantities_of(report: LogReport) -> list[Quantity]:
    return [quantity for quantity in QUANTITIES if quantity.report == "kl" or report.mismatch is not None]


def _cell(report: Report | None, name: str) -> str:
    if report is None:
        return "–"
    if name in report.estimates:
        return str(report.estimates[name])
    return f"{float(report.scalars[name]):.1%}" if name in report.scalars else "–"


# The page; it needs no network, no scripts and no fonts.


def to_html(report: LogReport) -> str:
    """Render one page; the same report gives the same page. All values are escaped: they come from the file."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("klgrad.logs"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("logs.html").render(
        report=report,
        estimates=[*estimate_rows(report.kl), *([] if report.mismatch is None else estimate_rows(report.mismatch))],
        by=report.columns.get("by"),
        figures=figures_of(report.parts),
        frame={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - 8},
        heads=part_heads(report),
        parts=part_rows(report),
    )


# The geometry of the figures of a log's page: quantities by the values of a column, in pixels.

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 30


class Point(NamedTuple):
    """A value at x, with the ends of its 95% interval; equal to the value where there is none."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Figure:
    """One quantity by the values of a column: SVG paths of the values and of their intervals, and ticks of the axes.

    A tick is its place along the axis and its label.
    """

    title: str
    line: str
    bars: str
    dots: list[tuple[str, str]]
    across: list[tuple[str, str]]
    up: list[tuple[str, str]]


def figures_of(parts: list[LogPart]) -> list[Figure]:
    """The figures of all quantities that the parts have; none if there are fewer than two parts, or no numbers."""
    if len(parts) < 2 or not all(isinstance(part.label, int | float) for part in parts):
        return []
    curves = [(quantity.title, _points(parts, quantity)) for quantity in (*QUANTITIES, LENGTH)]
    return [_figure(title, points) for title, points in curves if points]


def _points(parts: list[LogPart], quantity: Quantity) -> list[Point]:
    points, name = [], quantity.name
    for part in parts:
        report = part.kl if quantity.report == "kl" else part.mismatch
        x = float(part.label)  # pyright: ignore[reportArgumentType]  # `figures_of` has looked
        if report is not None and name in report.estimates:
            estimate = report.estimates[name]
            y, (low, high) = float(estimate.mean), estimate.interval()
            points.append(Point(x, y, *((low, high) if math.isfinite(low) else (y, y))))
        elif report is not None and name in report.scalars:
            points.append(Point(x, *[float(report.scalars[name])] * 3))
    return [point for point in points if math.isfinite(point.y)]


def _figure(title: str, points: list[Point]) -> Figure:
    xs = [point.x for point in points]
    # The mean and 0 are always in the frame; an interval much wider than all means is cut at the frame.
    top = max(0.0, *(point.y for point in points))
    bottom = min(0.0, *(point.y for point in points))
    reach = (top - bottom) or 1.0
    top = min(max(top, *(point.high for point in points)), top + reach)
    bottom = max(min(bottom, *(point.low for point in points)), bottom - reach)
    across, up = _scale(min(xs), max(xs), LEFT + 8, WIDTH - RIGHT - 8), _scale(bottom, top, HEIGHT - BOTTOM, TOP)
    cut = lambda y: up(min(max(y, bottom), top))
    pixels = [(f"{across(p.x):.1f}", f"{up(p.y):.1f}") for p in points]
    return Figure(
        title,
        line="M" + "L".join(f"{x} {y}" for x, y in pixels),
        bars="".join(f"M{across(p.x):.1f} {cut(p.low):.1f}V{cut(p.high):.1f}" for p in points if p.high > p.low),
        dots=pixels,
        across=[(f"{across(x):.1f}", f"{x:g}") for x in sorted({min(xs), xs[len(xs) // 2], max(xs)})],
        up=[(f"{up(y):.1f}", f"{y:.3g}".replace("-", "−")) for y in _round_values(bottom, top)],
    )


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _round_values(low: float, high: float) -> list[float]:
    """Three to six multiples of 1, 2 or 5 times a power of ten."""
    rough = ((high - low) or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]

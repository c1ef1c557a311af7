"""The report on a log as one HTML page, with figures; it needs no network, no scripts and no fonts."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..reports.divergence import Report
from .figures import figures_of
from .log_report import LogReport
from .prompt_groups import LONGEST

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

BY_PART = (
    ("KL(π‖ref) by k3, per token", "kl", "kl/reverse/k3/per_token"),
    ("by k1, per completion", "kl", "kl/reverse/k1/per_sequence"),
    ("KL(sampler‖trainer) by k3, per token", "mismatch", "kl/mismatch/k3/per_token"),
    ("effective sample size", "mismatch", "ratio/sequence/effective_sample_size"),
)
"""Head, report and name of the columns of the table of the parts, after value, completions and length."""


def to_html(report: LogReport) -> str:
    """Render one page; the same report gives the same page."""
    return (
        environment()
        .get_template("logs.html")
        .render(
            report=report,
            estimates=[*estimate_rows(report.kl), *([] if report.mismatch is None else estimate_rows(report.mismatch))],
            by=report.columns.get("by"),
            figures=figures_of(report.parts),
            heads=part_heads(report),
            parts=part_rows(report),
        )
    )


@cache
def environment() -> Environment:
    """The templates, with escaping of all values: labels and names come from the file."""
    return Environment(
        loader=PackageLoader("klgrad.logs"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def estimate_rows(report: Report) -> list[list[str]]:
    """Meaning, value per token and value per completion of each estimate."""
    units = ("per_token", "per_sequence")
    named = [(name, text) for name, text in MEANINGS.items() if f"{name}/per_token" in report.estimates]
    return [[text, *(str(report.estimates[f"{name}/{unit}"]) for unit in units)] for name, text in named]


def part_heads(report: LogReport) -> list[str]:
    """The heads of the table of the parts."""
    return [report.columns.get("by", ""), "completions", "tokens each", *(head for head, _, _ in _shown(report))]


def part_rows(report: LogReport) -> list[list[str]]:
    """The table of the parts."""
    rows = []
    for part in report.parts:
        reports = {"kl": part.kl, "mismatch": part.mismatch}
        cells = [_cell(reports[kind], name) for _, kind, name in _shown(report)]
        rows.append([_cut(str(part.label)), f"{part.rows:,}", f"{part.tokens / part.rows:.4g}", *cells])
    return rows


def _cut(label: str) -> str:
    """A label, without the end of a long one: JSON has it whole."""
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def _shown(report: LogReport) -> list[tuple[str, str, str]]:
    return [column for column in BY_PART if column[1] == "kl" or report.mismatch is not None]


def _cell(report: Report | None, name: str) -> str:
    if report is None:
        return "–"
    if name in report.estimates:
        return str(report.estimates[name])
    return f"{float(report.scalars[name]):.1%}" if name in report.scalars else "–"

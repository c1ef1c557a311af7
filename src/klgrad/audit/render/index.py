"""The index of the page: a row per loss, with settings that can be told apart at a glance."""

from collections.abc import Mapping, Sequence
from html import escape

from ..audit_result import AuditResult
from ..numbers import percent
from .parts import SHORT, breakable, kind_of, mark, number
from .plain import notes

GROUPS = {
    "cell": "Cells: losses as found in the wild",
    "term": "Terms: losses that declare what they mean",
    "function": "Functions",
    "framework": "Frameworks: their own code, by setting",
}

COLUMNS = ("loss", "on-policy", "off-policy", "variance", "near ref", "notes")


def index(results: Sequence[AuditResult], anchors: Sequence[str], tags: Mapping[str, str]) -> str:
    """A table with a body per kind of loss, or per part of a framework; `tags` are words for some names."""
    head = "".join(f'<th scope="col" class="{name.replace(" ", "-")}">{name}</th>' for name in COLUMNS)
    bodies: dict[str, list[str]] = {}
    for r, anchor in zip(results, anchors, strict=True):
        bodies.setdefault(_group(r), []).append(_row(r, anchor, tags.get(r.name, "")))
    body = "".join(f"<tbody>{_heading(title)}{''.join(rows)}</tbody>" for title, rows in bodies.items())
    return (
        '<section aria-labelledby="index"><h2 id="index">Index</h2>'
        f'<table class="index"><thead><tr>{head}</tr></thead>{body}</table></section>'
    )


def _heading(title: str) -> str:
    return f'<tr class="group"><th scope="rowgroup" colspan="{len(COLUMNS)}">{title}</th></tr>'


def split_name(name: str) -> tuple[str, list[str]]:
    """The words before the first `key=value`, and those from it on."""
    words = name.split(" ")
    first = next((i for i, word in enumerate(words) if "=" in word), len(words))
    return " ".join(words[:first]), words[first:]


def _group(r: AuditResult) -> str:
    if r.kind != "framework":
        return GROUPS[r.kind]
    base, settings = split_name(r.name)
    return f"<code>{breakable(base if settings else base.split(' ')[0])}</code>"


def _name(r: AuditResult) -> str:
    _, settings = split_name(r.name)
    if r.kind != "framework" or not settings:
        return breakable(r.name)
    return " ".join(_setting(word) for word in settings)


def _setting(word: str) -> str:
    """A setting whose value stands out from its key: of eighteen rows, the values are what differs."""
    key, equals, value = word.partition("=")
    if not equals:
        return f'<span class="setting"><b>{breakable(word)}</b></span>'
    return f'<span class="setting"><span class="name">{breakable(key)}=</span><wbr><b>{breakable(value)}</b></span>'


def _row(r: AuditResult, anchor: str, tag: str) -> str:
    sides = {
        "on-policy": (r.verdict, _detail(r, r.bias, r.nearest, r.verdict_fixed_lengths)),
        "off-policy": (r.verdict_off_policy, _detail(r, r.bias_off_policy, r.nearest_off_policy, "unknown")),
    }
    verdicts = "".join(f'<td class="{where}">{_cell(v, detail, where)}</td>' for where, (v, detail) in sides.items())
    mention = f'<span class="tag">{escape(tag)}</span>' if tag else ""
    settings = ' class="settings"' if r.kind == "framework" else ""
    return (
        f'<tr><th scope="row"{settings}><a href="#{anchor}">{_name(r)}</a>{mention}</th>{verdicts}'
        f'<td class="variance">{number(r.variance)}</td><td class="near-ref">{number(r.variance_near)}</td>'
        f'<td class="notes">{"; ".join(_notes(r))}</td></tr>'
    )


def _notes(r: AuditResult) -> list[str]:
    """But for what the verdict beside them says already; an equation stays on one line."""
    told = r.verdict == "unknown" != r.verdict_fixed_lengths
    kept = [note for note in notes(r) if not (told and note.startswith("length-sensitive"))]
    return [escape(note).replace(" = ", "&nbsp;=&nbsp;") for note in kept]


def _detail(r: AuditResult, bias: dict[str, float], nearest: str, at_equal: str) -> str:
    """What an unknown verdict comes near to."""
    if r.length_sensitive and at_equal != "unknown":
        return f"{SHORT.get(at_equal, at_equal)} at equal lengths"
    return f"{percent(bias[nearest])} from {SHORT[nearest.replace('_', '-')]}"


def _cell(verdict: str, detail: str, where: str) -> str:
    kind = kind_of(verdict)
    more = f" <small>{detail}</small>" if verdict == "unknown" else ""
    label = f'<span class="where">{where}</span>'
    return f'<span class="cell {kind}">{mark(kind)}<span>{label}{SHORT.get(verdict, verdict)}{more}</span></span>'

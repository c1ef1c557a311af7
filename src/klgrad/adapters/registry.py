"""The frameworks that can be audited; each has one adapter module that connects the audit to its code."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ..errors import NotAuditableError
from .sources import SOURCES

if TYPE_CHECKING:  # the names of the frameworks are needed where torch is not
    from ..audit import Subject

if TYPE_CHECKING:  # the names of the frameworks are needed where torch is not
    from ..audit import Subject


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        name: its name on the command line.
        distribution: the name of its installed package, or the repository of its source.
        tested: the version that its adapter was tested with, or that was transcribed.
        adapter: the module of this package with `subjects() -> list[Subject]`; empty if the formulae are transcribed.
        policy_adapter: that with `policy_losses() -> list[Subject]`; None if there is none yet.
    """

    name: str
    distribution: str
    tested: str
    adapter: str
    policy_adapter: str | None = None

    @property
    def transcribed(self) -> bool:
        """Whether formulae written again from its source are audited, and not its own code."""
        return self.name in SOURCES

    @property
    def version(self) -> str | None:
        """The version that an audit here is of: the transcribed one, or the installed one, or None."""
        return self.tested if self.transcribed else self.installed

    @property
    def title(self) -> str:
        """Its name and the version that an audit here is of, and whether that is its own code."""
        transcribed = f": formulae transcribed from {self.distribution}, not its own code"
        return f"{self.name} {self.version}{transcribed if self.transcribed else ''}"

    @property
    def installed(self) -> str | None:
        """The installed version, or None."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    @property
    def remark(self) -> str:
        """One line if the framework is missing or its version is not the tested one; empty otherwise."""
        if self.transcribed:
            return ""
        if self.installed is None:
            return f"{self.name} is not installed: pip install '{self.distribution}=={self.tested}'"
        if self.installed != self.tested:
            return f"{self.name} {self.installed} is not the tested version ({self.tested}); it is audited anyway"
        return ""

    def subjects(self) -> "list[Subject]":
        """Every setting that affects the KL, as losses to audit."""
        if self.transcribed:
            return import_module(".transcribed", __package__).subjects(self.name)
        return self._losses(self.adapter, "subjects")

    def policy_losses(self) -> "list[Subject]":
        """The whole policy losses of the framework, as losses to audit with `--whole`."""
        if self.policy_adapter is None:
            known = ", ".join(name for name, framework in FRAMEWORKS.items() if framework.policy_adapter)
            raise NotAuditableError(
                "a framework whose policy losses can be audited", self.name, f"use one of: {known}; or a file:function"
            )
        return self._losses(self.policy_adapter, "policy_losses")

    def _losses(self, module: str, function: str) -> "list[Subject]":
        if self.installed is None:
            raise NotAuditableError(
                f"{self.name} to be installed", self.remark, "install it in the environment of klgrad"
            )
        adapter: Callable[[], list[Subject]] = getattr(import_module(f".{module}", __package__), function)
        try:
            return adapter()
        except ImportError as error:
            raise NotAuditableError(
                f"{self.name} {self.installed} to import",
                f"{self.name} {self.installed} cannot be imported here: {error}",
                "install its missing dependency, or run the audit in an environment where it imports",
            ) from error


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("trl", "trl", "1.16.0", "trl", "trl_policy"),
        Framework("verl", "verl", "0.9.1", "verl", "verl_policy"),
        Framework("openrlhf", "openrlhf", "0.11.2", "openrlhf", "openrlhf_policy"),
        Framework("skyrl", "skyrl", "0.3.0", "skyrl", "skyrl_policy"),
        Framework("liger", "liger-kernel", "0.8.5", "liger"),
        Framework("ms-swift", "ms-swift", "4.6.0", "ms_swift"),
        Framework("unsloth", "unsloth_zoo", "2026.10.9", "unsloth"),
        Framework("trinity", "trinity-rft", "0.6.0", "trinity"),
        *(Framework(name, source.repository, source.version, "") for name, source in SOURCES.items()),
    )
}

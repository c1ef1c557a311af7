"""The frameworks that can be audited, each by one adapter file that says what is fed to what."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from ..audit import Subject
from ..errors import NotAuditableError


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        name: how to ask for it.
        distribution: its name as an installed package.
        tested: the version that its adapter was written against.
        adapter: the module beside this one with `subjects() -> list[Subject]`.
    """

    name: str
    distribution: str
    tested: str
    adapter: str

    @property
    def installed(self) -> str | None:
        """Its version here, or None."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    @property
    def remark(self) -> str:
        """What to know of the version, in one line; empty if there is nothing."""
        if self.installed is None:
            return f"{self.name} is not installed: pip install '{self.distribution}=={self.tested}'"
        if self.installed != self.tested:
            return f"{self.name} {self.installed} is not the version tested ({self.tested}); audited all the same"
        return ""

    def subjects(self) -> list[Subject]:
        """Every setting that touches the KL, as losses to audit."""
        if self.installed is None:
            raise NotAuditableError(f"{self.name} to be installed", self.remark, "install it where klgrad is")
        adapter: Callable[[], list[Subject]] = import_module(f".{self.adapter}", __package__).subjects
        try:
            return adapter()
        except ImportError as error:
            raise NotAuditableError(
                f"{self.name} {self.installed} to import",
                f"{self.name} {self.installed} cannot be imported here: {error}",
                "install what it misses, or audit it where it runs",
            ) from error


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("trl", "trl", "1.16.0", "trl"),
        Framework("verl", "verl", "0.9.1", "verl"),
        Framework("openrlhf", "openrlhf", "0.11.2", "openrlhf"),
        Framework("skyrl", "skyrl", "0.3.0", "skyrl"),
        Framework("liger", "liger-kernel", "0.8.5", "liger"),
    )
}

"""What a module of a framework says: its losses, its defaults, its advice, and how its runs are read.

Nothing here needs torch.
"""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from ..errors import NotAuditableError
from ..targets import Descends, Verdict
from .record import recorded
from .run_settings import Reader

if TYPE_CHECKING:
    from ..audit import Subject

# What a framework is advised to write for a given KL: settings, and code where no setting has that meaning. The texts
# are in `advice.toml`. The code is complete but for the names that its place has already; tests run it, in the
# framework's own environment where it calls the framework.

Meaning = tuple[Literal["reverse", "forward"], Literal["token", "sequence"]]
"""The divergence and the level of a `KLTerm`."""

TARGET_OF: dict[Meaning, Verdict] = {
    ("reverse", "sequence"): "reverse-kl-sequence",
    ("reverse", "token"): "reverse-kl-token",
    ("forward", "token"): "forward-kl-token",
    ("forward", "sequence"): "forward-kl-sequence",
}
"""The target of each meaning. A test compares it with `KLTerm.descends`, which needs torch."""


@dataclass(frozen=True)
class SettingLines:
    """Configuration lines of one framework.

    Attributes:
        lines: the lines as a user writes them.
        subject: the name of the audited loss with these settings.
        note: further information.
        policy_loss: what the lines do to the policy loss beside the KL.
    """

    lines: str
    subject: str
    note: str = ""
    policy_loss: str = ""

    @property
    def descends(self) -> Descends:
        """On-policy and off-policy, by the recorded audit."""
        known = recorded(self.subject.split()[0])
        assert known is not None, self.subject
        fresh, stale, _ = known.verdicts[self.subject]
        return Descends(fresh, stale)  # pyright: ignore[reportArgumentType]


def expresses(setting: SettingLines, meaning: Meaning, off_policy: bool) -> bool:
    """Whether the setting has this meaning on all problems, on-policy or off-policy."""
    return setting.descends[off_policy] == TARGET_OF[meaning]


IN_PLACE = """\
from klgrad import {{names}}

term = {{term}}
kl = term(Rollout({logp}, {ref_logp}, {mask}{{behavior}}))
{result}\
"""


@dataclass(frozen=True)
class Home:
    """Where a term of one's own goes in a framework.

    Attributes:
        place: the place, after "in".
        scope: the function in which the tensors have these names.
        tensors: where `logp`, `ref_logp`, `mask` and `behavior_logp` are.
        note: what else has to be set, and what the lines do.
        code: the lines, with the term to be filled in.
        sampler: the sampler's log-probs in the code, if `tensors` has more than their name.

    Example:
        >>> from klgrad.frameworks import HOMES
        >>> print(HOMES["openrlhf"].lines(("reverse", "token"), off_policy=False))
        from klgrad import KLTerm, Rollout
        <BLANKLINE>
        term = KLTerm(level="token")
        kl = term(Rollout(action_log_probs, base_action_log_probs, experience.action_mask))
        kl = kl.per_token
    """

    place: str
    scope: str
    tensors: dict[str, str]
    note: str
    code: str
    sampler: str = ""

    def lines(self, meaning: Meaning, off_policy: bool) -> str:
        """The lines that add a KL with this meaning to the loss of the framework.

        Args:
            meaning: the divergence and the level.
            off_policy: whether the samples are stale or from another engine.

        Returns:
            Python code. It has the names that `place` has, and for TRL `model`, `reward` and `prompts`.
        """
        names = {"KLTerm"} | ({"ImportanceWeighting", "Truncate"} if off_policy else set())
        names |= {"Rollout"} if "Rollout(" in self.code else set()
        return self.code.format(
            names=", ".join(sorted(names)),
            term=term_of(meaning, off_policy),
            behavior=f", behavior_logp={self.sampler or self.tensors['behavior_logp']}" if off_policy else "",
            field=', "rollout_log_probs"' if off_policy else "",
        )


def term_of(meaning: Meaning, off_policy: bool) -> str:
    """The code of a `KLTerm` with this meaning, off-policy with bounded importance ratios."""
    divergence, level = meaning
    choices = [f'level="{level}"'] if divergence == "reverse" else ['divergence="forward"', f'level="{level}"']
    choices += ['estimator="k3"'] if divergence == "forward" else []
    if off_policy:
        ratio = "sequence" if meaning == ("forward", "sequence") else "prefix"
        choices.append(f'weighting=ImportanceWeighting("{ratio}", bound=Truncate(2.0))')
    return f"KLTerm({', '.join(choices)})"


def _table(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("klgrad.frameworks") / f"{name}.toml").read_text(encoding="utf-8"))


def advice() -> tuple[dict[str, dict[Meaning, SettingLines]], dict[str, Home]]:
    """The settings by meaning and the homes, by framework."""
    settings: dict[str, dict[Meaning, SettingLines]] = {}
    homes: dict[str, Home] = {}
    for name, known in _table("advice").items():
        home, shared = known["home"], {"policy_loss": known.get("policy_loss", "")}
        if result := home.pop("result", None):
            home["code"] = IN_PLACE.format(**home["tensors"], result=result)
        homes[name] = Home(**home)
        settings[name] = {
            meaning: SettingLines(**shared | known[meaning[0]][meaning[1]])
            for meaning in TARGET_OF
            if meaning[1] in known.get(meaning[0], {})
        }
    return settings, homes


# A framework. What changes with its releases is in `releases.toml`.

RELEASES = _table("releases")


@dataclass(frozen=True)
class Default:
    """The default settings of a framework, with a KL.

    Attributes:
        settings: the defaults in words.
        subject: the name of the audited loss that has these settings; its recorded audit says what it descends.
    """

    settings: str
    subject: str


@dataclass(frozen=True)
class Framework:
    """One framework; its module has it as `FRAMEWORK`.

    Attributes:
        name: its name on the command line.
        distribution: the name of its installed package, or the repository of its source.
        tested: the version that was audited, or whose source was read.
        losses: makes every setting that affects the KL, as a loss to audit.
        default: its default settings.
        whole_losses: makes its policy losses; None if there are none yet.
        reader: how the files of its runs are read; None if they are not.
        files: those of its source with its formulae and their defaults, if they are transcribed; empty where its own
            code is audited.
        caveats: where its defaults do another thing than their names or its documentation say, a sentence each.
    """

    name: str
    distribution: str
    tested: str
    losses: "Callable[[], Iterable[Subject]]"
    default: Default
    whole_losses: "Callable[[], list[Subject]] | None" = None
    reader: Reader | None = None
    files: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        losses: "Callable[[], Iterable[Subject]]",
        whole_losses: "Callable[[], list[Subject]] | None" = None,
        reader: Reader | None = None,
    ) -> "Framework":
        """A framework with what `releases.toml` says of it."""
        told: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in RELEASES[name].items()}
        default = Default(told.pop("settings"), told.pop("default"))
        reader = reader and replace(reader, source=told.pop("source", ""))
        return cls(name, losses=losses, default=default, whole_losses=whole_losses, reader=reader, **told)

    @property
    def transcribed(self) -> bool:
        """Whether formulae written again from its source are audited, and not its own code."""
        return bool(self.files)

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
        return list(self.losses()) if self.transcribed else self._of_its_code(self.losses)

    def policy_losses(self) -> "list[Subject]":
        """The whole policy losses of the framework, as losses to audit with `--whole`."""
        if self.whole_losses is None:
            from . import FRAMEWORKS

            known = ", ".join(name for name, framework in FRAMEWORKS.items() if framework.whole_losses)
            raise NotAuditableError(
                "a framework whose policy losses can be audited", self.name, f"use one of: {known}; or a file:function"
            )
        return self._of_its_code(self.whole_losses)

    def _of_its_code(self, make: "Callable[[], Iterable[Subject]]") -> "list[Subject]":
        if self.installed is None:
            raise NotAuditableError(
                f"{self.name} to be installed", self.remark, "install it in the environment of klgrad"
            )
        try:
            return list(make())
        except ImportError as error:
            raise NotAuditableError(
                f"{self.name} {self.installed} to import",
                f"{self.name} {self.installed} cannot be imported here: {error}",
                "install its missing dependency, or run the audit in an environment where it imports",
            ) from error

"""What a configuration file says about the KL of a run, and how a framework says it: `Run` and `Reader`."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import RunFileError
from ..targets import Verdict

if TYPE_CHECKING:
    from ..audit import Subject


@dataclass(frozen=True)
class KLPart:
    """One KL of a run.

    Attributes:
        place: where the framework adds it.
        loss: the name of the audited loss with these settings.
        coefficient: β.
        build: makes that loss, where the framework's list of settings may not have it; None to take it from the list.
        caveat: what the audited loss leaves out.
    """

    place: Literal["loss", "reward", "advantage"]
    loss: str
    coefficient: float
    build: "Callable[[], Subject] | None" = None
    caveat: str = ""


ADAPTS = "β is adapted during training: the number below is its first value."


class Why:
    """Reasons of changes."""

    MEAN_OVER_TOKENS = "a mean over the tokens of the batch is right in large batches only"
    GROUP_STD = "the standard deviation of the group divides the KL too"
    BATCH_STD = "whitened advantages divide the KL by the standard deviation of the batch"
    CLAMPED_K3 = "k3 as a loss descends the forward KL, and a clamp on its value has no gradient beyond it"
    K3 = "k3 as a loss descends the forward KL"
    LENGTH = "it divides by the length of each completion"
    ONLY_K1 = "in the reward only k1 descends the reverse KL"
    TWO_REFERENCES = "A KL to the reference and one to the teacher are on: their gradients add up."
    NOT_AUDITED = "this estimator is not audited"
    AS_LOSS: ClassVar[dict[str, str]] = {"k1": "k1 as a loss descends nothing", "abs": "|log π/ref| is no KL"}
    CUT_K3 = "k3 as a loss descends the forward KL, and its clamp has no gradient where log π/ref is below -2.61"


@dataclass(frozen=True)
class Change:
    """One setting to change.

    Attributes:
        name: the setting.
        value: the new value.
        was: the value in this run.
        why: the reason.
        optional: whether the KL is right without it in large batches.
    """

    name: str
    value: object
    was: object
    why: str
    optional: bool = False


@dataclass(frozen=True)
class Reading:
    """What a file says.

    Attributes:
        settings: values by dotted name.
        trainer: TRL's trainer, where the script names it.
        not_literal: what a Python script has in place of a value, by name, where it is known only when it runs.
        program: the module, the file or the command that a shell script starts.
        environment: variables of the environment whose defaults were taken, by name of the setting.
        unset: variables that the script does not set, and passes on.
        unread: other words of a command that may have settings.
        notes: what was read in addition.
    """

    settings: dict[str, Any]
    trainer: str | None = None
    not_literal: dict[str, str] = field(default_factory=dict)
    program: str = ""
    environment: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reader:
    """How the settings of one framework are read.

    Attributes:
        title: its name in a sentence.
        known: the settings that matter, with their defaults.
        read: the run with given settings and, for TRL, a trainer.
        programs: the modules, files and commands that start a run.
        beginnings: how the names of settings begin that only this framework has.
        telling: names of settings that tell this framework where no other is told.
        scripts: the names of scripts that tell it likewise.
        harmless: settings with the name of a KL that do not change what is descended; one that ends in a dot stands
            for all that begin so.
        sections: how the names of further settings begin that are read.
        old: names of earlier releases, by those of today.
        old_note: what is said where they are read.
        source: where and when its formulae were read; empty where only its own code is audited.
        flags: whether a script gives settings as `--name value`, and not as `name=value`; and how words are joined.
        elsewhere: words of a command that are left unread, because they have no setting of a KL by convention.
    """

    title: str
    known: dict[str, object]
    read: "Callable[[dict[str, Any], str | None], Run]"
    programs: re.Pattern[str]
    beginnings: tuple[str, ...] = ()
    telling: tuple[str, ...] = ()
    scripts: re.Pattern[str] | None = None
    harmless: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    old: dict[str, str] = field(default_factory=dict)
    old_note: str = ""
    source: str = ""
    flags: Literal["", "_", "-"] = ""
    elsewhere: re.Pattern[str] | None = None


def under(section: str, **defaults: object) -> dict[str, object]:
    """Defaults of settings whose names begin with a section."""
    return {f"{section}{name}": value for name, value in defaults.items()}


OTHER_PROGRAMS = r"(?!.*(sft|generat|serve|tinker|eval|merge))"
"""Programs of the same packages that train by no reward."""


SEVERAL = "several updates use the same completions"
EARLIER = "completions of earlier policies are trained on"
"""Why completions are stale."""


class Run:
    """The KL of a run, which the reader of its framework fills in.

    Its settings are items: a name stands for the setting of that name or, where there is none, for that of the first
    section that has it.

    Attributes:
        framework: its name in `klgrad audit`.
        trainer: the trainer or the place in the framework, in words.
        settings: the settings that matter, with the framework's defaults where the file has none.
        given: those of them that the file has.
        values: all settings of the file.
        parts: its KLs; none if the run has no KL.
        stale: why completions are not samples of the policy that is updated; empty if they are.
        target: the reverse KL that `changes` lead to; None where no setting does.
        changes: what to change for it.
        notes: further remarks.
        overrides: those of `given` that were given beside the file.
        unread: coefficients and switches of a KL that are set and that this run never reads, with the reason.
    """

    def __init__(self, framework: str, values: dict[str, Any], known: dict[str, object], *sections: str) -> None:
        self.framework, self.values, self.sections = framework, values, ("", *sections)
        self.given = [name for name in known if name in values]
        self.settings = known | {name: as_type(name, values[name], known[name]) for name in self.given}
        self.trainer = ""
        self.target: Verdict | None = None
        self.parts: list[KLPart] = []
        self.stale: list[str] = []
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self.overrides: list[str] = []
        self.unread: dict[str, str] = {}

    def name_of(self, name: str) -> str:
        """The name with its section."""
        return next(full for section in self.sections if (full := f"{section}{name}") in self.settings)

    def __getitem__(self, name: str) -> Any:
        return self.settings[self.name_of(name)]

    def one_of(self, name: str, known: Iterable[str]) -> str:
        """A setting that is one of those known."""
        return one_of(self.name_of(name), self[name], tuple(known))

    def change(self, name: str, value: object, why: str, *, optional: bool = False) -> None:
        """Advise a value where the setting has another one."""
        if self[name] != value:
            self.changes.append(Change(self.name_of(name), value, self[name], why, optional))

    def switch_on(self, name: str, value: object, why: str) -> None:
        """Advise a value where the setting has none, is off, or is 0."""
        if not self[name]:
            self.change(name, value, why)

    def is_stale_above(self, update: str, *rows: str) -> None:
        """Completions are stale if a rollout, the product of `rows`, is larger than an update."""
        of = lambda name: f"{self.name_of(name)}={self[name]}"
        if 0 < self[update] < math.prod(self[name] for name in rows):
            self.stale.append(f"{' times '.join(map(of, rows))} above {of(update)}: {SEVERAL}")

    def is_stale_by(self, name: str, reason: str, least: int = 1) -> None:
        """Completions are stale if a setting has at least this value."""
        if self[name] >= least:
            self.stale.append(f"{self.name_of(name)}={self[name]}: {reason}")

    def is_sampled_by(self, engine: str) -> None:
        """Completions are stale, because another program samples them."""
        self.stale.append(f"sampled with {engine}, whose log-probs differ from those of the trainer")

    def of(self, trainer: str, target: Verdict | None) -> "Run":
        """This run, of a trainer; its KLs are those with a coefficient."""
        self.trainer, self.target = trainer, target
        self.parts = [part for part in self.parts if part.coefficient]
        for part in self.parts:  # the audits are of the loss with a positive coefficient
            if not part.coefficient >= 0:  # NaN is refused too
                raise RunFileError(
                    f"a coefficient of at least 0 for the KL in the {part.place}",
                    f"{part.coefficient:g}",
                    "a negative coefficient rewards distance from the reference; remove the sign, or write 0 for no KL",
                )
        return self


def as_type(name: str, value: Any, default: Any) -> Any:
    """A value of a file, where `1e-3` may be a string, as a value of the type of the default."""
    kind = type(default)
    remedy = f"write {name}: {default or 0.04 if kind is float else default}, for example"
    if isinstance(value, list | dict | tuple | set):  # never written out: aliases of YAML may make it endless
        raise RunFileError(f"{name} as one value", f"a {type(value).__name__}", remedy)
    if isinstance(value, str) and ("$" in value or "`" in value):
        hydra = "; Hydra prints all values with --cfg job --resolve" if "." in name else ""
        raise RunFileError(f"a value for {name}", repr(value), f"give it by --set {name}=VALUE{hydra}")
    if default is None or (isinstance(value, kind) and kind is not int):
        return value
    try:
        if kind is bool:
            is_trl = "." not in name
            return (BOOLEANS if is_trl else {"true": True, "false": False})[str(value).lower()]
        if kind in (int, float):
            if isinstance(value, bool) or (isinstance(value, float) and kind(value) != value):
                raise ValueError("another type")
            return kind(value)
        return str(value)
    except (KeyError, ValueError, TypeError):
        raise RunFileError(f"{name} as {KINDS[kind]}", repr(value), remedy) from None


BOOLEANS = {
    text: value for value, texts in ((True, "yes true t y 1"), (False, "no false f n 0")) for text in texts.split()
}
"""As the parser of TRL takes them; the others take true and false only."""

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    """The value, if it is one of those known."""
    if value not in known:
        raise RunFileError(f"{name} as one of {', '.join(known)}", repr(value), "correct it, or name another framework")
    return value

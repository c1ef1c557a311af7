"""Read the settings of a run from its file, and find what its KL descends.

A YAML or JSON file, or the shell or Python script that starts the run, becomes names and values. Nested names are
joined by dots, so that `actor_rollout_ref: {actor: {use_kl_loss: true}}` in a file and
`actor_rollout_ref.actor.use_kl_loss=true` in a script are the same. No file is run, and no framework is imported.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import NotAuditableError, RunFileError, UnknownNameError
from . import FRAMEWORKS, READERS, recorded
from .python_script import LOOKED_FOR, read_python
from .run_settings import Change as Change, KLPart as KLPart, Reader, Reading, Run as Run
from .shell_script import commands_of, settings_of

DATA = (".yaml", ".yml", ".json", ".toml")
MOST = 100_000
"""Values in a YAML file, with its aliases written out."""

OWN_CONFIGURATIONS = ("ppo_trainer", "ppo_megatron_trainer")
"""Configurations of verl itself, whose defaults are those of `klgrad.frameworks.verl.KNOWN`."""


def read_settings(path: Path) -> list[Reading]:
    """The settings in a file, by dotted name.

    Args:
        path: `.yaml`, `.yml`, `.json`, `.toml` or `.py`; any other file is read as a shell script.

    Returns:
        What each command of a shell script says that starts a program of Python, or the one thing that another file
        says. Values of a shell script are strings, and a flag without a value is `True`.
    """
    if path.suffix.lower() in DATA:
        return [Reading(read_data(path))]
    if path.suffix.lower() == ".py":
        return [read_python(_text(path), path)]
    reads = [settings_of(words) for words in commands_of(_text(path), path)]
    return [_with_its_file(read, path) for read in reads if read is not None]


def read_data(path: Path) -> dict[str, Any]:
    """The settings in a YAML, JSON or TOML file, by dotted name, with those of its list `defaults`, as Hydra has it."""
    settings = dict(islice(_flat(_loaded(path)), MOST + 1))
    if len(settings) > MOST:
        raise RunFileError(f"at most {MOST} values", f"{path} with aliases of more", "write the values without aliases")
    listed = settings.pop("defaults", [])
    listed = [listed] if isinstance(listed, str) else listed  # as NeMo-RL has it
    if not isinstance(listed, list):
        return settings
    if "_self_" in listed[:-1]:
        remedy = "write _self_ last, or leave it out"
        raise RunFileError("settings that its defaults do not replace", f"{path} with _self_ before others", remedy)
    base: dict[str, Any] = {}
    for entry in listed:
        if entry == "_self_" or entry in OWN_CONFIGURATIONS:
            continue
        file = path.parent / f"{entry.removesuffix('.yaml')}.yaml" if isinstance(entry, str) else None
        if file is None or not file.is_file():
            written = entry if isinstance(entry, str) else "a group of configurations"
            remedy = "write its settings into the file; Hydra prints all values with --cfg job --resolve"
            raise RunFileError("the settings of the run", f"{path} with {written} among its defaults", remedy)
        base |= read_data(file)
    return base | settings


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise RunFileError("a configuration file", f"{path}: {reason}", "give the path of the file") from error


def _loaded(path: Path) -> dict[Any, Any]:
    import yaml

    load = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix.lower(), yaml.safe_load)
    text = _text(path)
    try:
        data = load(text) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = path.suffix[1:].upper().replace("YML", "YAML")
        raise RunFileError(f"{path} as {kind}", " ".join(str(error).split()), "correct the file") from error
    if not isinstance(data, dict):
        raise RunFileError("names and values", f"{path} with {type(data).__name__}", "write `name: value` lines")
    return data


def _flat(nested: dict[object, object], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


# Which framework a configuration file is of, and the run that it starts.

LIKE_A_KL = re.compile(r"(?:^|[._])(?:kl|beta(?![a-z0-9])|estimator)")
"""A setting that may be of a KL, by its name."""

CONFIGURATION_FILES = ("config", "config_name", "config_path", "override_config_file")
"""Settings that name a file; the last one is Tunix's."""


def read_run(
    path: Path, framework: str | None = None, trainer: str | None = None, settings: dict[str, str] | None = None
) -> Run:
    """Read the configuration of a run.

    Args:
        path: a YAML or JSON file as the framework takes it, or the shell or Python script that starts the run.
            A script is not run: of a shell script the variables are resolved, and of a Python script the literals
            are read, as in `args = GRPOConfig(beta=0.04)` or, after it, `args.beta = 0.04`.
        framework: one of `READERS`; None to tell by the program that a script starts, and by the
            names of the settings.
        trainer: for TRL, `grpo` or `rloo`; None to tell by the settings.
        settings: values by name, in place of those of the file.

    Returns:
        The settings of its KL, and what to change for the reverse KL. Missing settings have the framework's defaults.
        Unknown ones are ignored.

    Raises:
        RunFileError: for a file that cannot be read, is of no known framework, has a value that cannot be, or says
            in a way that is not read what may be a setting of the KL.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "run.json"
        >>> _ = path.write_text('{"beta": 0.04, "use_bias_correction_kl": false, "loss_type": "dr_grpo"}')
        >>> run = read_run(path)
        >>> run.framework, run.trainer, [(change.name, change.value) for change in run.changes]
        ('trl', 'GRPOTrainer', [('use_bias_correction_kl', True)])
    """
    if framework is not None and framework not in READERS:
        raise UnknownNameError("framework with a configuration that can be read", framework, READERS)
    told = [(read, _framework_of(read)) for read in read_settings(path)]
    chosen = [(read, of) for read, of in told if of and framework in (None, of)]
    if not chosen and framework is not None:  # its settings are looked for in what is of no known framework
        chosen = [(read, framework) for read, of in told if of is None]
    if started := [(read, of) for read, of in chosen if READERS[of].programs.fullmatch(read.program)]:
        chosen = started  # other programs may have flags of the same names
    given = {name.replace("-", "_"): value for name, value in (settings or {}).items()}
    runs = [_run(read, of, trainer, given, path) for read, of in chosen]
    recognised = [run for run in runs if run is not None]
    if not recognised:
        raise _not_recognised(path, framework, [of for _, of in told if of and of != framework])
    if any(run.settings != recognised[0].settings for run in recognised[1:]):
        programs = " and ".join(read.program for read, _ in chosen)
        raise RunFileError("one command that starts a run", f"{path} with {programs}", "give a script with one of them")
    return recognised[0]


def _framework_of(read: Reading) -> str | None:
    """By the program that is started, the names of the settings, or the name of a script; "" for another program."""
    if read.program.startswith("klgrad "):
        remedy = "klgrad train ... --dry-run says what it descends"
        raise RunFileError("a run of another framework", f"{read.program}", remedy)
    for framework, reader in READERS.items():
        if reader.programs.fullmatch(read.program):
            return framework
    if re.match(r"(trl |openrlhf\.|verl\.|skyrl)", read.program):
        return ""  # their other commands have no KL to a reference, or another one
    names = (*read.settings, *read.not_literal)
    for framework, reader in READERS.items():
        if any(name.startswith(reader.beginnings) for name in names if reader.beginnings):
            return framework
    if read.trainer:
        return "trl"
    for framework, reader in READERS.items():
        if any(name in names for name in reader.telling) or (reader.scripts and reader.scripts.search(read.program)):
            return framework
    return None


def _not_recognised(path: Path, framework: str | None, others: list[str]) -> RunFileError:
    is_python = path.suffix.lower() == ".py"
    if framework is not None and others:
        title = READERS[others[0]].title
        received, remedy = f"{path}, which looks like {title}'s", f"klgrad advise {others[0]} --config FILE"
        return RunFileError(f"a configuration of {framework}", received, remedy)
    wanted = f"a configuration of {framework or ', '.join(READERS)}{f', {LOOKED_FOR}' if is_python else ''}"
    missing = "none of their settings of a KL" if framework else "none of their settings that no other trainer has"
    remedy = "name the framework: klgrad advise trl --config FILE"
    if is_python:
        remedy = "give the run's settings as YAML, or the shell script that starts it with its arguments"
    elif framework is not None:
        remedy = "give the file with its settings, or name the settings: --set NAME=VALUE"
    return RunFileError(wanted, f"{path} with {missing}", remedy)


def _run(read: Reading, framework: str, trainer: str | None, settings: dict[str, str], path: Path) -> Run | None:
    """The run, or None if no setting was recognised and nothing else tells what is run."""
    reader = READERS[framework]
    named, notes = _named(read.settings, framework)
    given, set_notes = _named(settings, framework)
    for name in given:
        if name not in reader.known and not name.startswith(reader.sections):
            raise UnknownNameError("setting", name, reader.known)
    _refuse_unread(read, framework, named, given)
    of_program = re.search(r"(grpo|rloo)[^./]*(\.py)?$", read.program)  # TRL's trainer, by the command or the script
    run = reader.read({**named, **given}, trainer or read.trainer or (of_program[1] if of_program else None))
    is_told = read.trainer or reader.programs.fullmatch(read.program)
    is_told = is_told or any(name.startswith(reader.beginnings) for name in named if reader.beginnings)
    if not run.given and not is_told:
        return None
    if any(name in reader.old for name in read.settings):
        run.changes = _with_old_names(run.changes, reader)
    literal = [note for note in read.notes if not note.startswith("`") or note.split("`")[1] in run.settings]
    outside = _from_outside(read, reader, named, run, given)
    run.notes += [*notes, *set_notes, *literal, *outside]
    run.overrides = [name for name in run.given if name in given]
    return run


def _named(settings: dict[str, Any], framework: str) -> tuple[dict[str, Any], list[str]]:
    """The settings by the names that they have today, with `no_x` as x = False."""
    reader, named, notes = READERS[framework], {}, []
    for name, value in settings.items():
        positive = name.removeprefix("no_")
        if name in reader.old:
            named[reader.old[name]] = value
            notes = [reader.old_note]
        elif name not in reader.known and positive != name and isinstance(reader.known.get(positive), bool):
            named[positive] = False
        else:
            named[name] = value
    return named, notes


def _with_old_names(changes: list[Change], reader: Reader) -> list[Change]:
    """The changes by the names that an earlier release has."""
    old = {new: name for name, new in reader.old.items()}
    renamed = lambda change: {"name": old[change.name]}
    late = lambda change: {"why": f"{change.why}; releases with the old flags lack it"}
    return [replace(x, **(renamed(x) if x.name in old else late(x))) for x in changes]


def _refuse_unread(read: Reading, framework: str, named: dict[str, object], given: dict[str, object]) -> None:
    """Refuse what may be a setting of the KL and is not read."""
    reader = READERS[framework]
    remedy = "give it by --set NAME=VALUE, or remove it if it is none"
    open_values = {name: text for name, text in read.not_literal.items() if name in reader.known and name not in given}
    if open_values:
        written = ", ".join(f"{name}={text}" for name, text in open_values.items())
        values = " ".join(f"--set {name}=VALUE" for name in open_values)
        raise RunFileError("values that are known without running the script", written, f"add {values}")
    for name, value in {**dict.fromkeys(read.not_literal), **named}.items():
        is_known = name in reader.known
        if not is_known and value not in (None, "") and any(other.startswith(name) for other in reader.known):
            raise RunFileError("each setting by its whole name", f"{name}, the beginning of others", remedy)
        if name in names_like_a_kl([name], framework):
            raise RunFileError(f"settings of {reader.title} that are known", f"{name}, which may be of a KL", remedy)
    for word in read.unread:
        if reader.elsewhere and reader.elsewhere.fullmatch(word):
            continue
        remedy = f"what is in {word} is not read; write it out"
        raise RunFileError("arguments that are written in the script", word, remedy)


def _from_outside(read: Reading, reader: Reader, named: dict[str, Any], run: Run, given: dict[str, Any]) -> list[str]:
    """Notes on variables of the environment and on the script's arguments."""
    notes = []
    for name, variables in read.environment.items():
        today = reader.old.get(name, name)
        if variables and today in run.settings and today in named and today not in given:
            others = " or ".join(f"${variable}" for variable in dict.fromkeys(variables))
            notes.append(f"`{today}` is {named[today]} unless {others} is another.")
    notes += [f"What is in {word} is not read: it is no setting of a KL by convention." for word in read.unread]
    unset = " and ".join(dict.fromkeys(read.unset))
    return notes + [f"The script does not set {unset}: settings in it are not read."] * bool(unset)


def _with_its_file(read: Reading, path: Path) -> Reading:
    """With the settings of the file that a command names; those of the command hold."""
    is_hydra = any(name in read.settings for name in ("config_name", "config_path", "config_dir"))
    name = read.settings.get("config_name" if is_hydra else "config") or read.settings.get("override_config_file")
    if name is None and not is_hydra:
        return read
    file = str(name)
    if is_hydra:
        folder = read.settings.get("config_path") or read.settings.get("config_dir")
        own = str(name or "ppo_trainer").removesuffix(".yaml")
        if folder in (None, "config", "./config") and own in OWN_CONFIGURATIONS and _framework_of(read) == "verl":
            return read
        file = f"{folder}/{own}.yaml" if folder else f"{own}.yaml"
    base_file = _beside(file, path)
    if base_file is None:
        remedy = "give that file by --config, and what the script changes by --set NAME=VALUE"
        raise RunFileError("the settings of the run", f"{file}: what is in {file} is not read", remedy)
    own_settings = {n: x for n, x in read.settings.items() if n not in CONFIGURATION_FILES}
    note = f"With the settings of {base_file}."
    return replace(read, settings={**read_data(base_file), **own_settings}, notes=(*read.notes, note))


def _beside(file: str, path: Path) -> Path | None:
    """The file, from the current folder, that of the script, or one above it: scripts are started from one of them."""
    if "$" in file or "`" in file:
        return None
    folders = [Path.cwd(), *path.resolve().parents]
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def names_like_a_kl(names: Iterable[str], framework: str) -> list[str]:
    """The names that look like those of a KL, and are neither known nor harmless."""
    reader = READERS[framework]
    known = (*reader.known, *reader.harmless)
    read = (*reader.sections, *(name for name in reader.harmless if name.endswith(".")))
    return [name for name in names if LIKE_A_KL.search(name) and name not in known and not name.startswith(read)]


# What each KL of a run descends: by the audit of the installed framework, or as it was recorded.


@dataclass(frozen=True)
class PartAudit:
    """What one KL of a run descends.

    Attributes:
        part: the KL.
        verdict, verdict_off_policy: on fresh and on stale samples; empty if these settings were never audited.
        holds: `always` if the first holds in batches of every size, or `large-batches`; None for `unknown`.
        words, words_off_policy: the verdicts in words.
        source: where the verdicts are from.
        advice: what the audit advises; empty for a recorded one.
        notes: the notes of the audit.
        parts: the parts of the loss, as labels and sentences; empty for a recorded audit.
    """

    part: KLPart
    verdict: str
    verdict_off_policy: str
    holds: str | None
    words: str
    words_off_policy: str
    source: str
    advice: str = ""
    notes: str = ""
    parts: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        part = {"place": self.part.place, "loss": self.part.loss, "beta": self.part.coefficient}
        audit = {name: value for name, value in vars(self).items() if name not in ("part", "parts")}
        return {**part, "caveat": self.part.caveat, **audit, "parts": dict(self.parts)}


def find(run: Run) -> list[PartAudit]:
    """Audit each KL of a run with the installed framework; take the recorded audit where it is not installed.

    Args:
        run: the run, of `read_run`.

    Returns:
        One finding for each of its KLs.
    """
    return [_audited(run, part) or _recorded(run, part) for part in run.parts]


def _audited(run: Run, part: KLPart) -> PartAudit | None:
    framework, reader = FRAMEWORKS.get(_owner(part)), READERS[run.framework]
    own_code = framework is not None and framework.installed is not None
    if not own_code and not (part.build and reader.source):
        return None
    import torch

    from ..audit import audit
    from ..audit.advice import findings
    from ..audit.sentences import report, summary

    torch.set_num_threads(1)  # the tensors are too small for threads to help
    try:
        own = own_code and (reader.source or not part.build)  # a transcription yields to the code itself
        listed = {x.name: x for x in framework.subjects()}.get(part.loss) if own and framework else None
        is_own_code = listed is not None or not reader.source
        listed = part.build() if listed is None and part.build else listed
    except (NotAuditableError, ImportError):
        return None
    if listed is None:
        return None
    r = audit(listed)
    if is_own_code and framework is not None:
        source = f"audited here with {framework.name} {framework.installed}"
    else:
        source = f"audited here: its formula, transcribed from {reader.title} {FRAMEWORKS[run.framework].tested}"
    words = summary(r.anatomy), summary(r.anatomy, on_policy=False)
    parts = tuple(report(r.anatomy)) if r.anatomy else ()
    verdicts = (r.verdict, r.verdict_off_policy, r.holds)
    return PartAudit(part, *verdicts, *words, source, str(r.advice), "; ".join(findings(r)), parts)


def _owner(part: KLPart) -> str:
    """The framework whose loss it is: that of Axolotl's synchronous trainer is TRL's."""
    return part.loss.split()[0]


def _recorded(run: Run, part: KLPart) -> PartAudit:
    known = recorded(_owner(part))
    if known is None or part.loss not in known.verdicts:
        # Without `build` the framework's list has all that can be audited, installed or not.
        remedy = f"install {_owner(part)} to audit these settings" if part.build else "no audit has these settings"
        return PartAudit(part, "", "", None, "", "", f"not audited: {remedy}")
    notes = next(row[-1] for row in known.rows if row[0] == part.loss)
    source = f"recorded on {known.date} with {known.framework} {known.version}"
    return PartAudit(part, *known.verdicts[part.loss], *known.words[part.loss], source, notes=notes)

"""Which framework a configuration file is of, and its reader."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import RunFileError, UnknownNameError
from . import of_openrlhf, of_skyrl, of_trl, of_verl
from .mistyped import mistyped
from .of_verl_declared import PREFIX
from .python_script import LOOKED_FOR
from .reading import DATA, Read, loaded, read_data, read_settings
from .run import Run


@dataclass(frozen=True)
class Reader:
    """How the settings of one framework are read.

    Attributes:
        title: its name in a sentence.
        known: the settings that matter, with their defaults.
        harmless: settings with the name of a KL that do not change what is descended.
        beginnings: how the names of settings begin that only this framework has.
        programs: the modules, files and commands that start a run.
        read: the run with given settings and, for TRL, a trainer.
    """

    title: str
    known: dict[str, Any]
    harmless: tuple[str, ...]
    beginnings: tuple[str, ...]
    programs: re.Pattern[str]
    read: Callable[[dict[str, Any], str | None], Run]


OTHER = r"(?!.*(sft|generat|serve|tinker|eval|merge))"
"""Programs of the same packages that train by no reward."""

READERS = {
    "verl": Reader(
        "verl",
        of_verl.DEFAULTS,
        of_verl.HARMLESS,
        ("actor_rollout_ref.", "algorithm."),
        re.compile(rf"{OTHER}((verl|recipe)[./](.*[./_])?|.*/)?main(_\w+)?(\.py)?"),
        lambda given, _: of_verl.verl_run(given),
    ),
    "skyrl": Reader(
        "SkyRL",
        of_skyrl.DEFAULTS,
        of_skyrl.HARMLESS,
        ("trainer.algorithm.",),
        re.compile(rf"{OTHER}skyrl(_train)?[./].*"),
        lambda given, _: of_skyrl.skyrl_run(given),
    ),
    "openrlhf": Reader(
        "OpenRLHF",
        of_openrlhf.DEFAULTS,
        of_openrlhf.HARMLESS,
        ("algo.kl.", "algo.advantage.", *of_openrlhf.ONLY_OLD),
        re.compile(r"(.*[./])?train_ppo(_ray)?(\.py)?"),
        lambda given, _: of_openrlhf.openrlhf_run(given),
    ),
    "trl": Reader(
        "TRL",
        of_trl.GRPO | of_trl.RLOO,
        (),
        (),
        re.compile(r"trl (grpo|rloo)|trl[./]scripts[./](grpo|rloo)(\.py)?"),
        of_trl.trl_run,
    ),
}
"""By framework, in the order in which names are looked at."""

LIKE_A_KL = re.compile(r"(?:^|[._])(?:kl|beta(?![a-z0-9])|estimator)")
"""A setting that may be of a KL, by its name."""

OF_A_TRAINER = re.compile(r"(grpo|gspo|rloo)\w*\.py$|\.\w*(grpo|gspo|rloo)\w*$")
"""A script that trains with TRL, by its name."""

OWN_CONFIGURATIONS = ("ppo_trainer", "ppo_megatron_trainer")
"""Configurations of verl itself, whose defaults are those of `of_verl.DEFAULTS`."""


def read_run(
    path: Path, framework: str | None = None, trainer: str | None = None, settings: dict[str, str] | None = None
) -> Run:
    """Read the configuration of a run.

    Args:
        path: a YAML or JSON file as the framework takes it, or the shell or Python script that starts the run.
            A script is not run: of a shell script the variables are resolved, and of a Python script the literals
            are read, as in `args = GRPOConfig(beta=0.04)` or, after it, `args.beta = 0.04`.
        framework: `trl`, `verl`, `openrlhf` or `skyrl`; None to tell by the program that a script starts, and by the
            names of the settings.
        trainer: for TRL, `grpo` or `rloo`; None to tell by the settings.
        settings: values by name, in place of those of the file.

    Returns:
        The settings of its KL, and what to change for the reverse KL. Missing settings have the framework's defaults.
        Unknown ones are ignored, with a note for names that are close to one that matters.

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
    reads = [_with_files(read, path) for read in read_settings(path)]
    told = [(read, _framework_of(read)) for read in reads]
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


def _framework_of(read: Read) -> str | None:
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
    if read.trainer or any(name in names for name in (*of_trl.TELLING, *of_trl.OWN_FIELDS)):
        return "trl"
    return "trl" if OF_A_TRAINER.search(read.program) else None


def _not_recognised(path: Path, framework: str | None, others: list[str]) -> RunFileError:
    is_python = path.suffix.lower() == ".py"
    if framework is not None and others:
        title = READERS[others[0]].title
        received, remedy = f"{path}, which looks like {title}'s", f"klgrad advise {others[0]} --config FILE"
        return RunFileError(f"a configuration of {framework}", received, remedy)
    wanted = f"a configuration of {framework or ', '.join(READERS)}{f', {LOOKED_FOR}' if is_python else ''}"
    remedy = "name the framework: klgrad advise trl --config FILE"
    if is_python:
        remedy = "give the run's settings as YAML, or the shell script that starts it with its arguments"
    elif framework is not None:
        remedy = "give the file with its settings, or name the settings: --set NAME=VALUE"
    return RunFileError(wanted, f"{path} with none of their settings of a KL", remedy)


def _run(read: Read, framework: str, trainer: str | None, settings: dict[str, str], path: Path) -> Run | None:
    """The run, or None if no setting was recognised and nothing else tells what is run."""
    reader = READERS[framework]
    named, notes = _named(read.settings, framework)
    given, set_notes = _named(settings, framework)
    for name in given:
        if name not in reader.known and not name.startswith(PREFIX):
            raise UnknownNameError("setting", name, reader.known)
    _refuse_unread(read, framework, named, given)
    found = reader.read({**named, **given}, trainer or read.trainer or _trainer(read.program))
    is_told = read.trainer or reader.programs.fullmatch(read.program)
    is_told = is_told or any(name.startswith(reader.beginnings) for name in named if reader.beginnings)
    if not found.given and not is_told:
        return None
    old = [name for name in read.settings if name in of_openrlhf.OLD] if framework == "openrlhf" else []
    if old:
        found = replace(found, changes=of_openrlhf.with_old_names(found.changes))
    near = mistyped((*named, *read.not_literal), found.settings)
    literal = [note for note in read.notes if not note.startswith("`") or note.split("`")[1] in found.settings]
    outside = _from_outside(read, named, found, given)
    return replace(
        found,
        notes=(*found.notes, *notes, *set_notes, *literal, *outside, *near),
        overrides=tuple(name for name in found.given if name in given),
    )


def _trainer(program: str) -> str | None:
    """TRL's trainer, by the command or the script."""
    found = re.search(r"(grpo|rloo)[^./]*(\.py)?$", program)
    return found[1] if found else None


def _named(settings: dict[str, Any], framework: str) -> tuple[dict[str, Any], list[str]]:
    """The settings by the names that they have today, with `no_x` as x = False."""
    known, found, notes = READERS[framework].known, {}, []
    for name, value in settings.items():
        positive = name.removeprefix("no_")
        if framework == "openrlhf" and name in of_openrlhf.OLD:
            found[of_openrlhf.OLD[name]] = value
            notes = [of_openrlhf.OLD_NAMES]
        elif name not in known and positive != name and isinstance(known.get(positive), bool):
            found[positive] = False
        else:
            found[name] = value
    return found, notes


def _refuse_unread(read: Read, framework: str, named: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse what may be a setting of the KL and is not read."""
    reader = READERS[framework]
    remedy = "give it by --set NAME=VALUE, or remove it if it is none"
    open_values = {name: text for name, text in read.not_literal.items() if name in reader.known and name not in given}
    if open_values:
        written = ", ".join(f"{name}={text}" for name, text in open_values.items())
        values = " ".join(f"--set {name}=VALUE" for name in open_values)
        raise RunFileError("values that are known without running the script", written, f"add {values}")
    for name, value in named.items():
        if any(other.startswith(f"{name}.") for other in reader.known) and value not in (None, ""):
            raise RunFileError(f"each setting of {name} by its own name", f"{name} as a whole", f"{remedy}")
        if name in names_like_a_kl([name], framework):
            near = mistyped([name], reader.known)
            meant = f"; {near[0].partition('; ')[2]}" if near else ""
            received = f"{name}, which may be of a KL"
            raise RunFileError(f"settings of {reader.title} that are known", received, f"{remedy}{meant}")
    for word in read.unread:
        if not re.fullmatch(r"\$\{?\w+(:?[-+][^}]*)?\}?", word) or re.fullmatch(r"\$\{?[\d@*].*", word):
            raise RunFileError(
                "arguments that are written in the script", word, f"what is in {word} is not read; write it out"
            )


def _from_outside(read: Read, named: dict[str, Any], run: Run, given: dict[str, Any]) -> list[str]:
    """Notes on variables of the environment."""
    old = {name: of_openrlhf.OLD.get(name, name) for name in read.environment}
    used = {
        old[name]: variables
        for name, variables in read.environment.items()
        if variables and old[name] in run.settings and old[name] not in given
    }
    notes = [
        f"`{name}` is {named[name]} unless the environment has another {' or '.join(dict.fromkeys(variables))}."
        for name, variables in used.items()
        if name in named
    ]
    unset = " and ".join(dict.fromkeys(read.unread))
    return [*notes, *([f"The script does not set {unset}: settings in it are not read."] if unset else [])]


def _with_files(read: Read, path: Path) -> Read:
    """With the settings of the files that a command or a list of defaults names; those of the command hold."""
    if path.suffix.lower() == ".py":
        return read
    if path.suffix.lower() in DATA:
        base = _defaults(path) if any(name == "defaults" for name in read.settings) else {}
        return replace(read, settings={**base, **{n: x for n, x in read.settings.items() if n != "defaults"}})
    told = _framework_of(read)
    is_hydra = any(name in read.settings for name in ("config_name", "config_path", "config_dir"))
    name = read.settings.get("config_name" if is_hydra else "config")
    if name is None and not is_hydra:
        return read
    folder = read.settings.get("config_path") or read.settings.get("config_dir")
    if is_hydra:
        own = str(name or "ppo_trainer").removesuffix(".yaml")
        if folder in (None, "config", "./config") and own in OWN_CONFIGURATIONS and told == "verl":
            return read
        file = f"{folder}/{own}.yaml" if folder else f"{own}.yaml"
    else:
        file = str(name)
    found = _beside(file, path)
    if found is None:
        remedy = "give that file by --config, and what the script changes by --set NAME=VALUE"
        raise RunFileError("the settings of the run", f"{file}: what is in {file} is not read", remedy)
    base = {**(_defaults(found) if is_hydra else {}), **read_data(found)}
    own_settings = {n: x for n, x in read.settings.items() if n not in ("config", "config_name", "config_path")}
    note = f"With the settings of {found}."
    return replace(read, settings={**base, **own_settings}, notes=(*read.notes, note))


def _beside(file: str, path: Path) -> Path | None:
    """The file, from the current folder, that of the script, or one above it: scripts are started from one of them."""
    if "$" in file or "`" in file:
        return None
    folders = [Path.cwd(), *path.resolve().parents]
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def _defaults(path: Path) -> dict[str, Any]:
    """The settings of the configurations in the list `defaults` of a file of Hydra."""
    listed = loaded(path.read_text(encoding="utf-8"), path).get("defaults")
    found: dict[str, Any] = {}
    if not isinstance(listed, list):
        return found
    if "_self_" in listed[:-1]:
        remedy = "write _self_ last, or leave it out"
        raise RunFileError("settings that its defaults do not replace", f"{path} with _self_ before others", remedy)
    for entry in listed:
        if entry == "_self_" or entry in OWN_CONFIGURATIONS:
            continue
        file = path.parent / f"{entry}.yaml" if isinstance(entry, str) else None
        if file is None or not file.is_file():
            written = entry if isinstance(entry, str) else "a group of configurations"
            remedy = "write its settings into the file; Hydra prints all values with --cfg job --resolve"
            raise RunFileError("the settings of the run", f"{path} with {written} among its defaults", remedy)
        found |= {**_defaults(file), **read_data(file)}
    return found


def names_like_a_kl(names: Iterable[str], framework: str) -> list[str]:
    """The names that look like those of a KL, and are neither known nor harmless."""
    reader = READERS[framework]
    known = (*reader.known, *reader.harmless, *of_trl.OWN_FIELDS)  # the last are refused with a remedy of their own
    declared = PREFIX if framework == "verl" else " "
    return [name for name in names if LIKE_A_KL.search(name) and name not in known and not name.startswith(declared)]

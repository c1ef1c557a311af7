"""Hold what `klgrad advise --config` reads of the frameworks' files against what the frameworks' parsers make of them.

    python scripts/hunt/run_files.py CLONES [--show]

CLONES is a folder with clones of the repositories of SOURCES, named owner+name, bare or not, with these commits. No
file of theirs is in this repository. A shell script is run by bash itself, with a search path of stand-ins that write
their arguments down in place of `python`, `accelerate` and the like. Those arguments go to the framework's own parser:
TRL's to `HfArgumentParser` and `TrlParser`, verl's to Hydra with verl's configuration, OpenRLHF's to its argparse,
SkyRL's to OmegaConf with its dataclasses. Python scripts run with stand-ins for what they import.

Frameworks that are not installed are left out: run it in both environments. For every setting that the advice is about
the two must agree; a file that is refused with a reason is counted apart. The exit status is 1 if one is wrong.
"""

import argparse
import ast
import dataclasses
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from klgrad.errors import KlgradError
from klgrad.frameworks.harness import _StandIn, _StandInFinder, path_of
from klgrad.frameworks.openrlhf import OLD
from klgrad.frameworks.run_file import read_run

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
# (each framework is in one of two environments)

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """Files of one repository.

    Attributes:
        repository: owner/name.
        commit: the commit of the files.
        files: which files.
        package: what must be installed.
        framework: its name for `klgrad advise`.
        program: the word of a command after which the arguments of a run begin.
    """

    repository: str
    commit: str
    files: str
    package: str
    framework: str
    program: str


OPENRLHF = r"examples/scripts/train_(ppo|dapo|prorl|reinforce|vlm).*\.sh"
SOURCES = (
    Source(
        "huggingface/trl",
        "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        r"examples/scripts/(\w*/)?\w*(grpo|gspo|rloo)\w*\.py|examples/scripts/openenv/\w+\.py",
        "trl",
        "trl",
        r".*\.py",
    ),
    Source(
        "huggingface/open-r1",
        "1416fa0cf21595d2083b399a2a0bbddd7f6e9563",
        r"recipes/.*/grpo/.*\.yaml|slurm/train\.slurm",
        "trl",
        "trl",
        r".*\.py",
    ),
    Source(
        "volcengine/verl",
        "b178a3cd56f58b2d502255daba591e92833930a7",
        r"(examples|tests/special_e2e)/.*\.sh|examples/sglang_multiturn/config/\w+\.yaml",
        "verl",
        "verl",
        r"(verl|recipe)\..*main.*|.*main_ppo.*",
    ),
    Source(
        "OpenRLHF/OpenRLHF",
        "3c3be6234e0cb353e76bb8019947db9dfe99fca7",
        OPENRLHF,
        "openrlhf",
        "openrlhf",
        r"openrlhf\.cli\..*",
    ),
    Source(  # the last commit with flags without dots
        "OpenRLHF/OpenRLHF",
        "ed62d0e20dea08397251eba5e010ee9dabc4d048^",
        OPENRLHF,
        "openrlhf",
        "openrlhf",
        r"openrlhf\.cli\..*",
    ),
    Source(
        "NovaSky-AI/SkyRL",
        "a9564572eb8e91076be43c1bd5e4615e3de17265",
        r"examples/train/.*/run_.*\.sh",
        "skyrl",
        "skyrl",
        r"(examples|skyrl|integrations)\..*|.*(entrypoint|main)\w*\.py",
    ),
)

STAND_INS = ("python", "python3", "accelerate", "trl", "torchrun", "deepspeed", "uv", "ray")
"""Commands that write their arguments down."""

HARMLESS = (
    "bash", "date", "dirname", "basename", "cat", "head", "tail", "tee", "sed", "awk", "grep", "realpath", "wc", "tr",
    "cut", "seq",
)  # fmt: skip
"""Commands that scripts compute values with."""

TEXTS = r"^(examples|recipes?|slurm|tests/special_e2e|\w+/trainer/config|openrlhf/cli)/.*\.(sh|slurm|yaml|py|txt)$"
"""Files that a script may need."""


class Unknown(Exception):
    """The parser of the framework, or bash, has no answer."""


def arguments_of(script: Path, tree: Path, program: str) -> list[list[str]]:
    """What bash passes to the programs that match, in a search path of stand-ins."""
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "log"
        for command in STAND_INS:
            (folder / command).write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >> {log}; printf "\\n\\0" >> {log}\n')
            (folder / command).chmod(0o755)
        (folder / "srun").write_text('#!/bin/bash\nwhile [ $# -gt 0 ] && [ "$1" != bash ]; do shift; done; "$@"\n')
        (folder / "srun").chmod(0o755)
        for command in HARMLESS:
            (folder / command).symlink_to(shutil.which(command) or "/bin/true")
        # A command that is missing, or a variable that the environment would have, does not end the script.
        start = 'command_not_found_handle() { return 0; }\nset() { builtin set "$@"; builtin set +eu; }\n'
        (folder / "start").write_text(start)
        environment = {"PATH": name, "HOME": name, "BASH_ENV": str(folder / "start")}
        command = [shutil.which("bash") or "bash", str(script.relative_to(tree))]
        try:
            subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, timeout=20, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            raise Unknown("bash does not end") from error
        calls = log.read_text().split("\n\0") if log.exists() else []
    found = []
    for call in calls:
        words = call.split("\0")[:-1]
        place = next((i for i, word in enumerate(words) if re.fullmatch(program, word)), None)
        if place is not None:
            found.append(words[place + 1 :])
    return found


def of_trl(arguments: list[str], tree: Path, trainer: str) -> Settings:
    """By TRL's own parser."""
    import trl
    from trl.scripts.utils import TrlParser

    config = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[trainer]

    @dataclasses.dataclass
    class OnCPU(config):  # the checks of hardware are left out
        def __post_init__(self) -> None:
            pass

    here = Path.cwd()
    os.chdir(tree)
    try:
        parsed: Any = TrlParser([cast("Any", OnCPU)]).parse_args_and_config(arguments, return_remaining_strings=True)[0]
    finally:
        os.chdir(here)
    return dict(vars(parsed))


def of_python(script: Path, trainer: str) -> Settings:
    """By the call of the configuration when the script runs."""
    import datasets
    import trl

    given: list[Settings] = []

    class Stop(Exception):
        pass

    def record(*_: Any, **settings: Any) -> None:
        given.append(settings)
        raise Stop

    config = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[trainer]
    name, finder = config.__name__, _Anything(())
    kept, arguments = (getattr(trl, name), trl.GRPOTrainer, trl.RLOOTrainer, datasets.load_dataset), sys.argv
    setattr(trl, name, record)
    datasets.load_dataset = _load_dataset
    sys.argv = [str(script)]
    sys.meta_path.append(finder)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Stop:
        pass
    except (Exception, SystemExit) as error:
        raise Unknown(f"{type(error).__name__}: {error}") from error
    finally:
        setattr(trl, name, kept[0])
        datasets.load_dataset = kept[-1]
        sys.argv = arguments
        sys.meta_path.remove(finder)
        for module in finder.made:
            sys.modules.pop(module, None)
    if not given:
        raise Unknown("no configuration is made")
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {**defaults, **given[0]}


def _load_dataset(*_: Any, split: Any = None, **__: Any) -> Any:
    return [_StandIn("data") for _ in split] if isinstance(split, list) else _StandIn("data")


class _Anything(_StandInFinder):
    """Finds a stand-in for every module that nothing else finds."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec:
        return ModuleSpec(fullname, self, is_package=True)


def of_verl(arguments: list[str], tree: Path) -> Settings:
    """By Hydra, with the configuration of the installed verl."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config-name", default="ppo_trainer")
    parser.add_argument("--config-path", default="config")
    flags, overrides = parser.parse_known_args(arguments)
    own = path_of("verl", "verl/trainer/config/ppo_trainer.yaml").parent
    folder = own if flags.config_path in ("config", "./config") else tree / flags.config_path
    known = [re.sub(r"^\+*(?=[\w.]+\.[\w.]+=)", "++", word) for word in overrides if "=" in word]
    with initialize_config_dir(str(Path(folder).resolve()), version_base=None):
        composed = compose(
            flags.config_name.removesuffix(".yaml"),
            [*known, f"hydra.searchpath=[file://{own}]"],
            return_hydra_config=False,
        )
    return _flat(OmegaConf.to_container(composed, resolve=False))


def of_skyrl(arguments: list[str], _: Path) -> Settings:
    """By OmegaConf, over the defaults of SkyRL's dataclasses."""
    from omegaconf import OmegaConf

    defaults = _skyrl_defaults()
    return {**defaults, **_flat(OmegaConf.to_container(OmegaConf.from_cli([x for x in arguments if "=" in x])))}


@cache
def _skyrl_defaults() -> Settings:
    finder = _Anything(())
    sys.meta_path.append(finder)
    try:
        from skyrl.train.config.config import AlgorithmConfig, TrainerConfig

        trainer = {field.name: field.default for field in dataclasses.fields(TrainerConfig)}
        algorithm = {field.name: field.default for field in dataclasses.fields(AlgorithmConfig)}
    finally:
        sys.meta_path.remove(finder)
        for module in finder.made:
            sys.modules.pop(module, None)
    return _flat({"trainer": {**trainer, "algorithm": algorithm}})


def of_openrlhf(arguments: list[str], tree: Path) -> Settings:
    """By the argparse of `train_ppo_ray`: the installed one, or that of the commit for flags of its time."""
    is_old = any(word.lstrip("-").partition("=")[0] in OLD for word in arguments)
    file = tree / "openrlhf/cli/train_ppo_ray.py"
    text = file.read_text() if is_old else path_of("openrlhf", "openrlhf/cli/train_ppo_ray.py").read_text()
    main = next(node for node in ast.parse(text).body if isinstance(node, ast.If))
    last = next(i for i, node in enumerate(main.body) if "parse_args()" in ast.unparse(node))
    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime, "__name__": "parser"}
    exec(compile(ast.Module(main.body[:last], []), str(file), "exec"), names)
    parsed: Settings = vars(names["parser"].parse_known_args(arguments)[0])
    return {OLD.get(name, name) if is_old else name: value for name, value in parsed.items()}


def _flat(nested: Any, before: str = "") -> Settings:
    if not isinstance(nested, dict):
        return {before.removesuffix("."): nested}
    return {name: value for key, inner in nested.items() for name, value in _flat(inner, f"{before}{key}.").items()}


def command_in(script: Path) -> str | None:
    """The command that the first string of a Python script shows, if its settings come from the command line."""
    text = script.read_text()
    found = re.search(
        r"^(?:accelerate launch|python|trl|CUDA\S* ).*(?:\\\n.*)*", ast.get_docstring(ast.parse(text)) or "", re.M
    )
    return found[0] if found and "TrlParser" in text else None


def expected(source: Source, file: Path, tree: Path) -> list[Settings]:
    """What the framework's own parser makes of each run that a file starts."""
    if file.suffix == ".py":
        return [of_python(file, "rloo" if "rloo" in file.name else "grpo")]
    if source.framework == "trl":
        trainer = "rloo" if "rloo" in file.name else "grpo"
        calls = [["--config", str(file)]] if file.suffix == ".yaml" else arguments_of(file, tree, source.program)
        return [of_trl(call, tree, trainer) for call in calls]
    parse = {"verl": of_verl, "skyrl": of_skyrl, "openrlhf": of_openrlhf}[source.framework]
    if file.suffix == ".yaml":
        calls = [["--config-path", str(file.parent), "--config-name", file.stem]]
    else:
        calls = arguments_of(file, tree, source.program)
    return [parse(call, tree) for call in calls]


def differences(read: Settings, parsed: Settings) -> list[str]:
    """The settings that are not the same."""
    found = []
    for name, value in read.items():
        other = parsed.get(name, False if name == "algo.kl.unbiased_gradient" else None)  # which old releases lack
        if type(value) in (int, float) and isinstance(other, str):  # which the framework makes a number of, by its type
            other = type(value)(other)
        if value != other and str(value) != str(other):
            found.append(f"{name}: read {value!r}, the framework has {other!r}")
    return found


def judged(source: Source, file: Path, tree: Path) -> tuple[str, str]:
    """`right`, `wrong`, `refused` or `unknown`, with the reason."""
    here = Path.cwd()
    os.chdir(tree)
    try:
        run = read_run(file.relative_to(tree), source.framework)
    except KlgradError as error:
        return "refused", str(error)
    finally:
        os.chdir(here)
    try:
        parsed = expected(source, file, tree)
    except (Exception, SystemExit) as error:
        return "unknown", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not parsed:
        return "unknown", "bash starts no run"
    wrong = [difference for one in parsed for difference in differences(run.settings, one)]
    return ("wrong", "; ".join(wrong)) if wrong else ("right", "")


def extracted(source: Source, clones: Path, root: Path) -> tuple[Path, list[Path]]:
    """The tree of a commit, and its files to look at."""
    clone = clones / source.repository.replace("/", "+")
    git = next((x for x in (clone / ".git", clone / "repo", clone) if (x / "HEAD").exists()), clone)
    tree = root / f"{clone.name}-{source.commit[:7]}"
    listed = _git(git, "ls-tree", "-r", "--name-only", source.commit).decode().splitlines()
    for path in [x for x in listed if re.search(TEXTS, x)]:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(_git(git, "show", f"{source.commit}:{path}"))
    files = sorted(x for x in tree.rglob("*") if x.is_file() and re.fullmatch(source.files, str(x.relative_to(tree))))
    for file in [x for x in files if x.suffix == ".py"]:
        if command := command_in(file):  # as somebody would save it
            files[files.index(file)] = file.with_suffix(".sh")
            file.with_suffix(".sh").write_text(command + "\n")
    return tree, files


def _git(git: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", f"--git-dir={git}", *arguments], capture_output=True, check=True).stdout


def main() -> None:
    """Judge every file, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path)
    parser.add_argument("--show", action="store_true", help="name the files that are right, too")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="klgrad-hunt-"))
    total: dict[str, int] = dict.fromkeys(("right", "refused", "unknown", "wrong"), 0)
    for source in SOURCES:
        if find_spec(source.package) is None:
            print(f"{source.repository}: {source.package} is not installed")
            continue
        tree, files = extracted(source, given.clones.resolve(), root)
        counts: dict[str, int] = dict.fromkeys(total, 0)
        for file in files:
            verdict, reason = judged(source, file, tree)
            counts[verdict] += 1
            total[verdict] += 1
            if verdict != "right" or given.show:
                print(f"{verdict:8} {file.relative_to(root)}: {reason}")
        print(f"{source.repository} {source.commit[:7]}: {len(files)} files, {counts}")
    shutil.rmtree(root, ignore_errors=True)
    print(f"{sum(total.values())} files, {total}")
    sys.exit(1 if total["wrong"] else 0)


if __name__ == "__main__":
    main()

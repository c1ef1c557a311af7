"""What the commands print, kept in tests/goldens: `python scripts/goldens.py [NAME...]` writes it, `--check` compares.

A change of the code that should change no behaviour leaves all of them as they are; another change regenerates them,
and its commit shows what is different. Numbers in JSON are rounded to `DIGITS` significant digits, and those below
`ZERO` are 0: more digits differ between versions of torch and between processors.
"""

import contextlib
import difflib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "goldens"
DIGITS = 5
ZERO = 1e-8
LONG = 8
"""Longer lists and dictionaries of numbers are summed up."""
ENVIRONMENT = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
COMMANDS = (
    "audit",
    "advise",
    "convert",
    "frameworks",
    "logs",
    "diagnose",
    "report",
    "reproduce",
    "train",
    "distill",
    "compare",
    "doctor",
    "mcp",
)
STUDIES = ("rethinking/fig1", "rethinking/theorem-5.1", "rethinking/k3-bias", "tang-munos/lambda", "schulman/table")
RUN_FILES = ROOT / "tests" / "frameworks" / "run_files"


def printed(*arguments: str, status: int = 0) -> str:
    """The standard output of a command."""
    from typer.testing import CliRunner

    from klgrad.cli import app

    result = CliRunner().invoke(app, list(arguments), prog_name="klgrad")
    assert result.exit_code == status, f"klgrad {' '.join(arguments)}: status {result.exit_code}\n{result.output}"
    return "".join(line.rstrip() + "\n" for line in result.stdout.splitlines())


def rounded(x: Any) -> Any:
    """The same nested data with rounded numbers.

    Of more than `LONG` numbers the length, the extremes and the sum are kept, and of more texts how often each occurs.
    """
    if isinstance(x, (dict, list)) and len(x) > LONG:
        values = list(x.values()) if isinstance(x, dict) else x
        if all(isinstance(value, float) for value in values):
            return rounded([len(values), min(values), max(values), sum(values)])
        if isinstance(x, dict) and all(isinstance(value, str) for value in values):
            return {value: values.count(value) for value in sorted(set(values))}
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    if isinstance(x, float):
        return (0.0 if abs(x) < ZERO else float(f"{x:.{DIGITS}g}")) if math.isfinite(x) else str(x)
    return x


def as_json(text: str) -> str:
    """JSON with rounded numbers, and one line for each entry of the outermost two levels."""
    return _laid_out(rounded(json.loads(text)), 2) + "\n"


def _laid_out(x: Any, levels: int) -> str:
    if not levels or not isinstance(x, (dict, list)) or not x:
        return json.dumps(x, ensure_ascii=False)
    if isinstance(x, dict):
        lines = [f"{json.dumps(k, ensure_ascii=False)}: {_laid_out(v, levels - 1)}" for k, v in x.items()]
    else:
        lines = [_laid_out(v, levels - 1) for v in x]
    opening, closing = "{}" if isinstance(x, dict) else "[]"
    return f"{opening}\n" + ",\n".join(lines) + f"\n{closing}"


def _log() -> str:
    from logs.synthetic import sampled, write

    write(Path("log.npz"), sampled("top-p", 0.9, rows=64, tokens=20))
    return as_json(printed("logs", "log.npz", "--cell", "k3-loss", "--json", "-"))


def _studies() -> str:
    printed("reproduce", "--quick", "--jobs", "1", "--out", "studies", *STUDIES)
    found = {path.relative_to("studies").as_posix(): path for path in sorted(Path("studies").rglob("*.json"))}
    studies = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items()}
    for study in studies.values():
        del study["settings"]["code"]  # the digest of the sources, which every edit changes
    return as_json(json.dumps(studies))


def _dry_run() -> str:
    from training.small import SMALL, arguments, write_model

    if not Path("model").exists():
        write_model(Path("model"))
    settings = {**SMALL, "model": "model", "output_dir": "run", "kl_estimator": "exact"}
    return printed("train", *arguments(**settings), "--dry-run")


GOLDENS: dict[str, Callable[[], str]] = {
    "help.txt": lambda: "".join(f"$ klgrad {c} --help\n{printed(*c.split(), '--help')}\n" for c in ("", *COMMANDS)),
    "catalogue.json": lambda: as_json(printed("audit", "--catalogue", "--json", "-")),
    "trl.json": lambda: as_json(printed("audit", "trl", "--json", "-")),
    "advise.txt": lambda: "".join(
        f"$ klgrad advise --config {path.name}\n{printed('advise', '--config', path.name)}\n"
        for path in sorted(Path().iterdir())
        if path.suffix in (".yaml", ".sh")
    ),
    "logs.json": _log,
    "studies.json": _studies,
    "dry_run.txt": _dry_run,
}
"""What is kept, by file name."""


def computed(names: list[str]) -> dict[str, str]:
    """The texts, computed in a folder of their own, so that no path of this machine is in them."""
    sys.path.append(str(ROOT / "tests"))
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for path in RUN_FILES.iterdir():
            shutil.copy(path, folder)
        return {name: GOLDENS[name]() for name in names or GOLDENS}


def main(arguments: list[str]) -> int:
    """Write the files, or compare them; the status is 1 if one differs."""
    check = "--check" in arguments
    texts = computed([name for name in arguments if name != "--check"])
    different = 0
    for name, text in texts.items():
        path = FOLDER / name
        if not check:
            path.write_text(text, encoding="utf-8")
            continue
        known = path.read_text(encoding="utf-8") if path.is_file() else ""
        if known != text:
            different += 1
            lines = difflib.unified_diff(
                known.splitlines(), text.splitlines(), f"tests/goldens/{name}", "now", "", "", 1
            )
            print("\n".join([line[:200] for line in lines][:40]))
    if different:
        print(f"{different} of {len(texts)} differ; if they should: python scripts/goldens.py")
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A release on a local package index: the wheel is built, installed by name into an empty environment, and used there.

`make rehearsal` runs it; `make rehearsal PYTHON=python3.12` does so with another Python for which torch has a wheel.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "rehearsal"
LARGEST = 1_000_000
"""Bytes of the wheel."""

COMPONENTS = """
import json
from importlib.metadata import distributions
found = {d.name: d for d in distributions()}
print(json.dumps([
    {"type": "library", "name": name, "version": d.version, "purl": f"pkg:pypi/{name.lower()}@{d.version}"}
    | ({"licenses": [{"expression": d.metadata["License-Expression"]}]} if d.metadata["License-Expression"] else {})
    for name, d in sorted(found.items()) if name not in ("pip", "setuptools")
]))
"""


def run(*command: str | Path, cwd: Path = FOLDER) -> str:
    """The output of a command; one that fails ends the rehearsal."""
    # Neither the checkout nor the environment of this script may help.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def build() -> Path:
    """The wheel, in an index of its own."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", FOLDER / "wheel", ROOT)
    (wheel,) = (FOLDER / "wheel").glob("klgrad-*.whl")
    size = wheel.stat().st_size
    if size >= LARGEST:
        sys.exit(f"expected a wheel below {LARGEST} bytes; received {size}; remedy: leave data files out of src/klgrad")
    project = FOLDER / "index" / "klgrad"
    project.mkdir(parents=True)
    shutil.copy(wheel, project)
    (project / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>\n', encoding="utf-8")
    print(f"{wheel.name}: {size} bytes")
    return wheel


def install(version: str) -> Path:
    """An empty environment with klgrad of that version from the local index, its dependencies from the usual one."""
    folder = FOLDER / "environment"
    venv.create(folder, with_pip=True)
    binaries = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = (binaries / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install")
    index = (FOLDER / "index").as_uri()
    run(*pip, "--no-deps", "--index-url", index, "--no-cache-dir", f"klgrad=={version}")
    run(*pip, f"klgrad=={version}")
    return binaries


def main() -> None:
    """Build, install, use, and write the bill of materials."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    version = build().name.split("-")[1]
    binaries = install(version)
    klgrad = binaries / "klgrad"
    shown = run(klgrad, "--version")
    if shown.split() != ["klgrad", version]:
        sys.exit(f"expected klgrad {version}; received {shown}; remedy: look at __version__")
    print(run(klgrad, "audit").rstrip())
    run(klgrad, "audit", "k2-loss", "--expect", "reverse-kl-token")
    run(klgrad, "advise", "trl")
    run(klgrad, "doctor")
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "library", "name": "klgrad", "version": version}},
        "components": json.loads(run(binaries / "python", "-c", COMPONENTS)),
    }
    path = FOLDER / f"klgrad-{version}.cdx.json"
    path.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(bill['components'])} packages")


if __name__ == "__main__":
    main()

"""Files of the project that repeat what another file defines agree with it."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import klgrad
from klgrad.adapters import FRAMEWORKS
from klgrad.adapters.recorded import recorded
from klgrad.audit.render.plain import markdown_table

ROOT = Path(__file__).parents[2]


def test_the_version_of_the_citation_is_that_of_the_package():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == klgrad.__version__


def test_the_picture_of_the_layers_is_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = re.findall(r"^## Layers\n.*?^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert picture == ["".join(f"{layer}\n" for layer in contracts[0]["layers"])]


def test_the_oldest_torch_that_is_tested_is_the_oldest_that_is_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = next(re.fullmatch(r"torch>=([\d.]+)", line) for line in project["dependencies"] if "torch" in line)
    tested = re.search(
        r"^torch==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert allowed is not None
    assert tested is not None
    assert tested[1] in (allowed[1], f"{allowed[1]}.0")


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "frameworks").glob("*.md")), ids=lambda path: path.stem)
def test_the_page_of_a_framework_shows_its_data(path):
    known = recorded(path.stem)
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {known.framework} {known.version}\n\nMade on {known.date} by")
    assert f"\n\n{markdown_table(known.rows)}" in text
    assert all(f"| `{row[0]}` | {row[1]} |" in text for row in known.policy_losses)


def test_every_framework_has_a_page():
    assert {path.stem for path in (ROOT / "docs" / "frameworks").glob("*.md")} == set(FRAMEWORKS)


def test_the_frameworks_are_installed_at_their_tested_versions():
    pins = [(ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "constraints-frameworks.txt")]
    pinned = {line.lower().replace("_", "-") for text in pins for line in text.splitlines()}
    own = [framework for framework in FRAMEWORKS.values() if not framework.transcribed]
    assert {f"{f.distribution.lower().replace('_', '-')}=={f.tested}" for f in own} <= pinned

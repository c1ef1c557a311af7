"""Files of the project that repeat what another file defines agree with it."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import klgrad
from klgrad.audit.terminal import COLUMNS, markdown_table
from klgrad.frameworks import FRAMEWORKS, recorded

ROOT = Path(__file__).parents[2]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


SETTINGS = tomllib.loads(read("pyproject.toml"))
PROJECT = SETTINGS["project"]


def test_the_version_of_the_citation_is_that_of_the_package():
    assert yaml.safe_load(read("CITATION.cff"))["version"] == klgrad.__version__


def test_the_picture_of_the_layers_is_the_import_contract():
    contracts, text = SETTINGS["tool"]["importlinter"]["contracts"], read("CONTRIBUTING.md")
    picture = re.findall(r"^## Layers\n.*?^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert picture == ["".join(f"{layer}\n" for layer in contracts[0]["layers"])]


def test_the_oldest_versions_that_are_tested_are_the_oldest_that_are_allowed():
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", read("constraints-oldest.txt").lower(), re.MULTILINE))
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["logs"]]
    allowed = dict(line.split(">=") for line in lines)
    assert {"torch", "typer", "rich", "jinja2", "pyyaml", "packaging", "numpy", "pyarrow"} == set(allowed)
    oldest = {name: ".".join([*least.split("."), "0", "0"][:3]) for name, least in allowed.items()}
    assert {name: pinned[name] for name in allowed} == oldest


def test_every_extra_that_a_message_names_exists():
    texts = map(read, [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md")])
    named = {extra for text in texts for names in re.findall(r"klgrad\[([\w,]+)\]", text) for extra in names.split(",")}
    assert {"train", "logs", "plot"} <= named <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "frameworks").glob("*.md")), ids=lambda path: path.stem)
def test_the_page_of_a_framework_shows_its_data(path):
    known, text = recorded(path.stem), read(path)
    assert text.startswith(f"# {known.framework} {known.version}\n\nMade on {known.date} by")
    assert f"\n\n{markdown_table(known.rows, COLUMNS)}" in text
    assert all(f"| `{row[0]}` | {row[1]} |" in text for row in known.policy_losses)


def test_every_framework_has_a_page():
    assert {path.stem for path in (ROOT / "docs" / "frameworks").glob("*.md")} == set(FRAMEWORKS)


def test_the_frameworks_are_installed_at_their_tested_versions():
    pins = map(read, ROOT.glob("constraints*.txt"))
    pinned = {line.lower().replace("_", "-") for text in pins for line in text.splitlines()}
    own = [framework for framework in FRAMEWORKS.values() if not framework.transcribed]
    assert {f"{f.distribution.lower().replace('_', '-')}=={f.tested}" for f in own} <= pinned


def test_a_variable_says_what_it_holds():
    for path in (ROOT / "src" / "klgrad").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(read(path))))
        variables = {x.id for x in nodes if isinstance(x, ast.Name)} | {x.arg for x in nodes if isinstance(x, ast.arg)}
        assert "found" not in variables, path  # write the noun: rows, checks, differences

"""The plug-in of pytest: its fixture, its entry point, and that a session without it pays nothing."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import klgrad.testing  # noqa: F401  # an inner session forgets what it imports, and torch cannot be imported twice

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
PLUGIN = ("-p", "klgrad.pytest_plugin", "-p", "no:cacheprovider")


def block(name):
    return re.search(rf"<!-- {name} -->\n```\w*\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.fixture
def session(pytester, monkeypatch):
    """Run pytest on a file with this plug-in and no other."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source, separate=False):
        pytester.makepyfile(source)
        return (pytester.runpytest_subprocess if separate else pytester.runpytest_inprocess)(*PLUGIN)

    return run


def test_the_example_of_the_page_fails_with_the_message_of_the_page(session):
    result = session(block("test"))
    result.assert_outcomes(failed=1)
    message = " ".join(block("output").split())
    assert message in " ".join(line.removeprefix("E").strip() for line in result.outlines)
    shown = result.stdout.str()  # the frames of klgrad are hidden: the traceback ends in the test
    assert '>       assert_descends(kl_penalty, "reverse-kl-token")\nE ' in shown
    assert "testing.py:" not in shown


@pytest.mark.slow
def test_the_fixture_audits_and_a_session_that_does_not_use_it_imports_no_torch(session):
    result = session(
        """
        import sys

        def test_before():
            assert "klgrad.pytest_plugin" in sys.modules
            assert not {"torch", "klgrad.audit", "typer", "rich"} & set(sys.modules)

        def test_after(assert_descends):
            assert "torch" in sys.modules
            assert assert_descends("k2-loss", "reverse-kl-token").holds == "always"
        """,
        separate=True,
    )
    result.assert_outcomes(passed=2)


def test_the_entry_point_is_the_plug_in():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (name, module) = next(iter(project["entry-points"]["pytest11"].items()))
    assert hasattr(import_module(module), "assert_descends")
    assert f"`pytest -p no:{name}`" in PAGE

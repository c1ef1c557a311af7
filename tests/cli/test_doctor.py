"""`klgrad doctor` names what is missing and what mends it. `tests/trainer/test_contract.py` has a patched TRL."""

import importlib.util
from importlib.metadata import version

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from klgrad.cli import app, doctor
from klgrad.cli.doctor import allows, requirements


@pytest.fixture
def found(monkeypatch):
    """The exit status and the lines of the report, where klgrad needs these lines of metadata."""
    monkeypatch.setattr(doctor, "_trl", lambda _: None)  # importing TRL takes seconds

    def run(*lines):
        monkeypatch.setattr(doctor, "requirements", lambda: list(map(Requirement, lines)))
        result = CliRunner().invoke(app, ["doctor"])
        return result.exit_code, [" ".join(line.split()) for line in result.output.splitlines()]

    return run


def test_versions_and_devices(found):
    status, lines = found("torch>=2.6")
    assert status == 0
    assert f"torch {torch.__version__}" in lines
    for name in ("transformers", "accelerate", "datasets"):
        if importlib.util.find_spec(name):
            assert f"{name} {version(name)}" in lines
    assert f"CPU threads {torch.get_num_threads()}" in lines
    assert lines[-1] == "Nothing to mend."


@pytest.mark.parametrize(
    ("needed", "title", "mends"),
    [
        (
            ("torch", "no-such-a>=1; extra == 'gym'", "no-such-b>=2; extra == 'gym'"),
            "Missing, optional",
            "no-such-a, no-such-b, for klgrad[gym] pip install 'klgrad[gym]'",
        ),
        (("no-such-c>=1",), "To mend", "no-such-c pip install klgrad"),
        (("torch>=99",), "To mend", f"torch {torch.__version__}: >=99 is needed pip install 'torch>=99'"),
        (("typer<0.1; extra == 'plot'",), "To mend", ": <0.1 is needed by klgrad[plot] pip install 'typer<0.1'"),
    ],
)
def test_what_does_not_fit_is_an_error_with_its_remedy_and_a_missing_extra_is_none(needed, title, mends, found):
    status, lines = found(*needed)
    assert status == (2 if title == "To mend" else 0)
    assert any(mends in shown for shown in lines[lines.index(title) :])
    assert ("Nothing to mend." in lines) == (status == 0)


def test_the_metadata_is_read():
    names = {needed.name.lower() for needed in requirements()}
    assert {"torch", "typer", "rich", "trl"} <= names
    assert "ruff" not in names
    (torch_needed,) = [needed for needed in requirements() if needed.name == "torch"]
    assert allows(torch_needed, torch.__version__)
    assert not allows(torch_needed, "2.5.1")


@pytest.mark.parametrize(
    ("version", "fits"),
    [("1.16", True), ("1.16.0+cpu", True), ("1.16.9", True), ("1.17", False), ("1.17.0rc1", False), ("1.9", False)],
)
def test_versions_are_compared_as_numbers(version, fits):
    assert allows(Requirement("trl>=1.16,<1.17"), version) == fits

"""Runs of the commands on a tiny model."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from training.small import SMALL, arguments, write_model

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path_factory):
    """No network, a cache of the test's own, one thread."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def called(tiny, command, output, *more, ends=0, **settings):
    """Run a command in this process, to the exit status `ends`; gives what it printed, as one line."""
    from rich.console import Console

    from klgrad.training.run import run
    from klgrad.training.settings import parse

    small = {} if settings.get("resume") else {"model": tiny, **SMALL}
    if command == "distill" and not settings.get("resume"):
        small = {**small, "model": None, "teacher": tiny}
    text = io.StringIO()
    console = Console(file=text, width=160)
    given = [*arguments(**{**small, "output_dir": output, **settings}), *more]
    assert run(parse(command, given), console, console) == ends, text.getvalue()
    return " ".join(text.getvalue().split())


@pytest.fixture
def run(model, monkeypatch):
    """As `called`, without the figure, which takes longer than the training."""
    monkeypatch.setattr("klgrad.training.run.draw", lambda *_: None)
    return lambda command, output, *more, **settings: called(model, command, output, *more, **settings)


def invoke(*given):
    """A command through the front door."""
    from typer.testing import CliRunner

    from klgrad.cli import app

    return CliRunner().invoke(app, [str(x) for x in given])


def same_weights(a, b):
    """Whether two runs ended with the same weights, to the last bit."""
    from safetensors.torch import load_file

    first, second = (load_file(next(Path(folder, "model").glob("*.safetensors"))) for folder in (a, b))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def read(path) -> Any:
    """A file of JSON, or of lines of JSON."""
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


@pytest.fixture(scope="session")
def finished(model, tmp_path_factory):
    """A run of four updates with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    torch.set_num_threads(1)
    called(model, "train", folder, eval_size=2, rollout_lag=1, kl_ratio="prefix")
    return folder


@pytest.fixture
def parts(finished, tmp_path):
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "parts"))


def contents(folder):
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def yaml(tmp_path):
    """A file of settings, as the arguments that name it."""

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return ["--config", str(path)]

    return write


@pytest.fixture
def jsonl(tmp_path):
    """A file of rows in JSON, by its name."""

    def write(rows, name="prompts.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    return write

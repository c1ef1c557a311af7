"""Runs of the commands on a tiny model."""

import io
import os
import shutil
from pathlib import Path

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


def called(tiny, command, output, *more, **settings):
    """Run a command in this process; gives its exit status and what it printed."""
    from rich.console import Console

    from klgrad.training.run import run
    from klgrad.training.settings import parse

    small = {} if settings.get("resume") else {"model": tiny, **SMALL}
    if command == "distill" and not settings.get("resume"):
        small = {**small, "model": None, "teacher": tiny}
    text = io.StringIO()
    console = Console(file=text, width=160)
    given = [*arguments(**{**small, "output_dir": output, **settings}), *more]
    status = run(parse(command, given), console, console)
    return status, text.getvalue()


@pytest.fixture
def run(model, monkeypatch):
    """As `called`, without the figure, which takes longer than the training."""
    monkeypatch.setattr("klgrad.training.run.draw", lambda *_: None)
    return lambda command, output, *more, **settings: called(model, command, output, *more, **settings)


@pytest.fixture
def weights():
    """The weights that a run ended with."""

    def read(folder):
        from safetensors.torch import load_file

        (path,) = (Path(folder) / "model").glob("*.safetensors")
        return load_file(path)

    return read


@pytest.fixture(scope="session")
def finished(model, tmp_path_factory):
    """A run of four updates with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    torch.set_num_threads(1)
    assert called(model, "train", folder, eval_size=2, rollout_lag=1, kl_ratio="prefix")[0] == 0
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

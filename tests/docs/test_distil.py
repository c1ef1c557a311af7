"""Every command of docs/distil.md trains, with tiny models for those that it names."""

import io
import json

import pytest
from docs.pages import ROOT, commands
from some import first
from training.small import SMALL, WORDS, arguments, write_model

COMMANDS = list(commands("klgrad", [ROOT / "docs" / "distil.md"]))
DISTILLED = [command for command in COMMANDS if len(command) > 1]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    make = lambda layers: str(write_model(tmp_path_factory.mktemp("model"), layers))
    return {"STUDENT": make(2), "TEACHER": make(3), "A": make(3), "B": make(1)}


def with_models(word, models):
    named = [part.partition("=") for part in word.split(",")]
    if not all((path or name) in models for name, _, path in named):
        return word
    return ",".join(f"{name}={models[path]}" if path else models[name] for name, _, path in named)


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"Compute {a} + {b}" for a in range(8) for b in range(6)]
    experts = ("math", "code")
    for name in ("hints", "mixed"):
        lines = [{"prompt": x, "hint": f"3 {x}", "expert": experts[i % 2]} for i, x in enumerate(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_the_page_has_a_command_for_each_question():
    assert len(DISTILLED) >= 14
    assert "Compute" in WORDS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("command", first(DISTILLED, 3), ids=lambda command: " ".join(command[5:]) or "plain")
def test_it_trains(command, models, tmp_path, monkeypatch):
    from rich.console import Console

    from klgrad.training.run import run
    from klgrad.training.settings import parse

    monkeypatch.setattr("klgrad.training.run.draw", lambda *_: None)
    given = ["8" if word == "64" else with_models(word, models) for word in command[1:]]  # of 31 tokens
    small = {**SMALL, "max_steps": 2, "eval_size": 2, "eval_every": 0, "output_dir": tmp_path / "run"}
    text = io.StringIO()
    console = Console(file=text)
    assert run(parse("distill", [*arguments(**small), *given]), console, console) == 0, text.getvalue()
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    compared = [row["evaluation"]["distillation"] for row in history if "evaluation" in row]
    assert len(compared) == 2
    assert "student" in compared[-1]["rewards"]

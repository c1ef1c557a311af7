"""Every block of Python in the README and the docs runs, except those that say where they are run."""

import doctest
from functools import partial

import pytest
import torch
from docs.pages import NOT_RUN, PAGES, ROOT, fences
from typer.testing import CliRunner

from klgrad import Rollout, kl_report
from klgrad.cli import app

PYTHON = {f"{fence.page}:{fence.line}": fence for path in PAGES for fence in fences(path) if fence.language == "python"}
TRAINING = "docs/train.md"
TERMS = ROOT / "docs" / "terms.md"
(OWN,) = (fence.code for fence in fences(TERMS) if fence.mark == "own")


def statistics():
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]])
    return {"rollout": Rollout(logp, logp - 0.1, torch.ones(2, 2)), "kl_report": kl_report}


def kernels():
    import tiny
    from transformers import LlamaForCausalLM

    policy, ref = (LlamaForCausalLM.from_pretrained(tiny.folder()) for _ in range(2))
    ids = torch.randint(2, 30, (2, 6))
    of_batch = {"ids": ids, "mask": torch.ones(2, 5), "group": [0, 0], "beta": 0.1}
    return {"torch": torch, "policy": policy, "ref": ref, "policy_loss": lambda logp: -logp.mean(), **of_batch}


GIVEN = {"docs/logs.md": statistics, "docs/kernels.md": kernels}
"""Names that the blocks of a page take from the reader's code."""


@pytest.mark.parametrize("name", [name for name, fence in PYTHON.items() if fence.page != TRAINING])
def test_a_block_runs(name, capsys):
    fence = PYTHON[name]
    if fence.mark.startswith(NOT_RUN):
        compile(fence.code, name, "exec")
        where = fence.mark.removeprefix(NOT_RUN).split()[0]
        assert (ROOT / where).exists()
    elif fence.code.startswith(">>> "):
        test = doctest.DocTestParser().get_doctest(fence.code, {}, name, fence.page, fence.line)
        assert doctest.DocTestRunner().run(test).failed == 0, capsys.readouterr().out
    else:
        exec(compile(fence.code, name, "exec"), GIVEN.get(fence.page, dict)())


@pytest.mark.slow
def test_the_blocks_of_the_page_on_training_run(tmp_path, monkeypatch):
    """With a tiny model for the one that is named, and a CPU."""
    import tiny

    import klgrad.trl

    made = []

    def trainer(model, *arguments, **settings):
        assert isinstance(model, str)
        made.append(of_trl(tiny.folder(), *arguments, processing_class=tiny.tokenizer(), **settings))
        return made[-1]

    of_trl = klgrad.trl.KLTrainer
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(klgrad.trl, "KLConfig", partial(klgrad.trl.KLConfig, **tiny.SETTINGS))
    monkeypatch.setattr(klgrad.trl, "KLTrainer", trainer)
    given = {"reward": tiny.reward, "prompts": tiny.prompts()}
    for name, fence in PYTHON.items():
        if fence.page == TRAINING:
            exec(compile(fence.code, name, "exec"), given)
    assert len(made) == 2
    assert made[0].state.global_step > 0


# The file of docs/terms.md that a reader plugs in: in a figure of a paper, and in training.


@pytest.mark.slow
def test_the_file_of_the_reader_is_drawn_and_trained(tmp_path, monkeypatch):
    from klgrad.training.report import formula
    from klgrad.training.settings import parse

    (tmp_path / "my.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in ("train", "distill"):
        assert formula(parse(command, ["--kl", "my.py:term", "--use_cpu"])).startswith("∇ cubic, token level")
    arms = ["--with", "my.py:bounded", "--with", "my.py:huber"]
    done = CliRunner().invoke(app, ["reproduce", "tang-munos/fig2", *arms, "--out", "out"])
    assert done.exit_code == 0, done.output
    (shown,) = (fence.code for fence in fences(TERMS) if "klgrad reproduce" in fence.code)
    lines = [line.split() for line in done.output.splitlines()]
    for line in shown.split("...\n")[1].splitlines():
        assert line.split() in lines

"""The code of docs/footguns.md has the gradient of the loss whose verdict its table shows."""

import inspect
import re

import pytest
import torch
from docs.pages import FENCE, ROOT
from tolerances import EXACT
from torch import log_softmax

from klgrad import KLTerm, Rollout
from klgrad.zoo import CELLS

PAGE = (ROOT / "docs" / "footguns.md").read_text(encoding="utf-8")
SECTIONS = {section.splitlines()[0]: section for section in PAGE.split("\n## ")[1:]}
TERM = KLTerm(level="token", influence_bound=5.0)


def losses(section):
    """The functions `wrong` and `right` of a section."""
    found = {}
    for fence in FENCE.finditer(section):
        if fence["language"] == "python" and not fence["code"].startswith(">>> "):
            exec(compile(fence["code"], "docs/footguns.md", "exec"), found)
    return {name: found[name] for name in ("wrong", "right") if name in found}


WITH_CODE = [title for title, section in SECTIONS.items() if losses(section)]


def test_most_sections_have_code_and_every_one_a_thread():
    assert len(WITH_CODE) >= 8
    for title, section in SECTIONS.items():
        assert re.search(r"\]\(https://github.com/[\w-]+/[\w-]+/(issues|pull)/\d+\)", section), title


def batch():
    """Random logits of three policies over five tokens, and completions of different lengths, far from ref."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits, old_logits = 4 * torch.randn(3, 6, 4, 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 5, (6, 4), generator=generator)
    mask = torch.arange(4) < torch.tensor([1, 2, 3, 4, 4, 2])[:, None]
    logits.requires_grad_()
    pick = lambda x: log_softmax(x, -1).gather(-1, tokens[..., None])[..., 0]
    of_tokens = {"logp": pick(logits), "ref_logp": pick(ref_logits), "old_logp": pick(old_logits).detach()}
    rollout = Rollout(of_tokens["logp"], of_tokens["ref_logp"], mask, behavior_logp=of_tokens["old_logp"])
    return {"logits": logits, "ref_logits": ref_logits, "mask": mask.double(), "rollout": rollout, **of_tokens}


def gradient(loss, given):
    """By the logits; as in the audit, numbers per token are summed over a completion and averaged over completions."""
    found = loss(**{name: given[name] for name in inspect.signature(loss).parameters})
    scalar = found if found.ndim == 0 else (found * given["mask"]).sum(-1).mean()
    if not scalar.requires_grad:
        return torch.zeros_like(given["logits"])
    return torch.autograd.grad(scalar, given["logits"], retain_graph=True)[0]


def exact_kl(forward):
    def loss(logits, ref_logits):
        one, other = log_softmax(logits, -1), log_softmax(ref_logits, -1)
        first, second = (other, one) if forward else (one, other)
        return (first.exp() * (first - second)).sum(-1)

    return loss


NAMED = {
    'KLTerm(level="token", influence_bound=5.0)': lambda rollout: TERM(rollout).loss,
    "kl_div(policy, ref)": exact_kl(forward=True),
    "kl_div(ref, policy)": exact_kl(forward=False),
}


def named(word, section):
    """The loss of the row of the table that begins with a word."""
    row = next(line for line in section.splitlines() if line.startswith(f"| {word} |"))
    name = re.search(r"`([^`]+)`", row)[1]
    return NAMED[name] if name in NAMED else lambda rollout: CELLS[name](rollout)


@pytest.mark.parametrize("title", WITH_CODE)
def test_the_code_has_the_gradient_of_the_loss_in_the_table(title):
    given = batch()
    for word, loss in losses(SECTIONS[title]).items():
        EXACT.check(gradient(loss, given), gradient(named(word, SECTIONS[title]), given))

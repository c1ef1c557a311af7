"""What the arguments of a loss receive, what may be returned, and what an error says."""

import functools
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from tolerances import EXACT
from torch import nn

from klgrad import KLTerm
from klgrad.audit import audit, load, load_every
from klgrad.audit.call import parse_names, parse_settings, prepare, scalar
from klgrad.audit.probes import Batch, from_problem
from klgrad.audit.procedure import proof_cases
from klgrad.audit.subject import Subject, as_subject, every_gradient
from klgrad.cli.audit import command
from klgrad.enumeration import autoregressive, every_group
from klgrad.errors import LossCallError, LossImportError, LossOutputError, UnknownNameError
from klgrad.support import ARGUMENTS, argument_role

ROLES = {
    "logp": "log_prob log_probs logprobs per_token_logps action_log_probs new_logprobs student_logps log_pi pi_logp",
    "ref_logp": "ref_log_prob ref_per_token_logps base_action_log_probs log_probs_base logp_ref teacher_logprobs",
    "old_logp": "old_log_prob old_log_probs old_per_token_logps prev_logprobs log_probs_old",
    "behavior_logp": "rollout_log_probs sampling_per_token_logps vllm_logprobs inference_logprobs log_probs_rollout",
    "mask": "mask response_mask completion_mask action_mask loss_mask attention_mask",
    "advantages": "advantages advantage adv",
    "logits": "logits student_logits policy_logits shift_logits",
    "ref_logits": "ref_logits teacher_logits reference_logits base_logits shift_teacher_logits",
    "tokens": "tokens input_ids completion_ids responses action_ids",
    "labels": "labels label shift_labels",
}


@pytest.mark.parametrize("role", ROLES)
def test_names_of_arguments(role):
    for name in ROLES[role].split():
        assert argument_role(name) == role, name


def test_what_a_name_does_not_say_is_not_guessed():
    for name in ("old_logits", "beta", "x", "values", "padding_mask", "sum_logp", "model"):
        assert argument_role(name) is None, name


@pytest.fixture
def problem():
    return autoregressive(2, 3, ends=True, seed=3, away_from_ref=1.0)


@pytest.fixture
def batch(problem):
    return from_problem(problem, torch.tensor([[3, 0, 1, 2, 3]]), torch.arange(4, dtype=torch.float64))


def received(loss, batch, **settings) -> Any:
    return prepare(loss, "loss", settings)(batch)


def test_labels_are_minus_100_where_masked_unless_the_loss_cannot_take_that(batch):
    labels = received(lambda logp, labels: (logp, labels), batch)[1]
    assert torch.equal(labels, torch.where(batch.mask, batch.tokens, -100))
    gathers = lambda logits, labels: logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    assert received(gathers, batch).shape == batch.logp.shape


def test_advantages_are_per_completion_where_a_loss_takes_them_so(batch):
    per_row = received(lambda logp, advantages: -(advantages.unsqueeze(1) * logp), batch)
    assert torch.equal(per_row, -batch.advantages * batch.logp)
    per_token = received(lambda logp, advantages: -(advantages * logp), batch)
    assert torch.equal(per_token, per_row)


def test_a_loss_that_shifts_gets_a_prompt_token_in_front(batch):
    def shifts(logits, labels, mask):
        picked = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None]).squeeze(-1)
        return picked * mask[:, 1:]

    live = torch.where(batch.mask, received(shifts, batch) - batch.logp, 0)
    EXACT.check(float(live.detach().abs().max()), 0.0)


def test_a_dictionary_has_every_name(batch):
    def loss(batch):
        assert "ref_log_prob" in batch
        assert "returns" not in batch
        assert batch.get("returns", 7) == 7
        assert batch.pop("returns", None) is None
        assert batch.to("cpu") is batch
        assert batch["sampling_logps"] is batch.behavior_logp
        assert not hasattr(batch, "meta_info")
        assert {"logp", "old_per_token_logps", "advantages"} <= set(batch)
        return {"loss": batch.pop("log_prob") - batch.batch["ref_per_token_logps"]}

    assert torch.equal(received(loss, batch)["loss"], batch.logp - batch.ref_logp)
    with pytest.raises(UnknownNameError, match=r"'ref_logprobz'.*did you mean"):
        prepare(lambda batch: batch["ref_logprobz"], "loss", {})(batch)


def test_a_dictionary_is_recognised_by_its_annotation(batch):
    def loss(x: dict[str, torch.Tensor]):
        return x["logp"]

    assert received(loss, batch) is batch.logp
    with pytest.raises(LossCallError, match="of which x is not known"):
        prepare(lambda x: x["logp"], "loss", {})


def test_a_rollout(batch):
    assert torch.equal(received(lambda rollout: rollout.log_ratio, batch), batch.rollout().log_ratio)


def test_a_default_that_is_no_tensor_stays(batch):
    def loss(logp, tokens=128, rollout_log_probs=None, mask: Any = 1.0):
        assert tokens == 128
        assert mask.dtype == torch.bool
        return logp if rollout_log_probs is None else rollout_log_probs

    assert received(loss, batch) is batch.behavior_logp
    assert received(loss, batch, rollout_log_probs=None) is batch.logp
    bound = functools.partial(loss, rollout_log_probs=None)
    assert received(bound, batch) is batch.logp


def test_results(batch: Batch):
    rows = len(batch.logp)
    x = batch.logp.detach()
    summed = torch.where(batch.mask, x, 0).sum() / rows
    three = torch.stack([x, 0 * x], -1)
    for out in (x, (x, {}), [x], {"loss": x}, ({"loss": x}, 1), three):
        EXACT.check(float(scalar("loss", out, batch)), float(summed))
    EXACT.check(float(scalar("loss", x[:, 0], batch)), float(x[:, 0].mean()))
    EXACT.check(float(scalar("loss", x[:, :1], batch)), float(x[:, 0].mean()))
    for wrong in (None, {}, (), 1.0, {"kl": x}, x[:, :2], (1.0, x)):
        with pytest.raises(LossOutputError):
            scalar("loss", wrong, batch)


def test_the_gradient_through_logits_is_that_of_the_loss_itself(problem):
    """Against autograd through the table of logits, for a loss that no target has the gradient of."""

    def loss(logits, ref_logits, tokens, mask):
        away = logits.softmax(-1) - ref_logits.softmax(-1)
        return ((away.abs().sum(-1) + tokens * logits[..., 0]) * mask).sum(-1).pow(2).mean()

    members, _ = every_group(problem, 2)
    found = every_gradient(as_subject(loss), problem, members, torch.zeros(4, dtype=torch.float64))
    assert not found[:, problem.logits.numel() :].any()
    space = problem.space
    for group, gradient in zip(members, found, strict=True):
        table = problem.logits.clone().requires_grad_()
        at = space.prefix[group]
        loss(table[at], problem.ref_logits[at], space.tokens[group], space.mask[group]).backward()
        EXACT.check(float((table.grad.flatten() - gradient[: table.numel()]).abs().max()), 0.0)


def test_a_gradient_on_the_logits_of_masked_positions_is_seen(problem):
    loss = lambda logits, ref_logits: (logits.softmax(-1) * ref_logits).sum() / len(logits)
    members, _ = every_group(problem, 2)
    found = every_gradient(as_subject(loss), problem, members, torch.zeros(4, dtype=torch.float64))
    assert found[:, problem.logits.numel() :].any()


class NeedsBeta(nn.Module):
    def __init__(self, beta, scale=1.0):
        super().__init__()
        self.beta = beta

    def forward(self, logp, ref_logp, mask):
        return self.beta * ((logp - ref_logp) * mask).sum() + logp.nosuch


def test_an_error_in_a_module_names_its_own_file(batch):
    subject = as_subject(NeedsBeta(0.1))
    with pytest.raises(LossCallError, match=r"'Tensor' object has no attribute 'nosuch'.*test_call.py, line \d+"):
        subject(batch)
    takes_less = lambda *args, **kwargs: (lambda logp: logp)(*args, **kwargs)
    with pytest.raises(LossCallError, match=r"look at .*test_call.py, line \d+"):
        as_subject(takes_less)(batch)


SETTINGS = {
    "bta": (lambda logp, beta=1: logp, {"bta": 1}, r"parameters of x: logp, beta; received bta.*did you mean 'beta'"),
    "module": (NeedsBeta, {"bet": 1}, r"parameters of x: beta, scale, logp, .*did you mean 'beta'"),
    "lacking": (NeedsBeta, {}, r"a constructor that needs beta; remedy: give them by --set beta=VALUE"),
    "term": (KLTerm(), {"beta": 1}, r"settings for a function, .*received settings for"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_wrong_settings(case):
    loss, settings, message = SETTINGS[case]
    with pytest.raises(LossCallError, match=message):
        audit(loss, name=None if case == "term" else "x", settings=settings)


def test_a_class_of_a_term_and_settings_of_it():
    assert as_subject(KLTerm, settings={"level": "token"}).name == KLTerm(level="token").name


def test_settings_are_literals_or_texts():
    given = ["beta=0.04", "kind=k3", "on=True", "off=false", "no=None", "pair=(1, 2)", "text='1'", "eq=a=b", "empty="]
    found = {"beta": 0.04, "kind": "k3", "on": True, "off": False, "no": None, "pair": (1, 2), "text": "1"}
    assert parse_settings(given) == found | {"eq": "a=b", "empty": ""}
    for wrong in ("beta", "=1", "a b=1"):
        with pytest.raises(LossCallError, match=r"write for example --set beta=0.04"):
            parse_settings([wrong])


def test_a_file_without_losses_is_refused(tmp_path):
    file = tmp_path / "helpers.py"
    file.write_text("from torch import nn\nfrom torch.nn import KLDivLoss\ndef mean(x, dim): return x\n")
    with pytest.raises(LossImportError, match=r"mean: parameters x, dim, of which x, dim"):
        load_every(str(file))
    file.write_text("from math import exp\n")
    with pytest.raises(LossImportError, match="no public function or module"):
        load_every(str(file))


def test_only_what_a_file_defines_is_audited(tmp_path):
    (tmp_path / "other_losses.py").write_text("def k1(logp, ref_logp): return logp - ref_logp\n")
    file = tmp_path / "these.py"
    file.write_text(
        "from other_losses import k1\nfrom klgrad import KLTerm\nfrom torch import nn\n"
        "def k2(logp, ref_logp): return (logp - ref_logp) ** 2 / 2\nsame = k2\n"
        "def _private(logp): return logp\nterm = KLTerm()\nclass Config: pass\n"
    )
    assert [s.name.rpartition(":")[2] for s in load_every(str(file)).subjects] == ["k2", "term"]
    file.write_text(file.read_text() + "__all__ = ['k1', 'term']\n")
    assert [s.name.rpartition(":")[2] for s in load_every(str(file)).subjects] == ["term"]


def test_a_method_needs_a_class_without_arguments(tmp_path):
    file = tmp_path / "methods.py"
    file.write_text("class A:\n    def __init__(self, x): pass\n    def loss(self, logp): return logp\n")
    with pytest.raises(LossCallError, match="a constructor that needs x"):
        load(f"{file}:A.loss")


METHODS = """
class Base:
    def __init__(self, beta, offset=0.0): self.beta, self.offset = beta, offset
    def inherited(self, logp, ref_logp, scale=1.0): return self.beta * scale * (logp - ref_logp) + self.offset
class Penalty(Base): ...
"""


def test_settings_reach_the_constructor_of_a_method(tmp_path, batch):
    file = tmp_path / "methods.py"
    file.write_text(METHODS)
    subject = load(f"{file}:Penalty.inherited", {"beta": 0.5, "scale": 3.0})
    assert torch.equal(subject.loss(batch), 1.5 * (batch.logp - batch.ref_logp))
    assert subject.call == "Penalty(beta=0.5).inherited(logp=logp (B, T), ref_logp=ref_logp (B, T), scale=3.0)"
    with pytest.raises(LossCallError, match=r"beta, offset, logp, ref_logp, scale; received gamma"):
        load(f"{file}:Penalty.inherited", {"beta": 0.5, "gamma": 3.0})
    with pytest.raises(
        LossCallError, match=r"a class that cannot be called; remedy: name a method, .*Penalty.inherited"
    ):
        load(f"{file}:Penalty")


def test_names_give_arguments_their_roles(batch):
    loss = lambda x, y, m, b: (x - y) * m * b["logp"]
    names = {"x": "logp", "y": "ref_logp", "m": "mask", "b": "batch"}
    subject = as_subject(loss, "loss", names=names)
    assert torch.equal(subject.loss(batch), (batch.logp - batch.ref_logp) * batch.mask * batch.logp)
    with pytest.raises(
        LossCallError, match=r"a role for x: logp, ref_logp, .*, rollout; received 'ref_log'.*'ref_logp'"
    ):
        as_subject(loss, names={"x": "ref_log"})
    with pytest.raises(LossCallError, match=r"parameters of loss: x, y, m, b; received z"):
        as_subject(loss, "loss", names={**names, "z": "logp"})
    swapped = as_subject(lambda logp, ref_logp: logp, names={"logp": "ref_logp", "ref_logp": "logp"})
    assert swapped.loss(batch) is batch.ref_logp
    assert parse_names(["x=logp", "y = mask"]) == {"x": "logp", "y": "mask"}
    with pytest.raises(LossCallError, match="expected ARGUMENT=ROLE; received 'x'; remedy: write for example --name"):
        parse_names(["x"])


def per_row(x, ref, m, adv, beta=0.04, kind=None):
    return beta * ((x - ref) * (1 - (1 - m))).sum(-1) * adv  # `1 - m` fails for a bool mask


def shifts_labels(logits, ref_logits, labels):
    p, q = (x[:, :-1].log_softmax(-1) for x in (logits, ref_logits))
    return ((p.exp() * (p - q)).sum(-1) * (labels[:, 1:] != -100)).sum() / len(labels)


def shifts_nothing(logits, ref_logits, labels):
    p, q = (x.log_softmax(-1) for x in (logits, ref_logits))
    return ((p.exp() * (p - q)).sum(-1) * (labels != -100)).sum() / len(labels)


def of_a_dict(inputs, **options):
    return inputs["logp"] * (1 - inputs["completion_mask"]) * inputs["advantages"][:, None]


CALLS = {
    (per_row, ("x", "logp"), ("m", "mask")): "per_row(x=logp (B, T), ref=ref_logp (B, T), m=mask (B, T) int, "
    "adv=advantages (B,) per completion, beta=0.5, kind=None)",
    (shifts_labels,): "shifts_labels(logits=logits (B, T+1, V), ref_logits=ref_logits (B, T+1, V), "
    "labels=labels (B, T+1) -100 where masked); logits[:, :-1] belongs to labels[:, 1:], "
    "with one prompt token in front",
    (shifts_nothing,): "shifts_nothing(logits=logits (B, T, V), ref_logits=ref_logits (B, T, V), "
    "labels=labels (B, T) -100 where masked); logits[:, t] belongs to labels[:, t], with no prompt token",
}


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case[0].__name__)
def test_how_a_loss_was_called(case):
    loss, *names = case
    settings = {"beta": 0.5} if loss is per_row else {}
    roles = dict(names) | ({"ref": "ref_logp"} if loss is per_row else {})
    assert as_subject(loss, settings=settings, names=roles).call == CALLS[case]


def test_how_other_losses_were_called():
    text = as_subject(of_a_dict).call
    assert text.startswith(
        "of_a_dict(inputs=dictionary of all tensors, mask (B, T) int, advantages (B,) per completion, logp=logp (B, T)"
    )
    assert as_subject(lambda rollout: rollout.logp, "x").call == "<lambda>(rollout=Rollout)"
    assert as_subject(NeedsBeta, settings={"beta": 2}).call.startswith("NeedsBeta(beta=2)(logp=logp (B, T), ")
    assert as_subject(KLTerm()).call.startswith(f"{KLTerm().name}(Rollout(logp, ref_logp, ")
    opaque = as_subject(lambda logp, cfg: logp, settings={"cfg": NeedsBeta(1)}).call
    assert opaque == "<lambda>(logp=logp (B, T), cfg=NeedsBeta)"
    framework = Subject("trl grpo", "framework", lambda batch: batch.logp, framework="trl")
    assert framework.call == "trl grpo: by klgrad.frameworks, which passes the tensors on as trl takes them"


def test_a_preference_loss_is_refused_by_that_name():
    def dpo(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, beta=0.1):
        raise AssertionError

    for loss in (dpo, lambda chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: None):
        with pytest.raises(
            LossCallError, match=r"received a preference loss, of \w*chosen_logps, .*every pair of rows"
        ):
            as_subject(loss)


def test_the_remedy_for_a_preference_loss():
    """IPO's square over every pair of rows, as the error advises."""

    def every_pair(logp, ref_logp, mask):
        margin = ((logp - ref_logp) * mask).sum(-1)
        return (margin[:, None] - margin).square().mean()

    assert audit(every_pair).verdict == "reverse-kl-sequence"


def test_the_roles_are_one_list():
    """In the help, in errors and on the page, where the other names have these roles too."""
    assert (
        f"Roles: {', '.join(ARGUMENTS)}." in get_type_hints(command, include_extras=True)["name"].__metadata__[0].help
    )
    with pytest.raises(LossCallError) as raised:
        as_subject(lambda x: x)
    assert f"to take some of: {', '.join(ARGUMENTS)}, or their names" in str(raised.value)
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    table = page.partition("| argument | shape | also called |\n")[2].partition("\n\n")[0]
    rows = [[re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:4:2]] for row in table.splitlines()[1:]]
    assert [role for roles, _ in rows for role in roles] == list(ARGUMENTS)
    for roles, others in rows:
        assert {argument_role(name) for name in others} <= set(roles), others


def test_the_problems_have_logits_of_their_own_log_probs():
    for case in proof_cases(False):
        p = case.problem
        batch = from_problem(p, torch.arange(len(p.space))[None], torch.zeros(len(p.space), dtype=torch.float64))
        for logits, logp in ((batch.logits, batch.logp), (batch.ref_logits, batch.ref_logp)):
            picked = logits.log_softmax(-1).gather(-1, batch.tokens[..., None]).squeeze(-1)
            EXACT.check(float(torch.where(batch.mask, picked - logp, 0).detach().abs().max()), 0.0)

"""The advice: settings are held against their audits, and code is run, in the framework where it calls it."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from some import first

from klgrad import KLTerm, Rollout
from klgrad.audit import audit
from klgrad.frameworks import FRAMEWORKS, HOMES, SETTINGS
from klgrad.frameworks.framework import TARGET_OF

MEANINGS = [(d, level) for d in ("reverse", "forward") for level in ("token", "sequence")]
CASES = [(meaning, off_policy) for meaning in MEANINGS for off_policy in (False, True)]
BETA = 0.1


def test_each_meaning_has_the_target_of_its_term():
    for (divergence, level), target in TARGET_OF.items():
        estimator = "k1" if divergence == "reverse" else "k3"
        assert KLTerm(divergence=divergence, level=level, estimator=estimator).descends.on_policy == target
    assert set(TARGET_OF) == set(MEANINGS)


def batch():
    torch.manual_seed(0)
    logp = (-1 - torch.rand(4, 3, dtype=torch.float64)).requires_grad_()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    near = logp.detach()
    return logp, near - torch.rand_like(near), mask, near - 0.1 * torch.rand_like(near)


def declared(term, meaning, off_policy):
    assert (term.divergence, term.level) == meaning
    assert (term.weighting is not None) == off_policy
    return term


def gradient_of(term, logp, ref_logp, mask, behavior_logp):
    rollout = Rollout(logp, ref_logp, mask, behavior_logp=behavior_logp if term.weighting else None)
    return torch.autograd.grad(term(rollout).loss, logp)[0]


@pytest.mark.parametrize(("meaning", "off_policy"), CASES, ids=str)
@pytest.mark.parametrize("framework", ["openrlhf", "skyrl", "liger"])
def test_lines_among_those_of_the_framework(framework, meaning, off_policy):
    logp, ref_logp, mask, behavior_logp = batch()
    experience = SimpleNamespace(action_mask=mask, rollout_log_probs=behavior_logp)
    shared = {"action_log_probs": logp, "base_action_log_probs": ref_logp}
    own = {"logp": logp, "ref_logp": ref_logp, "mask": mask, "behavior_logp": behavior_logp}
    names = {
        "openrlhf": {**shared, "experience": experience},
        "skyrl": {**shared, "loss_mask": mask, "rollout_action_logprobs": behavior_logp},
        "liger": {**own, "loss": 0.0, "beta": 1},
    }[framework]
    exec(HOMES[framework].lines(meaning, off_policy), names)
    result = (names["kl"] * mask).sum() / 4 if framework == "openrlhf" else names.get("kl_loss", names.get("loss"))
    (found,) = torch.autograd.grad(result, logp)
    term = declared(names["term"], meaning, off_policy)
    torch.testing.assert_close(found, gradient_of(term, logp, ref_logp, mask, behavior_logp))
    assert found.abs().max() > 0.01


@pytest.mark.parametrize(("meaning", "off_policy"), CASES, ids=str)
def test_the_loss_for_verl(meaning, off_policy):
    pytest.importorskip("verl.workers")
    from klgrad.audit.probes import Batch
    from klgrad.frameworks.verl import actor as actor_of, micro_batch

    logp, ref_logp, mask, behavior_logp = batch()
    group, zero = torch.tensor([0, 0, 1, 1]), torch.zeros_like(ref_logp)
    tensors = {"logp": logp, "ref_logp": ref_logp, "old_logp": behavior_logp, "behavior_logp": behavior_logp}
    unused = ("advantages", "logits", "ref_logits", "behavior_logits", "tokens")
    given = Batch(**tensors, mask=mask, group=group, rewards=zero[:, 0], **dict.fromkeys(unused, zero))
    output, data = micro_batch(given, zero)
    data["rollout_log_probs"] = behavior_logp
    actor = actor_of(use_kl_loss=True, kl_loss_coef=0.0, loss_agg_mode="seq-mean-token-sum")
    names = {"actor_config": actor}
    exec(HOMES["verl"].lines(meaning, off_policy), names)
    loss, _ = names["loss_fn"](model_output=output, data=data, beta=BETA)
    (found,) = torch.autograd.grad(loss, logp)
    term = declared(eval_term(HOMES["verl"].lines(meaning, off_policy), names), meaning, off_policy)
    torch.testing.assert_close(found, BETA * gradient_of(term, logp, ref_logp, mask, behavior_logp))


def eval_term(lines, names):
    (line,) = [line for line in lines.split("\n") if line.strip().startswith("term = ")]
    return eval(line.partition("= ")[2], names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("meaning", "off_policy"), CASES, ids=str)
def test_the_trainer_for_trl(meaning, off_policy, tmp_path, monkeypatch):
    trl = pytest.importorskip("klgrad.trl")
    monkeypatch.chdir(tmp_path)
    small = {**tiny.SETTINGS, "max_steps": 1}
    complete = lambda folder, **given: trl.KLConfig(folder, **{**small, **given})
    names = {"model": tiny.folder(), "reward": tiny.reward, "prompts": tiny.prompts()}
    lines = HOMES["trl"].lines(meaning, off_policy).replace("KLConfig(", "complete(")  # small enough for a test
    exec(lines, names | {"complete": complete}, names)
    assert isinstance(names["trainer"], trl.KLTrainer)
    assert names["trainer"].objective.term == declared(names["kl"], meaning, off_policy)
    assert (names["args"].kl_coef, names["args"].loss_type) == (0.04, "dr_grpo")
    names["trainer"].train()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", first(["token", "sequence"], 1))
def test_the_trainer_for_trl_descends_what_is_advised(level):
    pytest.importorskip("trl")
    from klgrad.frameworks.trl import declared as trainer_with

    settings = {"kl_level": level, "loss_type": "dr_grpo"}
    assert audit(trainer_with(**settings)).verdict == f"reverse-kl-{level}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "lines", [setting.lines for name in ("trl", "liger") for setting in SETTINGS[name].values()], ids=str
)
def test_settings_that_are_code(lines):
    pytest.importorskip("trl")
    pytest.importorskip("liger_kernel")
    names = {}
    exec(lines.replace('"runs/mine", ', '"runs/mine", use_cpu=True, bf16=False, '), names)
    assert "args" in names or "loss" in names


def test_no_home_is_without_a_tensor():
    assert set(SETTINGS) == set(HOMES) <= set(FRAMEWORKS)
    for home in HOMES.values():
        assert list(home.tensors) == ["logp", "ref_logp", "mask", "behavior_logp"]

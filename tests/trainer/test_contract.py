"""A TRL that differs from the one that the seam was written for is refused, each time with the reason."""

import inspect
import tomllib
from functools import wraps
from pathlib import Path

import pytest
import tiny
import torch
from tolerances import SAME_STEPS
from trl import GRPOConfig
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import MeaningError
from klgrad.trl import KLConfig, KLTrainer, compat
from klgrad.trl.compat import CompletionRows, ContractError, PassCapture
from klgrad.trl.contract import avoid_cudnn_attention, check_contract

pytestmark = pytest.mark.filterwarnings("ignore")


def check():
    check_contract(KLTrainer, KLTrainer)


def test_the_doctor_names_a_patched_trl(monkeypatch):
    doctor = lambda: CliRunner().invoke(app, ["doctor"])
    assert "TRL's methods are its own" in doctor().output
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: 0.0)
    result = doctor()
    assert result.exit_code == 2
    assert "received one of test_contract" in result.output.replace("tests.trainer.", "")
    assert "use KLTrainer without the library that replaces it" in " ".join(result.output.split())
    assert "methods are its own" not in result.output


def test_an_earlier_version_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("trl.__version__", "1.15.2")
    with pytest.raises(ContractError, match=r"trl>=1.16; received TRL 1.15.2; remedy: .*pip install"):
        tiny.trainer(KLTrainer, KLConfig, tmp_path)


@pytest.mark.parametrize("version", [None, "1.16.0", "1.16.0.dev0", "1.17.0", "2.0"])
def test_the_installed_and_a_later_version_are_judged_by_what_they_do(version, monkeypatch):
    if version is not None:
        monkeypatch.setattr("trl.__version__", version)
    check()


def test_the_window_is_what_the_package_claims():
    claims = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert compat.WINDOW in claims["project"]["optional-dependencies"]["train"]


@pytest.fixture
def changed(monkeypatch):
    """Replace text in one of TRL's methods, which keeps TRL's file name, as a later TRL might have it."""

    def change(name, *replacements):
        source = inspect.cleandoc("\n" + inspect.getsource(inspect.unwrap(getattr(GRPOTrainer, name))))
        for old, new in replacements:
            assert old in source, old
            source = source.replace(old, new)
        scope = dict(vars(grpo_trainer))
        exec(compile(source, grpo_trainer.__file__, "exec"), scope)
        monkeypatch.setattr(GRPOTrainer, name, scope[name])

    return change


def test_a_trl_that_shuffles_otherwise_is_refused(changed, tmp_path):
    changed("_prepare_inputs", ("generation_batch = shuffle_sequence_dict(generation_batch)\n", "pass\n"))
    with pytest.raises(ContractError, match=r"(?s)calls shuffle_sequence_dict.*remedy: install a TRL"):
        tiny.trainer(KLTrainer, KLConfig, tmp_path)


def test_a_method_that_is_gone_is_refused(monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_calculate_rewards")
    with pytest.raises(ContractError, match=r"GRPOTrainer._calculate_rewards; received no such method"):
        check()


MODE = '    mode = "train" if self.model.training else "eval"\n'
MASKED = "    if entropy_mask is not None:\n        per_token_loss = per_token_loss * entropy_mask\n"
ADVANTAGES = '    advantages = inputs["advantages"]\n'
LOG_PROBS = "self._get_per_token_logps_and_entropies("
KL = "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
STOPPED = {
    "no KL": ([("self.beta * per_token_kl", "0.0")], {}, "does not depend on the reference"),
    "another KL": ([(KL, "(ref_per_token_logps - per_token_logps) ** 2 / 2")], {}, r"e\^d - d - 1\) .*in the place of"),
    "β on top": ([(MODE, MODE + "    per_token_loss = per_token_loss + self.beta\n")], {}, "in the place of"),
    "log-probs by another way": (
        [(LOG_PROBS, f"GRPOTrainer.{LOG_PROBS[5:]}self, ")],
        {},
        "a call of _get_per_token_logps_and_entropies in TRL's loss; received no such call",
    ),
    "advantages before log-probs": (
        [(ADVANTAGES, ""), ("    prompt_ids, prompt_mask", ADVANTAGES + "    prompt_ids, prompt_mask")],
        {"kl_placement": "advantage"},
        "reads `advantages` after its forward pass; received 'advantages'",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STOPPED)
def test_a_loss_that_changed_stops_the_first_step(case, changed, tmp_path):
    replacements, settings, reason = STOPPED[case]
    changed("_compute_loss", *replacements)
    trainer = tiny.trainer(KLTrainer, KLConfig, tmp_path, **settings)
    before = tiny.weights(trainer)
    with pytest.raises(ContractError, match=reason):
        trainer.train()
    assert torch.equal(tiny.weights(trainer), before)


@pytest.mark.slow
def test_a_step_that_goes_around_the_loss_is_stopped(tmp_path, monkeypatch):
    trainer = tiny.trainer(KLTrainer, KLConfig, tmp_path)
    around = lambda self, model, inputs, *_, **__: GRPOTrainer._compute_loss(self, model, inputs)
    monkeypatch.setattr(GRPOTrainer, "compute_loss", around)
    with pytest.raises(ContractError, match="a training step of TRL's that calls _compute_loss"):
        trainer.train()


@pytest.mark.slow
def test_a_loss_that_is_reduced_otherwise_is_followed(changed, tmp_path):
    """The KL is weighed as that TRL weighs its own."""
    old, new = "loss = (per_token_loss * mask).sum() / normalizer", "loss = 3 * (per_token_loss * mask)[:, 1:].sum()"
    changed("_compute_loss", (old, new))
    stock = tiny.trained(GRPOTrainer, GRPOConfig, tmp_path / "trl", beta=0.3)
    ours = tiny.trained(KLTrainer, KLConfig, tmp_path / "ours", kl_coef=0.3, kl_level="token")
    SAME_STEPS.check(torch.tensor(tiny.logged(ours, "loss")), torch.tensor(tiny.logged(stock, "loss")))
    SAME_STEPS.check(tiny.weights(ours), tiny.weights(stock))


@pytest.mark.slow
def test_masks_of_the_policy_loss_do_not_mask_the_kl(changed, tmp_path):
    """Not even in a TRL that would mask its own."""
    train = lambda name: tiny.trained(KLTrainer, KLConfig, tmp_path / name, kl_coef=0.3, top_entropy_quantile=0.5)
    before = train("before")
    changed("_compute_loss", (MASKED, ""), (MODE, MASKED + MODE))
    SAME_STEPS.check(tiny.weights(train("after")), tiny.weights(before))


def test_an_error_inside_the_loss_is_not_hidden():
    with pytest.raises(ZeroDivisionError), PassCapture().answer("policy", lambda own: own()):
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.parametrize("other", ["the reference", "other tokens"])
def test_a_second_forward_pass_inside_the_loss_is_trls_own(other, tmp_path, monkeypatch):
    """It gets the log-probs of what it asks about, and not those of the policy."""
    trainer = tiny.trainer(KLTrainer, KLConfig, tmp_path, max_steps=1)
    tiny.move_reference(trainer)
    real, seen = GRPOTrainer._compute_loss, []

    def twice(self, model, inputs):
        loss = real(self, model, inputs)
        given = CompletionRows.of(inputs)
        asked = (self.ref_model, given.ids) if other == "the reference" else (model, given.ids.flip(0))
        with torch.no_grad():
            found = self._get_per_token_logps_and_entropies(*asked, given.attention, given.keep)[0]
            own = GRPOTrainer._get_per_token_logps_and_entropies(self, *asked, given.attention, given.keep)[0]
            policy = GRPOTrainer._get_per_token_logps_and_entropies(self, model, given.ids, given.attention, given.keep)
        seen.append((torch.equal(found, own), torch.equal(found, policy[0])))
        return loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", twice)
    trainer.train()
    assert set(seen) == {(True, False)}


# What a `KLTrainer` refuses to stand on.

METHODS = ("compute_loss", "_compute_loss", "training_step", "_get_per_token_logps_and_entropies")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_method_that_is_not_trls_is_refused(name, wrapped, monkeypatch, tmp_path):
    """As by libraries that replace TRL's loss at run time; also where the replacement carries the old one's name."""
    real = getattr(GRPOTrainer, name)

    def replaced(self, *args, **kwargs):
        return real(self, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, name, wraps(real)(replaced) if wrapped else replaced)
    with pytest.raises(ContractError, match=rf"GRPOTrainer.{name} of TRL .*test_contract.py.*leave it out"):
        tiny.trainer(KLTrainer, KLConfig, tmp_path)


TRLS = GRPOConfig("unused", beta=0.04, use_cpu=True, bf16=False)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        # TRL's KL is token by token, the default of `KLConfig` is not.
        (TRLS, r"GRPOConfig; .*beta=0.04, token by token, write kl_coef=0.04, kl_level='token'"),
        ("runs/mine", "str"),
        ({"output_dir": "runs/mine"}, "dict"),
    ],
)
def test_what_is_no_configuration(args, said):
    with pytest.raises(MeaningError, match=f"a KLConfig; received a {said}"):
        KLTrainer(tiny.folder(), tiny.reward, args, train_dataset=tiny.prompts())


# cuDNN's attention is avoided, or warned of, exactly where its gradients may be NaN.

HERE = torch.device("cuda")


@pytest.mark.parametrize(
    ("version", "capability", "enabled", "switched"),
    [
        ("2.13.0+cu130", (9, 0), True, [False]),
        ("2.10.0", (9, 0), True, []),
        ("2.13.0", (8, 0), True, []),
        ("2.13.0", (9, 0), False, []),
    ],
)
def test_it_is_switched_off_where_it_has_the_error(version, capability, enabled, switched, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", calls.append)
    avoid_cudnn_attention(HERE)
    avoid_cudnn_attention(torch.device("cpu"))
    assert calls == switched


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_gradients_of_very_negative_scores_are_finite_without_it():
    avoid_cudnn_attention(HERE)
    q, k, v = (torch.randn(2, 3, 64, 64, device=HERE, dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -120 * 8.0  # every score is near -120
    for x in (q, k, v):
        x.requires_grad_()
    mask = torch.ones(64, 64, dtype=torch.bool, device=HERE).tril()[None, None]
    torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))

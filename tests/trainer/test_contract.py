"""A TRL that differs from the one that the seam was written for is refused, each time with the reason."""

import inspect
import tomllib
from pathlib import Path

import pytest
import tiny
import torch
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.trl import KLConfig, KLTrainer, compat, contract
from klgrad.trl.compat import Completions, ContractError, ForwardPass, PreparedAnswer, StandInBeta
from klgrad.trl.contract import check_contract

pytestmark = pytest.mark.filterwarnings("ignore")


def check():
    check_contract(KLTrainer.__new__(KLTrainer), KLTrainer)


def test_the_installed_trl_keeps_the_contract():
    check()


def test_the_doctor_names_a_patched_trl(monkeypatch):
    doctor = lambda: CliRunner().invoke(app, ["doctor"])
    assert "TRL's methods are its own" in doctor().output
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: 0.0)
    result = doctor()
    assert result.exit_code == 2
    assert "received one of test_contract" in result.output.replace("tests.trainer.", "")
    assert "use KLTrainer without the library that replaces it" in " ".join(result.output.split())
    assert "methods are its own" not in result.output


@pytest.mark.parametrize("found", ["1.15.2", "1.17.0", "1.17.0.dev0", "2.0"])
def test_another_version_is_refused(found, monkeypatch, tmp_path):
    monkeypatch.setattr("trl.__version__", found)
    with pytest.raises(ContractError, match=rf"trl>=1.16,<1.17; received TRL {found}; remedy: .*pip install"):
        tiny.trainer(KLTrainer, KLConfig, tmp_path)


@pytest.mark.parametrize("found", ["1.16.0", "1.16.3"])
def test_a_version_inside_the_window_is_not_refused(found, monkeypatch):
    monkeypatch.setattr("trl.__version__", found)
    check()


def test_the_window_is_what_the_package_claims():
    claims = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert compat.WINDOW in claims["project"]["optional-dependencies"]["train"]


def as_trls_own(source, name):
    """A method with this source and the file name of TRL's, as a later TRL might have it."""
    code = compile(source, grpo_trainer.__file__, "exec")
    scope = dict(vars(grpo_trainer))
    exec(code, scope)
    made = scope[name]
    made.source = source
    return made


@pytest.fixture
def changed(monkeypatch):
    """Replace text in the source of one of TRL's methods."""
    real = inspect.getsource

    def change(name, *replacements):
        method = inspect.unwrap(getattr(GRPOTrainer, name))
        source = inspect.cleandoc("\n" + real(method))
        for old, new in replacements:
            assert old in source, old
            source = source.replace(old, new)
        monkeypatch.setattr(GRPOTrainer, name, as_trls_own(source, name))

    monkeypatch.setattr(inspect, "getsource", lambda x: getattr(x, "source", None) or real(x))
    return change


ADDED = "            per_token_loss = per_token_loss + self.beta * per_token_kl\n".replace(" " * 12, " " * 8, 1)
MASKED = "    if entropy_mask is not None:\n        per_token_loss = per_token_loss * entropy_mask\n"
OFF_POLICY = "        per_token_loss = per_token_loss * off_policy_mask\n"
MODE = '    mode = "train" if self.model.training else "eval"\n'


def test_a_change_that_changes_nothing_is_not_refused(changed):
    changed("_compute_loss", (MODE, MODE + "    unused = 0\n"))
    check()


CHANGES = {
    "the KL before the entropy mask": (
        "_compute_loss",
        [(MASKED, ""), (MODE, MASKED + MODE)],
        "as the last change of the loss of each token; received `per_token_loss = per_token_loss \\* entropy_mask`",
    ),
    "the KL before the off-policy mask": (
        "_compute_loss",
        [(MODE, "    if self.off_policy_mask_threshold is not None:\n" + OFF_POLICY + MODE)],
        "as the last change of the loss of each token; received `per_token_loss = per_token_loss \\* off_policy_mask`",
    ),
    "a mask in place": (
        "_compute_loss",
        [(MODE, "    per_token_loss *= 2\n" + MODE)],
        "reduced over `mask` alone; received `per_token_loss \\*= 2`",
    ),
    "a reduction over fewer tokens": (
        "_compute_loss",
        [("(per_token_loss * mask).sum()", "(per_token_loss * entropy_mask).sum()")],
        "reduced over `mask` alone; received `per_token_loss \\* entropy_mask`",
    ),
    "β times something else": (
        "_compute_loss",
        [("self.beta * per_token_kl", "self.beta * per_token_kl * coef_1")],
        "as the last change of the loss of each token",
    ),
    "β used once more": (
        "_compute_loss",
        [(MODE, MODE + "    scale = 1 + self.beta\n")],
        r"`beta` used in TRL's loss as .*received .*1 \+ self.beta",
    ),
    "a second call for log-probs": (
        "_compute_loss",
        [(MODE, MODE + "    more = self._get_per_token_logps_and_entropies(model, input_ids, attention_mask, 1)\n")],
        "one call of _get_per_token_logps_and_entropies in TRL's loss; received 2",
    ),
    "β used elsewhere": ("_prepare_inputs", [(MODE, MODE + "    scale = self.beta\n")], "`beta` used by"),
    "another order of what is generated": (
        "_generate",
        [("return prompt_ids, completion_ids, tool_mask", "return completion_ids, prompt_ids, tool_mask")],
        "returns prompt_ids, completion_ids, .*received completion_ids, prompt_ids",
    ),
    "another shuffle": (
        "_prepare_inputs",
        [("generation_batch = shuffle_sequence_dict(generation_batch)\n", "pass\n")],
        "calls shuffle_sequence_dict",
    ),
    "another signature": (
        "_calculate_rewards",
        [("prompts, completions, completion_ids_list", "completions, prompts, completion_ids_list")],
        r"_calculate_rewards\(inputs, prompts, .*received parameters \(inputs, completions, prompts",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_trl_that_changed_is_refused(case, changed, tmp_path):
    name, replacements, reason = CHANGES[case]
    changed(name, *replacements)
    with pytest.raises(ContractError, match=f"(?s){reason}.*remedy: install the TRL"):
        tiny.trainer(KLTrainer, KLConfig, tmp_path)


def test_a_method_that_is_gone_is_refused(monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_generate_single_turn")
    with pytest.raises(ContractError, match=r"_generate_single_turn\(prompt_ids, .*received no such method"):
        check()


def test_a_function_whose_code_was_replaced_is_read_again(monkeypatch):
    check()
    loss = inspect.unwrap(GRPOTrainer._compute_loss)
    monkeypatch.setattr(loss, "__code__", inspect.unwrap(GRPOTrainer._generate).__code__)
    with pytest.raises(ContractError, match="`beta` used"):
        contract.check_loss(GRPOTrainer._compute_loss)


def test_a_source_that_cannot_be_read_is_refused(monkeypatch):
    def unreadable(_):
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", unreadable)
    contract._tree.cache_clear()
    with pytest.raises(ContractError, match=r"the source of .*could not get source code"):
        check()


@pytest.fixture
def batch():
    ones = torch.ones(2, 3, dtype=torch.long)
    return {
        "prompt_ids": 5 * ones,
        "prompt_mask": ones,
        "completion_ids": torch.arange(6).view(2, 3),
        "completion_mask": ones,
    }


def passed():
    return ForwardPass(torch.zeros(2, 3), torch.ones(2, 3), None)


def asked(batch, **changes):
    given = Completions.of(batch)
    call = {"model": "policy", "ids": given.ids, "attention": given.attention, "keep": given.keep, "extra": {}}
    return {**call, **changes}


def test_an_answer_is_given_once(batch):
    prepared, found = PreparedAnswer(), passed()
    with prepared.prepared(found, "policy", batch):
        assert prepared.take(**asked(batch))[0] is found.logp
        assert prepared.take(**asked(batch)) is None
    assert prepared.take(**asked(batch)) is None


@pytest.mark.parametrize(
    "other",
    [
        {"model": "reference"},
        {"keep": 2},
        {"ids": torch.zeros(2, 5, dtype=torch.long)},
        {"extra": {"pixel_values": torch.zeros(1)}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_call_with_other_arguments_gets_no_answer(other, batch):
    prepared = PreparedAnswer()
    with prepared.prepared(passed(), "policy", batch):
        assert prepared.take(**asked(batch, **other)) is None
        assert prepared.take(**asked(batch)) is not None  # it is still there for the call that it is for


def test_a_call_about_other_tokens_is_an_error(batch):
    prepared, ids = PreparedAnswer(), Completions.of(batch).ids.clone()
    ids[1, -1] += 1
    with (
        pytest.raises(ContractError, match="received a call with other tokens"),
        prepared.prepared(passed(), "policy", batch),
    ):
        prepared.take(**asked(batch, ids=ids))


def test_a_loss_that_does_not_ask_is_an_error(batch):
    with (
        pytest.raises(ContractError, match="received no such call"),
        PreparedAnswer().prepared(passed(), "policy", batch),
    ):
        pass


def test_an_error_inside_the_loss_is_not_hidden(batch):
    with pytest.raises(ZeroDivisionError), PreparedAnswer().prepared(passed(), "policy", batch):
        raise ZeroDivisionError


def test_the_stand_in_for_beta():
    beta = StandInBeta(torch.ones(2))
    assert beta != 0.0
    assert (beta * torch.zeros(2)).tolist() == [1.0, 1.0]
    assert beta.uses == 1


@pytest.mark.slow
def test_a_loss_that_drops_the_kl_is_an_error(tmp_path, monkeypatch):
    """Replaced after the trainer was built, when the contract is no longer looked at."""
    trainer = tiny.trainer(KLTrainer, KLConfig, tmp_path)
    real = GRPOTrainer._compute_loss

    def without_kl(self, model, inputs):
        self.beta = 0.0
        return real(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", without_kl)
    with pytest.raises(ContractError, match="one product `beta \\* per_token_kl` in TRL's loss; received 0"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("other", ["the reference", "other tokens"])
def test_a_second_forward_pass_inside_the_loss_is_trls_own(other, tmp_path, monkeypatch):
    """It gets the log-probs of what it asks about, and not those that were prepared."""
    trainer = tiny.trainer(KLTrainer, KLConfig, tmp_path, max_steps=1)
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(1.5)
    real, seen = GRPOTrainer._compute_loss, []

    def twice(self, model, inputs):
        loss = real(self, model, inputs)
        given = Completions.of(inputs)
        asked = (self.ref_model, given.ids) if other == "the reference" else (model, given.ids.flip(0))
        with torch.no_grad():
            found = self._get_per_token_logps_and_entropies(*asked, given.attention, given.keep)[0]
            own = GRPOTrainer._get_per_token_logps_and_entropies(self, *asked, given.attention, given.keep)[0]
            policy = GRPOTrainer._get_per_token_logps_and_entropies(self, model, given.ids, given.attention, given.keep)
        seen.append((torch.equal(found, own), torch.equal(found, policy[0])))
        return loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", twice)
    trainer.train()
    assert seen == [(True, False)]


@pytest.mark.slow
def test_groups_that_are_not_adjacent_rows_are_an_error(tmp_path, monkeypatch):
    """As if TRL's sampler no longer repeated each prompt `num_generations` times in a row."""
    trainer = tiny.trainer(KLTrainer, KLConfig, tmp_path)
    sampler = trainer._get_train_sampler()
    sampler.mini_repeat_count, sampler.batch_size = 2, 4
    monkeypatch.setattr(trainer, "_get_train_sampler", lambda *_: sampler)
    with pytest.raises(ContractError, match=r"one prompt in adjacent rows.*received other prompts in rows 1 and 2"):
        trainer.train()

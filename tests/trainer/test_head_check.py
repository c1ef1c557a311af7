"""The head that exact statistics are computed by is compared with the model's own logits, once."""

import pytest
import tiny
import torch
from torch import nn

from klgrad.errors import KernelInputError
from klgrad.trl import KLConfig, KLTrainer, scorer
from klgrad.trl.scorer import compare_head, some_tokens

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

CAP = 0.5
"""Below the logits of the tiny model, so that it changes them."""


def made(path, **settings):
    return tiny.trainer(KLTrainer, KLConfig, path, kl_estimator="exact", max_steps=1, **settings)


class Capped(nn.Linear):
    """A head whose soft cap no field of the configuration tells."""

    def forward(self, input):
        return CAP * torch.tanh(super().forward(input) / CAP)


def cap(model):
    model.get_output_embeddings().__class__ = Capped


@pytest.mark.parametrize("settings", [{}, {"kl_top_k": 4}, {"temperature": 0.7}, {"kl_baseline": "leave_one_out"}])
def test_a_head_that_is_read_rightly_trains(settings, tmp_path):
    trainer = made(tmp_path, **settings)
    before = tiny.weights(trainer)
    trainer.train()
    assert not torch.equal(tiny.weights(trainer), before)


@pytest.mark.parametrize("whose", ["policy", "reference"])
def test_a_head_that_is_read_wrongly_is_refused(whose, tmp_path):
    trainer = made(tmp_path)
    cap(trainer.model if whose == "policy" else trainer.ref_model)
    before = tiny.weights(trainer)
    with pytest.raises(KernelInputError, match=r"the model's own logits .*a root mean square difference of [\d.]+"):
        trainer.train()
    assert torch.equal(tiny.weights(trainer), before)


def test_with_adapters(tmp_path):
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)
    made(tmp_path / "right", peft_config=adapter).train()
    trainer = made(tmp_path / "wrong", peft_config=adapter)
    cap(trainer.model.get_base_model())
    with pytest.raises(KernelInputError, match="root mean square difference"):
        trainer.train()


def test_dropout_is_no_difference_and_stays_on(tmp_path):
    trainer = made(tmp_path)
    noisy = nn.Dropout(0.5)
    trainer.model.model.embed_tokens.register_forward_hook(lambda module, args, out: noisy(out))
    trainer.model.noisy = noisy
    trainer.train()
    assert noisy.training


def test_the_last_live_tokens_of_a_completion_are_compared():
    ids = torch.arange(300)[None].repeat(3, 1) % 30 + 2
    mask = torch.ones_like(ids)
    assert torch.equal(some_tokens({"completion_ids": ids, "completion_mask": mask}), ids[:1, -64:])
    mask[0, 50:] = 0
    assert torch.equal(some_tokens({"completion_ids": ids, "completion_mask": mask}), ids[:1, :50])
    assert some_tokens({"completion_ids": ids, "completion_mask": 0 * mask}).shape == (1, 1)


def test_it_is_looked_at_once(tmp_path, monkeypatch):
    seen = []
    compare = lambda accelerator, model, ids: seen.append(model) or compare_head(accelerator, model, ids)
    monkeypatch.setattr(scorer, "compare_head", compare)
    trainer = tiny.trainer(KLTrainer, KLConfig, tmp_path, kl_estimator="exact", max_steps=3)
    trainer.train()
    assert seen == [trainer.model, trainer.ref_model]


def test_rounding_to_bfloat16_is_allowed_for(tmp_path):
    """Also where the logits are given as float32."""
    model = made(tmp_path).model.bfloat16()
    model.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits.float()))
    from accelerate import Accelerator

    compare_head(Accelerator(cpu=True), model, torch.arange(2, 12)[None])
    cap(model)
    with pytest.raises(KernelInputError, match="root mean square difference"):
        compare_head(Accelerator(cpu=True), model, torch.arange(2, 12)[None])

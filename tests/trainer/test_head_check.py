"""The head that exact statistics are computed by is compared with the model's own logits, once."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from torch import nn

from klgrad.errors import MeaningError
from klgrad.trl import KLConfig, KLTrainer, scorer as head_check
from klgrad.trl.compat import Completions
from klgrad.trl.scorer import difference, few_tokens

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
    with pytest.raises(
        MeaningError, match=rf"log-probs of the {whose}'s own logits within .* a difference of [\d.]+ nats"
    ):
        trainer.train()
    assert torch.equal(tiny.weights(trainer), before)


def test_with_adapters(tmp_path):
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)
    made(tmp_path / "right", peft_config=adapter).train()
    trainer = made(tmp_path / "wrong", peft_config=adapter)
    cap(trainer.model.get_base_model())
    with pytest.raises(MeaningError, match="a difference of"):
        trainer.train()


def test_dropout_is_no_difference_and_stays_on(tmp_path):
    trainer = made(tmp_path)
    noisy = nn.Dropout(0.5)
    trainer.model.model.embed_tokens.register_forward_hook(lambda module, args, out: noisy(out))
    trainer.model.noisy = noisy
    trainer.train()
    assert noisy.training


def test_a_few_tokens_of_long_completions(tmp_path):
    ids = torch.arange(300)[None].repeat(3, 1) % 30 + 2
    attention = torch.ones_like(ids)
    attention[0, :250] = 0
    few = few_tokens(Completions(ids, attention, 200, attention[:, -200:]))
    assert few.ids.tolist() == [ids[0, 250:].tolist()]
    attention[0] = 1
    assert few_tokens(Completions(ids, attention, 200, attention[:, -200:])).ids.shape == (1, 64)


def test_it_is_looked_at_once(tmp_path, monkeypatch):
    seen = []
    compare = lambda scorer, trainer, model, few: seen.append(model) or difference(scorer, trainer, model, few)
    monkeypatch.setattr(head_check, "difference", compare)
    trainer = tiny.trainer(KLTrainer, KLConfig, tmp_path, kl_estimator="exact", max_steps=3)
    trainer.train()
    assert seen == [trainer.model, trainer.ref_model]


def test_rounding_to_bfloat16_is_allowed_for(tmp_path):
    """The tolerance grows with the logits and with what they are rounded to, and stays below a cap's difference."""
    trainer = made(tmp_path)
    few = few_tokens(Completions(torch.arange(2, 12)[None], torch.ones(1, 10), 4, torch.ones(1, 4)))
    off, allowed = difference(trainer.scorer, trainer, trainer.model, few)
    assert off < 1e-4 < allowed < 0.01
    trainer.accelerator = SimpleNamespace(mixed_precision="bf16", autocast=trainer.accelerator.autocast)
    assert difference(trainer.scorer, trainer, trainer.model, few)[1] > allowed

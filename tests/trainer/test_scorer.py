"""The head that exact statistics are computed by is the model's own, and a sum over some entries has its tail."""

import itertools

import pytest
import tiny
import torch
from accelerate import Accelerator
from peft import LoraConfig
from tolerances import EXACT
from torch import nn

from klgrad import ImportanceWeighting, KLTerm, Rollout
from klgrad.errors import KernelInputError
from klgrad.kernels import TokenStatistics, TopEntries
from klgrad.trl import KLConfig, KLTrainer, scorer
from klgrad.trl.compat import base_of
from klgrad.trl.config import TRLObjective, fields_of
from klgrad.trl.scorer import compare_head, some_tokens, with_top_k_kl

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


ADAPTER = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)
RIGHT = [{}, {"kl_top_k": 4}, {"temperature": 0.7}, {"kl_baseline": "leave_one_out"}, {"peft_config": ADAPTER}]


@pytest.mark.parametrize("settings", RIGHT)
def test_a_head_that_is_read_rightly_trains(settings, tmp_path):
    trainer = made(tmp_path, **settings)
    before = tiny.weights(trainer)
    trainer.train()
    assert not torch.equal(tiny.weights(trainer), before)


@pytest.mark.parametrize("whose", ["policy", "reference", "adapted policy"])
def test_a_head_that_is_read_wrongly_is_refused(whose, tmp_path):
    trainer = made(tmp_path, peft_config=ADAPTER if whose == "adapted policy" else None)
    cap(trainer.ref_model if whose == "reference" else base_of(trainer.model))
    before = tiny.weights(trainer)
    with pytest.raises(KernelInputError, match=r"the model's own logits .*a root mean square difference of [\d.]+"):
        trainer.train()
    assert torch.equal(tiny.weights(trainer), before)


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
    trainer = tiny.trained(KLTrainer, KLConfig, tmp_path, kl_estimator="exact", max_steps=3)
    assert seen == [trainer.model, trainer.ref_model]


def test_rounding_to_bfloat16_is_allowed_for(tmp_path):
    """Also where the logits are given as float32."""
    model = made(tmp_path).model.bfloat16()
    model.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits.float()))
    compare = lambda: compare_head(Accelerator(cpu=True), model, torch.arange(2, 12)[None])
    compare()
    cap(model)
    with pytest.raises(KernelInputError, match="root mean square difference"):
        compare()


# Top-k distillation on another sampler's completions, by the sum over all of them.

WORDS, LENGTH, K = 4, 2, 2
STATES = 1 + WORDS  # before the first word, and after each


def tables():
    generator = torch.Generator().manual_seed(3)
    z, ref, sampler = torch.randn(3, STATES, WORDS, generator=generator, dtype=torch.float64)
    return z.requires_grad_(), z.log_softmax(-1), ref.log_softmax(-1), sampler.log_softmax(-1)


def completions():
    words = torch.tensor(list(itertools.product(range(WORDS), repeat=LENGTH)))
    return words, torch.stack([torch.zeros(len(words), dtype=torch.long), words[:, 0] + 1], 1)


def of(table, words, states):
    return table[states, words]


def expected(term, tail="sampled"):
    """The mean, over everything that the sampler may say, of the gradient of the term."""
    z, log_p, log_q, log_mu = tables()
    words, states = completions()
    ids = log_q.topk(K).indices[states]
    gathered = lambda table: table[states].gather(2, ids)
    best = TopEntries(ids, gathered(log_q), of(log_q, words, states), (ids == words[..., None]).any(-1))
    found = TokenStatistics(of(log_p, words, states), torch.zeros(()), None, None, None, gathered(log_p))
    mask, behavior = torch.ones_like(words), of(log_mu, words, states)
    fields = {name.removeprefix("kl_"): value for name, value in fields_of(term).items()}
    objective = TRLObjective(**{"ratio_bound": "none", **fields}, reduction="sequence", top_k=K, tail=tail)
    assert (objective.term, objective.bound) == (term, None)
    found = with_top_k_kl(found, best, objective, mask, behavior)
    kls = {"token_reverse_kl": found.reverse_kl, "token_forward_kl": found.forward_kl}
    rollout = Rollout(found.logp, found.ref_logp, mask, behavior_logp=behavior, **kls)
    chance = behavior.sum(-1).exp()
    EXACT.check(chance.sum(), 1.0)
    return torch.autograd.grad((chance[:, None] * term(rollout).per_token).sum(), z)[0]


def sequence_kl():
    z, log_p, log_q, _ = tables()
    words, states = completions()
    p, q = of(log_p, words, states).sum(-1), of(log_q, words, states).sum(-1)
    return torch.autograd.grad((p.exp() * (p - q)).sum(), z)[0]


def kl_where_the_sampler_goes(divergence):
    z, log_p, log_q, log_mu = tables()
    visits = torch.cat([torch.ones(1), log_mu[0].exp()])
    a, b = (log_p, log_q) if divergence == "reverse" else (log_q, log_p)
    return torch.autograd.grad((visits * (a.exp() * (a - b)).sum(-1)).sum(), z)[0]


@pytest.mark.parametrize("ratio", ["prefix", "sequence"])
def test_the_sequence_kl(ratio):
    EXACT.check_vector(expected(KLTerm(estimator="exact", weighting=ImportanceWeighting(ratio, None))), sequence_kl())


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_the_token_kl_where_the_sampler_goes(divergence):
    term = KLTerm(divergence=divergence, level="token", estimator="exact")  # only the tail needs a ratio
    EXACT.check_vector(expected(term), kl_where_the_sampler_goes(divergence))


def test_one_lump_is_another_divergence():
    """A smaller one: its gradient is told apart, so the tests above would see the tail missing."""
    term = KLTerm(level="token", estimator="exact")
    full = kl_where_the_sampler_goes("reverse")
    assert (expected(term, "lump") - full).norm() > 0.05 * full.norm()

"""The sampler of the experiments draws from the model's distribution (its CUDA graph is not tested here)."""

import pytest
import torch

pytest.importorskip("transformers")
from graph_sampling import GraphSampler
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY, PAD, END, NEW = 23, 0, 1, 9
EQUAL = 1e-10
"""Both compute the same sums in float64, in another order."""


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, initializer_range=0.7, pad_token_id=PAD)
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture
def prompts():
    """Five prompts of 3 to 7 tokens, padded on the left, two of them twice."""
    ids = torch.randint(2, VOCABULARY, (5, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 4, 2, 1, 3)):
        ids[row, :missing], mask[row, :missing] = PAD, 0
    twice = torch.tensor([3, 0, 1, 2, 0, 4, 3])
    return {"input_ids": ids[twice], "attention_mask": mask[twice]}


def settings(**chosen):
    plain = {"max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": [END], "top_k": 0, "top_p": 1.0}
    return GenerationConfig(**plain | chosen)


def test_greedy_completions_are_those_of_transformers(model, prompts):
    greedy = settings(do_sample=False, top_k=None, top_p=None)
    expected = model.generate(**prompts, generation_config=greedy)
    received = GraphSampler(model).generate(**prompts, generation_config=greedy)
    assert received.tolist() == expected.tolist()


def test_every_draw_has_the_log_prob_of_the_model(model, prompts):
    torch.manual_seed(3)
    sampler = GraphSampler(model)
    for _ in range(2):  # the second time the buffers hold the first batch
        whole = sampler.generate(**prompts, generation_config=settings(do_sample=True, temperature=0.7))
        start = prompts["input_ids"].shape[1]
        mask = torch.cat([prompts["attention_mask"], torch.ones(len(whole), whole.shape[1] - start).long()], 1)
        position = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(whole, attention_mask=mask, position_ids=position).logits[:, start - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(2, whole[:, start:, None])[..., 0]
        drawn = whole[:, start:] != PAD
        assert drawn.any(1).all()
        assert (sampler.logp.double() - expected)[drawn].abs().max() < 1e-6  # kept in float32


def test_half_weights_are_those_of_autocast(model, prompts):
    """Autocast casts the weights of linear layers at each use; here they are cast before, and stay after training."""
    model = model.float()
    given = settings(do_sample=True, temperature=1.0)
    sampler = GraphSampler(model, torch.float16)
    start = prompts["input_ids"].shape[1]
    for _ in range(2):
        torch.manual_seed(1)
        whole = sampler.generate(**prompts, generation_config=given)  # casts also outside of autocast
        with torch.autocast("cpu", torch.float16):
            torch.manual_seed(1)
            same = GraphSampler(model).generate(**prompts, generation_config=given)
        assert whole[:, start:].tolist() == same[:, start:].tolist()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)  # an update, in place
    assert model.lm_head.weight.dtype == torch.float32


def test_draws_follow_the_distribution(model):
    """20,000 first tokens: every frequency within 5 standard errors of its probability."""
    torch.manual_seed(0)
    one = torch.tensor([[5, 7, 3]])
    given = {"input_ids": one.repeat(20_000, 1), "attention_mask": torch.ones(20_000, 3).long()}
    sampler = GraphSampler(model.float())
    drawn = sampler.generate(**given, generation_config=settings(do_sample=True, temperature=1.0, max_new_tokens=1))
    p = model(one).logits[0, -1].softmax(-1)
    frequency = torch.bincount(drawn[:, -1], minlength=VOCABULARY) / 20_000
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / 20_000).sqrt() + 1e-4).all()


def test_rows_are_padded_after_their_end(model, prompts):
    torch.manual_seed(0)
    given = settings(do_sample=True, temperature=2.0, max_new_tokens=60)
    made = GraphSampler(model).generate(**prompts, generation_config=given)[:, prompts["input_ids"].shape[1] :]
    for row in made.tolist():
        if END in row:
            assert set(row[row.index(END) + 1 :]) <= {PAD}
    assert any(END in row for row in made.tolist())


def test_other_settings_are_refused(model, prompts):
    with pytest.raises(ValueError, match="top_k"):
        GraphSampler(model).generate(**prompts, generation_config=settings(do_sample=True, top_k=5))

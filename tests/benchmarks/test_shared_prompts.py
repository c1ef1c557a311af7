"""Models that read a prompt once give the hidden states, log-probs and gradients of those that read it again."""

import pytest
import torch

pytest.importorskip("trl")
import shared_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from klgrad.trl import scorer

VOCABULARY, PROMPT, NEW, COMPLETIONS = 23, 7, 5, 4
EQUAL = 1e-10
"""Both compute the same sums in float64, in another order."""
GRADIENTS_EQUAL = 1e-6
"""The norms of transformers compute in float32, and their gradients are summed over prompts in another order."""


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, initializer_range=0.7)
    return LlamaForCausalLM(config).double()


@pytest.fixture
def batch():
    """Four completions to each of three prompts, the second of which is asked twice, in a random order."""
    numbers = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, VOCABULARY, (3, PROMPT), generator=numbers)
    seen = torch.ones_like(prompts)
    for row, missing in enumerate((0, 4, 2)):
        prompts[row, :missing], seen[row, :missing] = 0, 0
    order = torch.tensor([0, 1, 2, 1]).repeat_interleave(COMPLETIONS)[torch.randperm(16, generator=numbers)]
    completions = torch.randint(2, VOCABULARY, (16, NEW), generator=numbers)
    live = (torch.arange(NEW) < torch.randint(1, NEW + 1, (16, 1), generator=numbers)).long()
    live[0] = 1
    ids, mask = torch.cat([prompts[order], completions * live], 1), torch.cat([seen[order], live], 1)
    return {"input_ids": ids, "attention_mask": mask}


def shared(model):
    """Let a model share prompts; the shapes of the batches that its layers read from now on."""
    calls = []
    shared_prompts.share_prompts(model, COMPLETIONS)
    model.model.embed_tokens.register_forward_pre_hook(lambda _, given: calls.append(tuple(given[0].shape)))
    return calls


def labels_of(batch):
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, shared_prompts.IGNORED)
    labels[:, :PROMPT] = shared_prompts.IGNORED
    return labels


def loss_and_gradients(model, batch):
    model.zero_grad()
    labels = labels_of(batch)
    logits = model(**batch, labels=labels).logits  # the model's own loss is computed in float32
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    return logits, [p.grad.clone() for p in model.parameters()]


def test_logits_and_gradients_are_those_of_separate_rows(model, batch):
    logits, gradients = loss_and_gradients(model, batch)
    calls = shared(model)
    shared_logits, shared_gradients = loss_and_gradients(model, batch)
    assert calls == [(4, PROMPT + COMPLETIONS * NEW)]
    live = batch["attention_mask"].bool()
    torch.testing.assert_close(shared_logits[live], logits[live], atol=EQUAL, rtol=EQUAL)
    torch.testing.assert_close(shared_gradients, gradients, atol=GRADIENTS_EQUAL, rtol=0)


def test_statistics_of_tokens_are_those_of_separate_rows(model, batch):
    scorer.add_statistics_forward(model)
    live = batch["attention_mask"][:, PROMPT:]
    question = scorer.StatisticsRequest(NEW, 0.7, batch["input_ids"][:, PROMPT:], live)
    expected = model(**batch, question=question)
    calls = shared(model)
    received = model(**batch, question=question)
    assert calls == [(4, PROMPT + COMPLETIONS * NEW)]
    for name in ("logp", "entropy"):
        torch.testing.assert_close(received[name] * live, expected[name] * live, atol=EQUAL, rtol=EQUAL)


@pytest.mark.parametrize("rows", [slice(0, 15), slice(0, 12)])
def test_a_batch_without_whole_groups_keeps_its_rows(model, batch, rows):
    part = {name: x[rows] for name, x in batch.items()}
    expected = model(**part, labels=labels_of(part)).logits
    calls = shared(model)
    received = model(**part, labels=labels_of(part)).logits
    assert calls == [tuple(part["input_ids"].shape)]
    assert torch.equal(received, expected)


def test_a_call_that_does_not_say_where_completions_start_is_unchanged(model, batch):
    expected = model(**batch).logits
    calls = shared(model)
    assert torch.equal(model(**batch).logits, expected)
    assert calls == [tuple(batch["input_ids"].shape)]

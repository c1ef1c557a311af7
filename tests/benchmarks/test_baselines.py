"""The sampler of the untrained model, against the model itself: greedy answers, and the KL of sharper sampling."""

import pytest
import torch
from tolerances import SINGLE
from training.small import write_model

pytest.importorskip("transformers")

import exp_baselines as script

PROMPTS, LONGEST = ["Compute 3 + 4", "Compute 12 + 5 and 6", "Compute 7"], 6


@pytest.mark.slow
def test_answers_and_kls_are_those_of_the_model(tmp_path):
    sampler = script.Sampler(write_model(tmp_path / "model"))
    sampler.tokenizer.chat_template = "{{ messages[0]['content'] }} Reply"
    end = sampler.tokenizer.eos_token_id
    torch.manual_seed(0)
    ids, kl = sampler(PROMPTS, LONGEST)
    assert ids.shape == (len(PROMPTS), len(script.TEMPERATURES), LONGEST)
    for prompt, found, own in zip(PROMPTS, ids, kl, strict=True):
        chat = torch.tensor([sampler.chat(prompt)])
        for temperature, completion, divergence in zip(script.TEMPERATURES, found, own, strict=True):
            ended = (completion == end).nonzero()
            live = completion[: int(ended[0]) + 1 if len(ended) else LONGEST]
            with torch.no_grad():
                logits = sampler.model(torch.cat([chat, live[None]], 1)).logits[0, chat.shape[1] - 1 : -1]
            ref = logits.log_softmax(-1)
            if temperature:
                sharp = (logits / temperature).log_softmax(-1)
                expected = (sharp.exp() * (sharp - ref)).sum()
            else:
                assert live.tolist() == logits.argmax(-1).tolist()
                expected = -ref.max(-1).values.sum()
            SINGLE.check(divergence, expected)

"""The heads of tiny transformers models have the log-probs of the models' own logits."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tolerances import SINGLE

from klgrad.errors import KernelInputError
from klgrad.kernels import Head, check_head, fused_statistics

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
MPT = {"vocab_size": 61, "d_model": 32, "n_heads": 4, "n_layers": 2}
XLSTM = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "qk_dim_factor": 1.0}
MINICPM = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "LlamaForCausalLM": (SMALL, 1.0, None),
    "MptForCausalLM": (MPT | {"logit_scale": 0.3}, 1.0, None),  # its forward does not use it
    "CohereForCausalLM": (SMALL | {"logit_scale": 0.25}, 0.25, None),
    "Cohere2ForCausalLM": (SMALL | {"logit_scale": 0.25}, 0.25, None),
    "GraniteForCausalLM": (SMALL | {"logits_scaling": 4.0}, 0.25, None),
    "GraniteMoeForCausalLM": (SMALL | MOE | {"logits_scaling": 4.0}, 0.25, None),
    "GraniteMoeSharedForCausalLM": (SMALL | MOE | {"logits_scaling": 4.0}, 0.25, None),
    "HyperCLOVAXForCausalLM": (SMALL | {"logits_scaling": 0.5}, 0.5, None),
    "FalconH1ForCausalLM": (
        SMALL | {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, 0.5, None),
    "MiniCPM3ForCausalLM": (SMALL | MINICPM | {"dim_model_base": 16}, 0.5, None),
    "InklingForCausalLM": (SMALL | {"logits_mup_width_multiplier": 2.0, "unpadded_vocab_size": 50}, 0.5, None),
    "Gemma2ForCausalLM": (SMALL | {"final_logit_softcapping": 3.0}, 1.0, 3.0),
    "Gemma3ForCausalLM": (SMALL | {"final_logit_softcapping": 3.0}, 1.0, 3.0),
    "VaultGemmaForCausalLM": (SMALL | {"final_logit_softcapping": 3.0}, 1.0, 3.0),
    "NanoChatForCausalLM": (SMALL | {"final_logit_softcapping": 3.0}, 1.0, 3.0),
    "RecurrentGemmaForCausalLM": (
        SMALL | {"lru_width": 32, "logits_soft_cap": 3.0, "num_hidden_layers": 3}, 1.0, 3.0),
    "xLSTMForCausalLM": (XLSTM | {"output_logit_soft_cap": 3.0}, 1.0, 3.0),
}  # fmt: skip
"""Class, config, and the factor and the cap of the logits."""


def tiny(name, settings):
    """The model with random weights, hidden states of a small batch, and its own logits of them."""
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.6)
        ids = torch.arange(3, 23).reshape(2, 10)
        inputs = {"input_ids": ids, "use_cache": False}
        return model, model.base_model(**inputs).last_hidden_state, model(**inputs).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_gives_the_logits_of_the_model(name):
    settings, scale, softcap = FAMILIES[name]
    model, hidden, logits = tiny(name, settings)
    head = Head.of(model, temperature=0.7)
    assert (head.scale, head.softcap, head.temperature) == (scale, softcap, 0.7)
    assert logits.std() > 0.3, "logits so small that a wrong cap would not show"
    found = fused_statistics.logits(hidden, replace(head, temperature=1.0)).log_softmax(-1)
    SINGLE.check(found.detach(), logits.log_softmax(-1))
    check_head(head, hidden, logits)
    wrong = {"a factor": replace(head, scale=1.1 * head.scale), "a cap": replace(head, softcap=2.0)}
    wrong |= {"no cap": replace(head, softcap=None)} if softcap else {}
    for other in wrong.values():
        with pytest.raises(KernelInputError, match="root mean square difference"):
            check_head(other, hidden, logits)


BERT = SMALL | {"is_decoder": True}
REFUSED = {
    "BertLMHeadModel": (BERT, "inside another module"),
    "ElectraForCausalLM": (BERT | {"embedding_size": 16}, "electra.*transforms the hidden states"),
    "ModernBertDecoderForCausalLM": (SMALL, "modernbert-decoder.*transforms the hidden states"),
    "T5ForConditionalGeneration": (
        {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "encoder-decoder"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_something_else_with_its_logits_is_refused(name):
    settings, message = REFUSED[name]
    kind = getattr(transformers, name)
    with pytest.raises(KernelInputError, match=rf"{name}.*received.*{message}.*remedy"):
        Head.of(kind(kind.config_class(**settings)))


def stand_in(layer, **config):
    config = SimpleNamespace(**{"model_type": "some", **config})
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config, get_output_embeddings=lambda: layer)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (stand_in(None), "NoneType without one floating-point weight"),
        (stand_in(torch.nn.ModuleList([torch.nn.Linear(4, 9)])), "ModuleList without one floating-point weight"),
        (stand_in(SimpleNamespace(weight=torch.zeros(9, 4, dtype=torch.uint8))), "without one floating-point"),
        (stand_in(torch.nn.Linear(4, 9), model_type="chameleon"), "image tokens"),
    ],
)
def test_a_layer_that_is_no_single_matrix_is_refused(model, message):
    with pytest.raises(KernelInputError, match=message):
        Head.of(model)


@pytest.mark.slow
def test_an_adapter_on_the_output_layer_is_refused_while_it_is_active():
    """The weight does not include the adapter."""
    peft = pytest.importorskip("peft")
    model, hidden, logits = tiny("LlamaForCausalLM", SMALL | {"tie_word_embeddings": False})
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    with pytest.raises(KernelInputError, match="adapter on the output layer"):
        Head.of(adapted)
    with adapted.disable_adapter():
        check_head(Head.of(adapted), hidden, logits)


ADAPTERS = {
    "LoraConfig": {"init_lora_weights": False},
    "LoHaConfig": {"init_weights": False},
    "LoKrConfig": {"init_weights": False},
    "OFTConfig": {"r": 0, "oft_block_size": 4, "init_weights": False},
    "IA3Config": {"feedforward_modules": [], "init_ia3_weights": False},
    "VeraConfig": {"r": 2, "init_weights": False},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_any_kind_is_refused_while_it_is_active(name):
    """Disabled or merged it is accepted, and the weight has the logits of the layer."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(8, 12)})
    config = getattr(peft, name)(target_modules=["lm_head"], **ADAPTERS[name])
    layer, hidden = peft.get_peft_model(model, config).base_model.model["lm_head"], torch.randn(5, 8)

    def logits_agree():
        found = fused_statistics.logits(hidden, Head.of(stand_in(layer)))
        return torch.allclose(found, layer(hidden), atol=1e-5)

    with pytest.raises(KernelInputError, match="adapter on the output layer"):
        Head.of(stand_in(layer))
    layer.enable_adapters(False)
    assert logits_agree()
    base = layer(hidden)
    layer.enable_adapters(True)
    assert not torch.allclose(layer(hidden), base, atol=1e-3), "an adapter that changes nothing"
    layer.merge()
    assert logits_agree()


def test_an_adapter_that_the_output_layer_does_not_have_is_no_reason_to_refuse_it():
    peft = pytest.importorskip("peft")
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(8, 8), "lm_head": torch.nn.Linear(8, 12)})
    adapted = peft.get_peft_model(model, peft.LoHaConfig(target_modules=["lm_head"]))
    adapted.add_adapter("other", peft.LoHaConfig(target_modules=["body"]))
    adapted.set_adapter("other")
    layer = adapted.base_model.model["lm_head"]
    assert layer.active_adapters == ["other"]
    assert Head.of(stand_in(layer)).weight is layer.weight


def test_the_check_requires_logits_of_the_same_positions():
    hidden, head = torch.randn(2, 3, 4), Head(torch.randn(9, 4))
    with pytest.raises(KernelInputError, match=r"logits of shape \(2, 3, 9\)"):
        check_head(head, hidden, torch.randn(2, 4, 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_check_allows_for_rounding(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(20, 64, generator=generator), torch.randn(300, 64, generator=generator)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logits = 30 * torch.tanh(hidden.float() @ weight.float().T / 30)
    check_head(Head(weight, softcap=30.0), hidden, logits.to(dtype))
    with pytest.raises(KernelInputError, match="root mean square difference"):
        check_head(Head(weight), hidden, logits.to(dtype))

"""The heads of models of transformers have the log-probs of the models' own logits, or are refused."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tolerances import SINGLE

from klgrad.errors import KernelInputError
from klgrad.kernels import Head, check_head, fused_statistics

pytest.importorskip("transformers")
import transformers
from kernels import tiny_families
from kernels.tiny_families import NotBuiltError

FAMILIES = {
    "LlamaForCausalLM": (1.0, None), "MptForCausalLM": (1.0, None),  # whose forward does not use its number
    "CohereForCausalLM": (1.5, None), "Cohere2ForCausalLM": (1.5, None), "Cohere2MoeForCausalLM": (1.5, None),
    "CohereCompassForCausalLM": (1.5, None), "CohereCompassForConditionalGeneration": (1.5, None),
    "HyperCLOVAXForCausalLM": (1.5, None), "HyperCLOVAXVisionV2ForConditionalGeneration": (1.5, None),
    "FalconH1ForCausalLM": (1.5, None), "MiniCPM3ForCausalLM": (8.0, None), "InklingForCausalLM": (1 / 1.5, None),
    "GraniteForCausalLM": (1 / 1.5, None), "GraniteMoeForCausalLM": (1 / 1.5, None),
    "GraniteMoeSharedForCausalLM": (1 / 1.5, None), "GraniteMoeHybridForCausalLM": (1 / 1.5, None),
    "GraniteMoeSWAForCausalLM": (1 / 1.5, None), "GraniteSWAForCausalLM": (1 / 1.5, None),
    "Granite4VisionForConditionalGeneration": (1 / 1.5, None),
    "Gemma2ForCausalLM": (1.0, 1.5), "Gemma3ForCausalLM": (1.0, 1.5), "Gemma3nForCausalLM": (1.0, 1.5),
    "Gemma4ForCausalLM": (1.0, 1.5), "Gemma4ForConditionalGeneration": (1.0, 1.5),
    "Gemma4UnifiedForCausalLM": (1.0, 1.5), "Gemma4UnifiedForConditionalGeneration": (1.0, 1.5),
    "VaultGemmaForCausalLM": (1.0, 1.5), "RecurrentGemmaForCausalLM": (1.0, 1.5), "BeamForCausalLM": (1.0, 1.5),
    "NanoChatForCausalLM": (1.0, 1.5), "xLSTMForCausalLM": (1.0, 1.5),
    "MistralLarge4ForConditionalGeneration": (1.0, 1.5), "MuseGlimmerForConditionalGeneration": (1.5, 1.5),
    "MuseSparkForConditionalGeneration": (1.5, 1.5),
}  # fmt: skip
"""The factor and the cap of the logits of the tiny models, in which each such number is 1.5."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_gives_the_logits_of_the_model(name):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    scale, softcap = FAMILIES[name]
    model = tiny_families.build(name)
    head, (hidden, logits) = Head.of(model, temperature=0.7), tiny_families.outputs(model)
    assert (head.scale, head.softcap, head.temperature) == (pytest.approx(scale), softcap, 0.7)
    assert logits.std() > 0.3, "logits so small that a wrong cap would not show"
    found = fused_statistics.logits(hidden, replace(head, temperature=1.0)).log_softmax(-1)
    SINGLE.check(found.detach(), logits.log_softmax(-1))
    check_head(head, hidden, logits)
    wrong = {"a factor": replace(head, scale=1.1 * head.scale), "a cap": replace(head, softcap=2.0)}
    wrong |= {"no cap": replace(head, softcap=None)} if softcap else {}
    for other in wrong.values():
        with pytest.raises(KernelInputError, match="root mean square difference"):
            check_head(other, hidden, logits)


def test_entries_that_pad_the_vocabulary_are_left_out():
    head = Head.of(stand_in(torch.nn.Linear(4, 9), unpadded_vocab_size=7))
    assert (head.vocabulary, len(head.bias)) == (7, 7)


REFUSED = {
    "BertLMHeadModel": "inside another module",
    "ElectraForCausalLM": "electra.*transforms the hidden states",
    "ModernBertDecoderForCausalLM": "modernbert-decoder.*transforms the hidden states",
    "T5ForConditionalGeneration": "encoder-decoder",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_something_else_with_its_logits_is_refused(name):
    with pytest.raises(KernelInputError, match=rf"{name}.*received.*{REFUSED[name]}.*remedy"):
        Head.of(tiny_families.build(name))


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


# No family of the installed transformers gets a head with other logits than its own: each is right, or refused.


TEXT = re.compile(r"(ForCausalLM|LMHeadModel|WithLMHead|GenerationDecoder)$")
FURTHER = re.compile(r"ForConditionalGeneration$")


@pytest.fixture(autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def outcome(name):
    """Whether a tiny model of the family has the logits of its head, is refused, cannot be built, or is wrong."""
    try:
        model = tiny_families.build(name)
        head = Head.of(model)
        check_head(head, *tiny_families.outputs(model))
    except NotBuiltError:
        return "not built"
    except KernelInputError as error:
        return f"{name}: {error}" if "root mean square" in str(error) else "refused"
    return "right"


@pytest.mark.many
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("pattern", "least"), [(TEXT, 120), (FURTHER, 40)], ids=["text", "images and sound"])
def test_every_family(pattern, least):
    names = [name for name in dir(transformers) if pattern.search(name) and not name.startswith("AutoModel")]
    found = [outcome(name) for name in names]
    wrong = [each for each in found if each not in ("right", "refused", "not built")]
    assert not wrong, "\n".join(wrong)
    assert found.count("right") >= least, "so few models were built that this shows little"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GraniteSpeechForConditionalGeneration", "LlavaNextForConditionalGeneration"])
def test_a_model_around_a_text_model_that_it_does_not_scale_as_is_refused(name):
    """Granite Vision is LLaVA-NeXT around Granite, and does not divide its logits as Granite does."""
    kind = getattr(transformers, name)
    text = {"model_type": "granite", **tiny_families.settings(transformers.GraniteConfig)}
    config = {**tiny_families.settings(kind.config_class), "text_config": text}
    with pytest.raises(KernelInputError, match="around `granite`, whose scale or cap of the logits it may not apply"):
        Head.of(kind(kind.config_class(**config)))

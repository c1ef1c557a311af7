"""No family of the installed transformers gets a head with other logits than its own: each is right, or refused."""

import re
from importlib.util import find_spec

import pytest

pytest.importorskip("transformers")
import transformers
from kernels import tiny_families
from kernels.tiny_families import NotBuiltError, changes_in, changes_of_logits

from klgrad.errors import KernelInputError
from klgrad.kernels import Head, check_head, head as families

TEXT = re.compile(r"(ForCausalLM|LMHeadModel|WithLMHead|GenerationDecoder)$")
FURTHER = re.compile(r"ForConditionalGeneration$")
NEEDS = {"Gemma3nForConditionalGeneration": "timm", "InklingForConditionalGeneration": "scipy"}
"""Models that change their logits and cannot be built without a package."""


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
    except NotBuiltError as error:
        if getattr(transformers, name).config_class.model_type in families.REFUSED:
            return "refused"
        excused = not changes_of_logits(name) or (name in NEEDS and find_spec(NEEDS[name]) is None)
        return "not built" if excused else f"{name} changes its logits, and no tiny model of it was built: {error}"
    except KernelInputError as error:
        return f"{name}: {error}" if "root mean square" in str(error) else "refused"
    return "right"


def outcomes(pattern):
    names = [name for name in dir(transformers) if pattern.search(name) and not name.startswith("AutoModel")]
    return [outcome(name) for name in names]


def judge(found, least):
    wrong = [each for each in found if each not in ("right", "refused", "not built")]
    assert not wrong, "\n".join(wrong)
    assert found.count("right") >= least, "so few models were built that this shows little"


@pytest.mark.many
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_text_models():
    judge(outcomes(TEXT), 120)


@pytest.mark.many
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_with_images_and_sound():
    judge(outcomes(FURTHER), 40)


CHANGED = [
    "BeamForCausalLM", "Cohere2MoeForCausalLM", "CohereCompassForCausalLM", "CohereCompassForConditionalGeneration",
    "Gemma3nForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration", "Granite4VisionForConditionalGeneration", "GraniteMoeHybridForCausalLM",
    "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM", "HyperCLOVAXVisionV2ForConditionalGeneration",
    "MistralLarge4ForConditionalGeneration", "MuseGlimmerForConditionalGeneration",
    "MuseSparkForConditionalGeneration", "RecurrentGemmaForCausalLM", "xLSTMForCausalLM",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGED)
def test_a_family_that_changes_its_logits(name):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    assert changes_of_logits(name), "the search no longer finds what it should"
    head = Head.of(tiny_families.build(name))
    assert head.scale != 1 or head.softcap is not None
    assert outcome(name) == "right"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", ["logits_soft_cap", "logits_scaling"])
def test_a_family_whose_number_is_not_known_is_found(number, monkeypatch):
    name = {"logits_soft_cap": "RecurrentGemmaForCausalLM", "logits_scaling": "GraniteForCausalLM"}[number]
    monkeypatch.setattr(families, "SOFT_CAPS", ("final_logit_softcapping",))
    monkeypatch.setattr(families, "DIVIDED_BY", ())
    with pytest.raises(AssertionError, match=f"{name}: .*root mean square difference"):
        judge([outcome(name)], 0)


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


@pytest.mark.parametrize(
    ("line", "is_change"),
    [
        ("logits = self.lm_head(hidden_states[:, slice_indices, :])", False),
        ("logits = self.lm_head(hidden_states[:, -(keep + 1):, :]).float()", False),
        ("hidden_states = outputs.last_hidden_state", False),
        ("logits = logits * self.gain", True),
        ("logits = self.lm_head(hidden_states) / self.config.another_number", True),
        ("hidden_states = outputs[0] / 3", True),
        ("logits *= 2", True),
        ("logits[:, :, banned] = low", True),
        ("logits = torch.tanh(logits)", True),
        ("logits = soft_cap(logits, self.cap)", True),
        ("lm_logits = lm_logits + self.final_logits_bias", True),
        ("logits = logits.clamp(-5, 5)", True),
    ],
)
def test_the_search_finds_changes_of_logits(line, is_change):
    assert changes_in(f"    def forward(self):\n        {line}\n") == ([line] if is_change else [])

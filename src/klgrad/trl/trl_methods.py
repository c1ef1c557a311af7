"""What `KLTrainer` stands on: a configuration of the right class, and methods that are TRL's own."""

from pathlib import Path
from typing import Any

import transformers
import trl

from ..errors import MeaningError
from .config import KLConfig
from .field_types import changed

METHODS = (
    "compute_loss",
    "_compute_loss",
    "training_step",
    "prediction_step",
    "_prepare_inputs",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
)
"""Where the KL is put into TRL's loss: replaced, they could leave it out, and nothing would tell."""
FOLDERS = tuple(Path(str(package.__file__)).resolve().parent for package in (trl, transformers))
DERIVED = (
    "steps_per_generation",
    "generation_batch_size",
    "eval_steps",
    "report_to",
    "accelerator_config",
    "debug",
    "pad_to_multiple_of",
    "dataloader_pin_memory",
)
"""Fields that TRL and transformers fill in themselves where nobody does."""


def check_class(args: Any) -> None:
    """A `KLConfig`; of another configuration of TRL's, say what to write instead."""
    if isinstance(args, KLConfig):
        return
    name, known = type(args).__name__, KLConfig.__dataclass_fields__
    given = changed(args) if hasattr(type(args), "__dataclass_fields__") else {}
    beta = given.pop("beta", None)
    kept = {k: v for k, v in given.items() if k in known and k not in DERIVED}
    written = [f"{k}={_written(v)}" for k, v in ({"kl_coef": beta} if beta else {}).items()]
    written += [f"{k}={_written(v)}" for k, v in kept.items()]
    remedy = f"write KLConfig({', '.join(written)}), from klgrad.trl: it declares which KL is meant"
    raise MeaningError("a KLConfig", f"a {name}", f"{remedy}; its `kl_coef` is TRL's `beta`" if beta else remedy)


def _written(value: Any) -> str:
    return repr(getattr(value, "value", value))


def check_methods(kind: type, ours: type) -> None:
    """That the methods which `ours` calls in its base classes are TRL's or transformers', as they were installed."""
    mro = kind.__mro__
    for base in mro[mro.index(ours) + 1 :]:
        for name in METHODS:
            found = base.__dict__.get(name)
            if found is not None and not _is_installed(found):
                raise MeaningError(
                    f"{base.__name__}.{name} of TRL or transformers themselves",
                    f"one of {_home(found)}",
                    "the KL is put into TRL's own loss, and another loss would leave it out without a word: use "
                    "KLTrainer without what replaces it (Unsloth does), or with its patches switched off",
                )


def _is_installed(method: Any) -> bool:
    """Whether its code, and that of what it wraps, lies in the packages' folders; names can be copied, code cannot."""
    while method is not None:
        code = getattr(method, "__code__", None)
        if code is None or not any(Path(code.co_filename).resolve().is_relative_to(folder) for folder in FOLDERS):
            return False
        method = getattr(method, "__wrapped__", None)
    return True


def _home(method: Any) -> str:
    code = getattr(method, "__code__", None)
    return f"{getattr(method, '__module__', 'unknown')} ({code.co_filename})" if code else repr(method)

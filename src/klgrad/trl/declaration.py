"""The arguments of a `KLTrainer` that declare its KL: a `KLConfig`, or a `KLConfig` and a `KLTerm`."""

from copy import copy
from typing import Any

from ..core.term import KLTerm
from ..errors import MeaningError
from ..trainer_parts.bound_text import bound_of
from .config import KLConfig
from .config_checks import TERM_FIELDS, changed_among
from .field_types import changed
from .objective import fields_of

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
"""Fields that TRL and transformers fill in themselves."""


def declared(args: Any, kl: KLTerm | None) -> KLConfig:
    """The configuration that a trainer is built with.

    Args:
        args: a `KLConfig`, or None for its defaults.
        kl: the KL term, or None if the fields of `args` declare it. Those fields are at their defaults beside a
            term, or agree with it. The term is written into a copy of `args`.

    Returns:
        A `KLConfig` whose objective is the declared one.
    """
    args = KLConfig("klgrad-run") if args is None else args
    _check_class(args)
    if kl is None:
        return args
    _check_term(kl, args)
    found = copy(args)
    for name, value in fields_of(kl).items():
        setattr(found, name, value)
    found.declare(stacklevel=4)
    return found


def _check_class(args: Any) -> None:
    """Refuse anything but a `KLConfig`; for another configuration of TRL's, show what to write instead."""
    if isinstance(args, KLConfig):
        return
    name, known = type(args).__name__, KLConfig.__dataclass_fields__
    given = changed(args) if hasattr(type(args), "__dataclass_fields__") else dict(args) if _is_dict(args) else {}
    beta = given.pop("beta", None)
    kept = {k: v for k, v in given.items() if k in known and k not in DERIVED}
    same = {"kl_coef": beta, "kl_level": "token"} if beta else {}
    written = [f"{k}={_written(v)}" for k, v in same.items()]
    written += [f"{k}={_written(v)}" for k, v in kept.items()]
    remedy = f"write KLConfig({', '.join(written)}), from klgrad.trl: it declares which KL is meant"
    if beta:
        remedy += (
            "; `kl_coef` is TRL's `beta`, whose KL is token by token; kl_level='sequence', the default, is the KL "
        )
        remedy += "between completions"
    raise MeaningError("a KLConfig", f"a {name}", remedy)


def _is_dict(args: Any) -> bool:
    return isinstance(args, dict) and all(isinstance(name, str) for name in args)


def _check_term(kl: Any, args: KLConfig) -> None:
    if not isinstance(kl, KLTerm):
        raise MeaningError("`kl` as a KLTerm", f"a {type(kl).__name__}", "write kl=KLTerm(...), from klgrad")
    if kl.reduction != "sequence":
        raise MeaningError(
            "`kl` with reduction='sequence'",
            f"reduction={kl.reduction!r}",
            "leave it out: `kl_reduction` of the KLConfig sets how the trainer reduces the term",
        )
    declared = fields_of(kl)
    changed_fields = changed_among(args, (*TERM_FIELDS, "kl_ratio_bound", "kl_cell"))
    other = {name: value for name, value in changed_fields.items() if not _agree(name, value, declared.get(name))}
    if other:
        fields = ", ".join(f"{name}={value!r}" for name, value in other.items())
        raise MeaningError(
            "one KL, declared by `kl` or by fields of the KLConfig; fields beside `kl` must agree with it",
            f"kl={kl.name} and {fields}",
            f"drop `kl`, or leave out {', '.join(f'`{name}`' for name in other)}",
        )


def _agree(name: str, value: Any, declared: Any) -> bool:
    if name == "kl_ratio_bound" and declared is not None:
        return bound_of(value) == bound_of(declared)  # `truncate:2` is `truncate:2.0`
    return bool(value == declared)


def _written(value: Any) -> str:
    return repr(getattr(value, "value", value))

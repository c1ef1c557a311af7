"""Nested data with tensors in it as JSON and a flat dictionary of tensors, so that no pickle is written or read."""

from typing import Any

from torch import Tensor

from .training_errors import RunError

Plain = Any


def packed(x: Any, name: str, tensors: dict[str, Tensor]) -> Plain:
    """Plain data, with each tensor put aside under its path."""
    if isinstance(x, Tensor):
        tensors[name] = x.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(x, dict):
        return {"dict": {key: packed(value, f"{name}.{key}", tensors) for key, value in x.items()}}
    if isinstance(x, list | tuple):
        return {"list": [packed(value, f"{name}.{i}", tensors) for i, value in enumerate(x)]}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise RunError(
        f"tensors and plain data in {name}", type(x).__name__, "save_strategy='no' trains without checkpoints"
    )


def unpacked(x: Plain, tensors: dict[str, Tensor]) -> Any:
    """What `packed` was given; a tuple comes back as a list."""
    if not isinstance(x, dict):
        return x
    if "tensor" in x:
        return tensors[x["tensor"]]
    if "dict" in x:
        return {key: unpacked(value, tensors) for key, value in x["dict"].items()}
    return [unpacked(value, tensors) for value in x["list"]]

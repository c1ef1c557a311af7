"""Losses of JAX and MLX arrays, called with tensors of PyTorch.

A loss belongs to the library that its code names. That library differentiates it: `jax.vjp`, compiled, or `mx.vjp`.
Neither is imported for a loss that does not use it.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
OfArrays = Callable[[dict[str, Any]], Any]
"""A loss of arrays by name."""

Derivatives = Callable[[Tensors, Tensors, Tensor | None], tuple[Tensor, Tensors]]
"""The value of a loss, and its derivatives by the first tensors: of its sum, or in the direction of a cotangent."""

# Which library a loss belongs to.

Library = Literal["torch", "jax", "mlx"]

PACKAGES: dict[str, Library] = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "mlx": "mlx"}
"""A loss that names PyTorch and another library converts its tensors itself: it is of PyTorch."""


def library_of(loss: object) -> Library:
    """The library that the code of a loss names; or that of the functions that it calls, or of its module.

    Example:
        >>> from klgrad.audit.backends import library_of
        >>> library_of(lambda logp, ref_logp: (logp - ref_logp).square())
        'torch'
    """
    level: list[object] = [loss]
    seen: set[int] = set()
    while level:
        values = [x for f in level if id(f) not in seen for x in _values_in(f)]
        seen |= {id(f) for f in level}
        library = _first_library((*level, *values))
        if library:
            return library
        level = values
    return _first_library(getattr(_function_behind(loss), "__globals__", {}).values()) or "torch"


def _first_library(values: Any) -> Library | None:
    """By the packages that modules, functions, classes and other values are from."""
    names = (x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", type(x).__module__) for x in values)
    packages = {str(name).partition(".")[0] for name in names}
    return next((library for package, library in PACKAGES.items() if package in packages), None)


def _function_behind(x: Any) -> object:
    """What a partial, a method, a decorated or compiled function, or a callable object runs."""
    x = inspect.unwrap(x.func if isinstance(x, functools.partial) else x)
    if callable(x) and not inspect.isroutine(x) and not inspect.isclass(x):
        x = type(x).__call__
    return inspect.unwrap(getattr(x, "__func__", x))


def _values_in(loss: object) -> Iterator[object]:
    """What the names in a function stand for, and the modules that it imports."""
    function = _function_behind(loss)
    if not isinstance(function, FunctionType):
        return
    with suppress(ValueError):  # a variable that has no value yet
        names = inspect.getclosurevars(function)
        values = [*names.nonlocals.values(), *names.globals.values()]
        yield from values
        yield from (getattr(x, n) for x in values if isinstance(x, ModuleType) for n in names.unbound if hasattr(x, n))
        yield from (ModuleType(n) for n in names.unbound if n.partition(".")[0] in PACKAGES)


# The value of a loss by another library, through which gradients flow.


def in_torch(loss: OfArrays, library: Literal["jax", "mlx"]) -> Callable[[Tensors], Tensor]:
    """A loss of arrays of a library as one of tensors.

    Args:
        loss: returns one array.
        library: that of the arrays.

    Returns:
        The function of tensors by name. It computes on the CPU, in the precision of the tensors.
    """
    derivatives = _by_jax(loss) if library == "jax" else _by_mlx(loss)

    def of_tensors(tensors: Tensors) -> Tensor:
        moving = {name: x for name, x in tensors.items() if x.requires_grad}
        fixed = {name: x for name, x in tensors.items() if not x.requires_grad}
        return _Bridge.apply(derivatives, fixed, tuple(moving), *moving.values())

    return of_tensors


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, derivatives: Derivatives, fixed: Tensors, names: tuple[str, ...], *moving: Tensor) -> Tensor:
        def along(cotangent: Tensor | None) -> tuple[Tensor, list[Tensor]]:
            out, slopes = derivatives(dict(zip(names, moving, strict=True)), fixed, cotangent)
            return out, [slopes[name] for name in names]

        ctx.along = along
        out, ctx.slopes = along(None)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> Any:
        if cotangent[0].dim() == 0:
            return None, None, None, *(cotangent[0] * slope for slope in ctx.slopes)
        return None, None, None, *ctx.along(cotangent[0])[1]


def _by_jax(loss: OfArrays) -> Derivatives:
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    # An audit calls the loss about a hundred times, with twenty shapes: most of its time is compilation.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
    def derivatives(moving: Any, fixed: Any, cotangent: Any) -> Any:
        out, pull_back = jax.vjp(lambda x: jnp.asarray(loss(fixed | x)), moving)
        return out, *pull_back(jnp.ones_like(out) if cotangent is None else cotangent.astype(out.dtype))

    def of_tensors(*tensors: Any) -> Any:
        leaves = jax.tree.leaves(tensors)
        wide = any(x.dtype == torch.float64 for x in leaves)
        with jax.enable_x64(wide), jax.default_device(jax.devices("cpu")[0]):
            found = derivatives(*jax.tree.map(lambda x: x.detach().numpy(), tensors))
        return jax.tree.map(torch.from_dlpack, found)

    return of_tensors


def _by_mlx(loss: OfArrays) -> Derivatives:
    import mlx.core as mx  # pyright: ignore[reportMissingImports]

    def array(x: Tensor) -> Any:
        name = str(x.dtype).removeprefix("torch.")
        return mx.array(x.detach(), dtype=getattr(mx, {"bool": "bool_"}.get(name, name)))

    def tensor(x: Any) -> Tensor:
        # MLX computes exponentials of float64 in float32: the audit has tolerances for numbers that are rounded so.
        return torch.from_dlpack(x).float().to(torch.float64 if x.dtype == mx.float64 else torch.float32)

    def derivatives(moving: Tensors, fixed: Tensors, cotangent: Tensor | None) -> tuple[Tensor, Tensors]:
        mx.disable_compile()  # a compiled function would wait for a C++ compiler, for each shape
        with mx.stream(mx.cpu):  # a GPU of Apple has no float64
            known = {name: array(x) for name, x in fixed.items()}
            at = [array(x) for x in moving.values()]
            of_moving = lambda *some: loss(known | dict(zip(moving, some, strict=True)))
            out = of_moving(*at)
            along = mx.ones_like(out) if cotangent is None else array(cotangent).astype(out.dtype)
            _, slopes = mx.vjp(of_moving, at, [along])
        mx.enable_compile()
        return tensor(out), {name: tensor(x) for name, x in zip(moving, slopes, strict=True)}

    return derivatives

"""Call a loss that a user wrote: find its arguments by their names, and the loss in what it returns."""

import ast
import difflib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.rollout import Rollout
from ..enumeration import autoregressive
from ..errors import LossCallError, LossOutputError, UnknownNameError
from ..support import owner, plain, role_of
from .batch import Batch, from_problem

# The tensor of a batch that an argument's name stands for.

NAMES: dict[str, tuple[str, ...]] = {
    "advantages": ("advantages", "advantage", "adv", "advs"),
    "rewards": ("rewards", "reward"),
    "mask": ("attention_mask", "masks", "eos_mask", "valid_mask", "seq_mask", "sequence_mask"),
    "tokens": (
        *("tokens", "token_ids", "input_ids", "completion_ids", "response_ids", "responses", "output_ids", "ids"),
        *("action_ids", "actions", "sequences", "generated_ids", "sampled_ids", "sampled_tokens"),
    ),
    "labels": ("labels", "label", "shift_labels", "targets", "target", "target_ids"),
    "lengths": ("lengths", "completion_lengths", "response_lengths", "response_length", "seq_lens", "seq_lengths"),
    "token_reverse_kl": ("token_reverse_kl",),
    "token_forward_kl": ("token_forward_kl",),
}
"""Names of arguments that are not columns of a log, by role. There is no prompt, so `attention_mask` is the mask."""

LOGITS = {"logp": "logits", "ref_logp": "ref_logits", "behavior_logp": "behavior_logits"}
"""By the role of a policy's log-probs, that of its logits: `teacher_logits` are of the policy of `teacher_logp`."""

DESCRIBED = "logp, ref_logp, old_logp, behavior_logp, mask, advantages, rewards, group, tokens, logits, ref_logits"
"""The arguments of a loss by role, for messages."""

IGNORED = -100
"""The label of a masked token, as in `torch.nn.functional.cross_entropy`."""

PROMPT = 0
"""The token before the completion where a loss shifts its arguments itself."""


@dataclass(frozen=True)
class Form:
    """How a loss wants some of its tensors, which their names do not tell.

    Attributes:
        advantages: one per completion, (B,), or one per token, (B, T).
        mask: whether it is bool, of integers, or of the type of the log-probs.
        labels: the label of a masked token.
        layout: `aligned` where the logits at a position are those of the token there. `shifted` where they are those
            of the next token, with one prompt token in front: `logits[:, :-1]` belongs to `labels[:, 1:]`. `longer`
            where only the logits have a further position, after the last token.
    """

    advantages: Literal["completion", "token"] = "token"
    mask: Literal["bool", "int", "float"] = "bool"
    labels: int = IGNORED
    layout: Literal["aligned", "shifted", "longer"] = "aligned"


def argument_role(name: str) -> str | None:
    """The role of an argument by its name, or None."""
    if (found := role_of(name)) is not None:
        return found[0]
    name = plain(name)
    if name.endswith("logits"):
        policy = owner(name.removesuffix("logits").removeprefix("shift_"))
        return LOGITS.get(policy[0]) if policy else None
    return next((role for role, names in NAMES.items() if name in names), None)


def tensor(batch: Batch, role: str, form: Form) -> Tensor:
    """The tensor of a role, in the form that the loss wants."""
    shifted = form.layout == "shifted"
    if role == "advantages":
        return batch.advantages[:, 0] if form.advantages == "completion" else batch.advantages
    if role == "mask":
        types = {"bool": torch.bool, "int": torch.long, "float": batch.logp.dtype}
        return _after_prompt(batch.mask, False, shifted).to(types[form.mask])
    if role == "lengths":
        return batch.mask.sum(-1)
    if role == "tokens":
        return _after_prompt(batch.tokens, PROMPT, shifted)
    if role == "labels":
        return _after_prompt(torch.where(batch.mask, batch.tokens, form.labels), IGNORED, shifted)
    found: Tensor = getattr(batch, role)
    if role in LOGITS.values() and form.layout != "aligned":
        return torch.cat([found, found[:, -1:].detach().flip(-1)], 1)  # after the last token: any logits
    return found


def _after_prompt(x: Tensor, first: int | bool, shifted: bool) -> Tensor:
    return torch.cat([x.new_full((len(x), 1), first), x], 1) if shifted else x


# A loss's own arguments, such as its coefficient, as given by `--set NAME=VALUE`.

TENSORS = ("logp", "ref_logp", "old_logp", "behavior_logp", "logits", "ref_logits", "mask", "advantages")
"""Roles whose names are no values of a setting; `group` or `tokens` may be one."""

Settings = Mapping[str, Any]
"""Arguments of a loss by name."""


def parse_settings(choices: Iterable[str]) -> dict[str, Any]:
    """Read settings from text.

    Args:
        choices: `NAME=VALUE`, with a Python literal as the value. Any other text is a string; `true`, `false` and
            `none` may be written small.

    Returns:
        The values by name.

    Raises:
        LossCallError: a choice has no name or no `=`, or its value is the name of a tensor, which would be text.

    Example:
        >>> from klgrad.audit.call import parse_settings
        >>> parse_settings(["beta=0.04", "estimator=k3", "clip=none"])
        {'beta': 0.04, 'estimator': 'k3', 'clip': None}
    """
    found = {}
    for choice in choices:
        name, equals, value = choice.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise LossCallError("NAME=VALUE", repr(choice), "write for example --set beta=0.04")
        found[name] = _value(value.strip())
        if found[name] == value.strip() and argument_role(value.strip()) in TENSORS:
            raise LossCallError(
                f"a value for {name}",
                f"{choice}, the name of a tensor, which the loss would get as text",
                f"name the parameter {value.strip()} in your code, or wrap the loss in a function that does",
            )
    return found


def _value(text: str) -> object:
    small = {"true": True, "false": False, "none": None}
    if text.lower() in small:
        return small[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# Find the loss in what a function returned.


def scalar(name: str, out: object, batch: Batch) -> Tensor:
    """The loss as a scalar.

    Args:
        name: of the loss, for messages.
        out: a tensor, a tuple or list that begins with one, a dictionary with the key `loss`, or an object with the
            attribute `loss`. The tensor is a scalar, (B,), (B, T), or (B, T, V).
        batch: what the loss was called with.

    Returns:
        The scalar: a mean over completions, and a sum over live tokens and over the vocabulary.
    """
    out = _loss_in(out)
    rows, columns = batch.logp.shape
    if not isinstance(out, Tensor):
        raise LossOutputError(
            f"{name} to return a scalar or a {(rows, columns)} tensor",
            _described(out),
            "return the loss as a tensor, or (loss, metrics), {'loss': loss} or an object with `.loss`",
        )
    if out.numel() == 1:
        return out.reshape(())
    if out.shape == batch.logits.shape:
        out = out.sum(-1)
    if out.shape == batch.logp.shape:
        return torch.where(batch.mask, out, 0).sum() / rows
    if out.shape in ((rows,), (rows, 1)):
        return out.sum() / rows
    raise LossOutputError(
        f"{name} to return a scalar, or a tensor of shape ({rows},) or {(rows, columns)}: (B,) or (B, T)",
        f"a tensor of shape {tuple(out.shape)}",
        "average the values with `.mean()`, or return one value per completion or per token",
    )


def _loss_in(out: object) -> object:
    if isinstance(out, Tensor):
        return out
    if isinstance(out, Mapping):
        return _loss_in(out["loss"]) if "loss" in out else out
    if isinstance(getattr(out, "loss", None), Tensor):
        return out.loss  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(out, (tuple, list)) and out:
        return _loss_in(out[0])
    return out


def _described(out: object) -> str:
    if isinstance(out, Mapping):
        return f"a dictionary with the keys {', '.join(map(str, out)) or '(none)'}"
    if isinstance(out, (int, float)):
        return f"the number {out}, which has no gradient (without `.item()` it is a tensor)"
    return type(out).__name__


# A batch as a dictionary with every name that a framework uses.

LISTED = (
    *("logp", "ref_logp", "old_logp", "behavior_logp", "mask", "advantages", "group", "tokens", "labels"),
    *("logits", "ref_logits", "token_reverse_kl", "token_forward_kl"),
    *("per_token_logps", "ref_per_token_logps", "old_per_token_logps", "completion_mask", "completion_ids"),
    *("log_prob", "ref_log_prob", "old_log_probs", "rollout_log_probs", "response_mask", "responses"),
    *("log_probs", "base_action_log_probs", "action_log_probs", "action_mask", "student_logits", "teacher_logits"),
)
"""The keys that a loop over the dictionary finds. Every other name with a role is found too, if it is asked for."""


class Record(dict[str, Any]):
    """What a loss of one argument receives: `batch["ref_log_prob"]`, `batch.ref_log_prob`, or any other known name."""

    def __init__(self, batch: Batch, form: Form) -> None:
        super().__init__({name: _named(batch, form, name) for name in LISTED})
        self._batch, self._form = batch, form

    def __missing__(self, name: str) -> Tensor:
        found = _named(self._batch, self._form, name)
        self[name] = found  # what a loss writes into a tensor must be there when it reads it again
        return found

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and argument_role(name) is not None)

    def __getattr__(self, name: str) -> Any:
        if name in ("batch", "tensors"):  # verl's DataProto keeps its tensors in `batch`
            return self
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tensor of a name, or the default if the name has no role."""
        return self[name] if name in self else default  # noqa: SIM401, it would call itself

    def pop(self, name: str, *default: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tensor of a name; it stays where it is found by its other names."""
        if name not in self and default:
            return default[0]
        found = self[name]
        del self[name]
        return found

    def to(self, *_: Any, **__: Any) -> "Record":
        """The same batch: it is where the loss runs."""
        return self


def _named(batch: Batch, form: Form, name: str) -> Tensor:
    role = argument_role(name)
    if role is None:
        raise UnknownNameError("name of a batch", name, LISTED)
    return tensor(batch, role, form)


# Decide, by the names of a loss's parameters, what each of them receives.

RECORD = {
    *("batch", "inputs", "data", "model_inputs", "micro_batch", "minibatch", "mini_batch", "mb", "sample", "samples"),
    *("experience", "experiences", "rollouts", "example", "examples", "input_data", "tensors", "trajectory"),
}
"""Names of a parameter that receives the whole batch, as a dictionary."""

CANONICAL = (*DESCRIBED.split(", "), "labels", "token_reverse_kl", "token_forward_kl")
"""What `**kwargs` receives."""

Whole = Literal["record", "rollout"]


@dataclass(frozen=True)
class Filled:
    """What the parameters of a loss receive.

    Attributes:
        roles: parameter to the role of its tensor.
        whole: parameter to the form in which it receives the whole batch.
        fixed: parameter to a setting, or to the default of a positional one.
        positional: the parameters that must be given by position, in order.
    """

    roles: dict[str, str] = field(default_factory=dict)
    whole: dict[str, Whole] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    positional: tuple[str, ...] = ()

    def call(self, function: Callable[..., object], batch: Batch, form: Form) -> object:
        """Call the loss."""
        given: dict[str, Any] = dict(self.fixed)
        given |= {name: tensor(batch, role, form) for name, role in self.roles.items()}
        for name, kind in self.whole.items():
            given[name] = Record(batch, form) if kind == "record" else batch.rollout()
        by_position = [given.pop(name) for name in self.positional]
        return function(*by_position, **given)

    def uses(self, role: str) -> bool:
        """Whether the loss may look at the tensor of a role."""
        return role in self.roles.values() or "record" in self.whole.values()


def signature_of(loss: Callable[..., object]) -> inspect.Signature:
    """The signature of a function, or of the `forward` of a module, whose `__call__` tells nothing."""
    return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)


def own_settings(loss: Any, settings: Settings) -> dict[str, Any]:
    """Those of the settings that are parameters of a loss, or of its class."""
    return {name: x for name, x in settings.items() if name in _own_names(loss)}


def _own_names(loss: Any) -> list[str]:
    called = [loss]
    if inspect.isclass(loss):
        called.append(loss.forward if issubclass(loss, nn.Module) else loss.__call__)
    found: dict[str, None] = {}
    for function in called:
        try:
            found |= dict.fromkeys(n for n, p in signature_of(function).parameters.items() if n != "self")
        except (ValueError, TypeError):  # without a signature it is no loss, and is refused for that
            continue
    return list(found)


def check_settings(loss: Any, name: str, settings: Settings) -> None:
    """Raise an error for settings that a loss does not have."""
    known = _own_names(loss)
    stray = [n for n in settings if n not in known]
    if stray and not takes_any(loss):
        near = [m for n in stray for m in difflib.get_close_matches(n, known, n=1, cutoff=0.5)]
        raise LossCallError(
            f"settings that are parameters of {name}: {', '.join(known)}",
            ", ".join(stray),
            f"did you mean {' or '.join(map(repr, near))}?" if near else "leave them out",
        )


def takes_any(loss: Any) -> bool:
    """Whether a loss takes arguments of any name."""
    try:
        return any(p.kind is p.VAR_KEYWORD for p in signature_of(loss).parameters.values())
    except (ValueError, TypeError):
        return False


def fill(loss: Callable[..., object], name: str, settings: Settings) -> Filled:
    """Find what to give to a loss.

    Args:
        loss: a function, a module, or another callable.
        name: for messages.
        settings: values of the loss's own parameters, instead of tensors.

    Returns:
        What each parameter receives. Parameters with a default and without a role are left out.

    Raises:
        LossCallError: a required parameter has no known name, or there are no tensors.
    """
    try:
        parameters = signature_of(loss).parameters
    except (ValueError, TypeError) as error:
        methods = [] if callable(loss) else loss_methods(type(loss))
        near = f"name a method, {' or '.join(f'{name}.{method}' for method in methods)}" if methods else None
        raise LossCallError(
            f"{name} to have a signature",
            "an object that cannot be called" if near else str(error),
            near or "wrap it in a Python function that names its tensors",
        ) from error
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    filled = Filled(fixed=dict(settings), positional=tuple(n for n, p in named.items() if p.kind is p.POSITIONAL_ONLY))
    bound = loss.keywords if isinstance(loss, functools.partial) else {}
    unknown = [p for n, p in named.items() if n not in settings and n not in bound and not _placed(p, filled)]
    if takes_any(loss):
        taken = {*filled.roles.values(), *named, *settings}
        filled.roles.update((role, role) for role in CANONICAL if role not in taken)
    if unknown or not (filled.roles or filled.whole):
        raise _refused(name, list(named.values()), unknown)
    return filled


def loss_methods(cls: type) -> list[str]:
    """The public methods that take tensors of an audit, of a class and of its bases in the same file."""
    own = [base for base in cls.__mro__ if base.__module__ == cls.__module__]
    names = {n: None for base in own for n, x in vars(base).items() if inspect.isroutine(x) and not n.startswith("_")}
    return [name for name in names if _is_loss(getattr(cls, name))]


def _is_loss(method: Callable[..., object]) -> bool:
    try:
        fill(method, "", {"self": None})
    except LossCallError:
        return False
    return True


def _placed(p: inspect.Parameter, filled: Filled) -> bool:
    """Find what one parameter receives; False if it is required and has no known name."""
    required = p.default is p.empty
    role = argument_role(p.name)
    if role is not None and (required or _means_tensor(p.default, role)):
        filled.roles[p.name] = role
    elif required and _means_rollout(p):
        filled.whole[p.name] = "rollout"
    elif required and (p.name in RECORD or p.annotation in (dict, "dict") or _is_mapping(p.annotation)):
        filled.whole[p.name] = "record"
    elif p.kind is p.POSITIONAL_ONLY and not required:
        filled.fixed[p.name] = p.default
    else:
        return not required
    return True


def _means_tensor(default: object, role: str) -> bool:
    """Whether a parameter with this default may be a tensor: `tokens=128` is none, and `mask=1.0` is."""
    return default is None or isinstance(default, Tensor) or (role == "mask" and isinstance(default, (int, float)))


def _means_rollout(p: inspect.Parameter) -> bool:
    return p.annotation is Rollout or p.annotation == "Rollout" or (p.name == "rollout" and p.annotation is p.empty)


def _is_mapping(annotation: object) -> bool:
    """Whether an annotation is that of a dictionary: `dict[str, Tensor]`, `Mapping[...]` or a string of it."""
    shown = annotation if isinstance(annotation, str) else str(annotation)
    return shown.split("[")[0].rsplit(".", 1)[-1] in ("dict", "Dict", "Mapping", "MutableMapping")


def _refused(name: str, parameters: list[inspect.Parameter], unknown: list[inspect.Parameter]) -> LossCallError:
    given = ", ".join(p.name for p in parameters) or "(none)"
    if not unknown:
        remedy = "wrap it in a function that takes these names"
    else:
        first = unknown[0].name
        remedy = f"if {first} is a setting, give it by --set {first}=VALUE; if it is a tensor, use a name of these"
    return LossCallError(
        f"{name} to take some of: {DESCRIBED}, or their names in TRL, verl or OpenRLHF",
        f"parameters {given}" + (f", of which {', '.join(_names(unknown))} is not known" if unknown else ""),
        remedy,
    )


def _names(parameters: list[inspect.Parameter]) -> Iterator[str]:
    return (p.name for p in parameters)


# Make an instance of a class that is a loss.


def constructed(cls: type, name: str, settings: Settings) -> tuple[Any, set[str]]:
    """Call a class with the settings that its constructor takes.

    Args:
        cls: its other parameters need defaults.
        name: for messages.
        settings: arguments of the constructor, and perhaps of the loss itself.

    Returns:
        The instance, and the names of the settings that it took.
    """
    try:
        parameters = inspect.signature(cls).parameters
    except (ValueError, TypeError) as error:
        raise LossCallError(f"{name} to have a constructor", str(error), "pass an instance") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = {n: x for n, x in settings.items() if n in known or (takes_any and not hasattr(cls, "forward"))}
    lacking = [
        n
        for n, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and n not in given
    ]
    if lacking:
        raise LossCallError(
            f"a class {name} that can be made without arguments",
            f"a constructor that needs {', '.join(lacking)}",
            f"give them by --set {lacking[0]}=VALUE, or make an instance in the file and audit that",
        )
    try:
        return cls(**given), set(given)
    except Exception as error:
        raise LossCallError(
            f"{name}({', '.join(f'{n}={x!r}' for n, x in given.items())}) to make a loss",
            f"{type(error).__name__}: {error}",
            "make an instance in the file and audit that",
        ) from error


# Find, by trial, the form in which a loss wants its tensors.


@cache
def _trial_batch() -> Batch:
    """Four completions of up to three tokens over a vocabulary of two: no size can be taken for another one."""
    problem = autoregressive(2, 3, ends=True, seed=0, away_from_ref=0.5)
    return from_problem(problem, torch.tensor([[3, 0, 1, 2]]), torch.tensor([0.7, -1.1, 0.4, 0.3], dtype=torch.float64))


def chosen_form(function: Callable[..., object], filled: Filled, name: str) -> Form:
    """The first form that the loss accepts; the usual one if it accepts none, so that its error is about that one.

    An advantage per completion is tried before one per token: where a loss expects (B, T), it fails with (B,), since
    no size equals another; where it expects (B,), `advantages[:, None]` would silently accept (B, T) too.
    """
    for form in _forms(filled):
        used = _used_positions(function, filled, form, name)
        if used is None:
            continue
        if form.layout == "aligned" and used[:-1].any() and not used[-1]:  # it leaves the last logits out: it shifts
            moved = replace(form, layout="shifted")
            used = _used_positions(function, filled, moved, name)
            return moved if used is not None and bool(used.all()) else form
        return form
    return Form()


def _forms(filled: Filled) -> Iterator[Form]:
    advantages = ("completion", "token") if filled.uses("advantages") else ("token",)
    masks = ("bool", "int", "float") if filled.uses("mask") else ("bool",)
    labels = (IGNORED, PROMPT) if filled.uses("labels") else (IGNORED,)
    layouts = ("aligned", "shifted", "longer") if filled.uses("logits") else ("aligned",)
    for layout, label, mask, advantage in product(layouts, labels, masks, advantages):
        yield Form(advantage, mask, label, layout)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep back what the loss prints: the audit calls it again."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def _used_positions(function: Callable[..., object], filled: Filled, form: Form, name: str) -> torch.Tensor | None:
    """(T,) whether logits of a whole completion have a gradient at each position; None if the loss fails."""
    batch = _trial_batch().fresh()
    try:
        with _silence(), torch.enable_grad():
            loss = scalar(name, filled.call(function, batch.copy(), form), batch)
            if not loss.requires_grad:
                return torch.zeros(batch.logp.shape[1], dtype=torch.bool)
            (found,) = torch.autograd.grad(loss, [batch.logits], allow_unused=True)
    except Exception:  # whatever it raises: the audit calls it again, and reports the error
        return None
    if found is None:
        return torch.zeros(batch.logp.shape[1], dtype=torch.bool)
    return (found[0] != 0).any(-1)


# A user's loss, ready to be called on the audit's batches.


@dataclass(frozen=True, eq=False)
class OwnLoss:
    """A loss, what its parameters receive, the form of its tensors, and the names of its settings."""

    function: Callable[..., object]
    filled: Filled
    form: Form
    settings: frozenset[str]

    def __call__(self, batch: Batch) -> object:
        """What the loss returns on a batch."""
        return self.filled.call(self.function, batch, self.form)

    @property
    def numbers(self) -> dict[str, int]:
        """The loss's own parameters that are integers: settings, and defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        values = {p.name: p.default for p in parameters} | self.filled.fixed
        return {name: x for name, x in values.items() if type(x) is int}

    @property
    def place(self) -> str:
        """The file and line where the loss is defined, or an empty text."""
        return place_of(self.function)


def own_loss(loss: Any, name: str, settings: Settings) -> OwnLoss:
    """Prepare a function, a module, another callable, or a class of these that needs no arguments.

    Args:
        loss: what the user wrote.
        name: for messages.
        settings: values of its own parameters, or of those of its constructor.

    Returns:
        The loss, to be called with a `Batch`.
    """
    check_settings(loss, name, settings)
    function, taken = constructed(loss, name, settings) if inspect.isclass(loss) else (loss, set())
    rest = {n: x for n, x in settings.items() if n not in taken}
    filled = fill(function, name, rest)
    return OwnLoss(function, filled, chosen_form(function, filled, name), frozenset(settings))


def name_of(loss: Any) -> str:
    """The name of a loss in reports, if none was given."""
    if isinstance(loss, functools.partial):
        return name_of(loss.func)
    return getattr(loss, "__name__", None) or type(loss).__name__


def summary_of(loss: Any) -> str:
    """The first line of the documentation that the user wrote, without that of a base class."""
    if isinstance(loss, functools.partial):
        return summary_of(loss.func)
    own = loss if inspect.isroutine(loss) or inspect.isclass(loss) else type(loss)
    return (inspect.cleandoc(own.__doc__) if own.__doc__ else "").split("\n")[0]


def place_of(loss: Any) -> str:
    """The file and line where a loss is defined, or an empty text."""
    if isinstance(loss, functools.partial):
        return place_of(loss.func)
    if not inspect.isroutine(loss):
        loss = type(loss).forward if isinstance(loss, nn.Module) else type(loss).__call__
    code = getattr(inspect.unwrap(loss), "__code__", None)
    return "" if code is None else f"{code.co_filename}, line {code.co_firstlineno}"

"""A loss to audit: known by name, or loaded from a file or module."""

import functools
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..core.families import CHOICES
from ..core.importance import ImportanceWeighting, Truncate
from ..core.regularizers import squared_sequence
from ..core.result import KLResult
from ..core.rollout import Rollout
from ..core.term import KLTerm, Remedy
from ..enumeration import Problem, every_group
from ..errors import LossCallError, LossImportError, MeaningError, UnknownNameError
from ..zoo import CELLS, Cell
from .call import (
    Method,
    Settings,
    UserLoss,
    construct,
    loss_methods,
    makes_callables,
    name_of,
    place_of,
    prepare,
    reduction_of,
    roles_of,
    scalar,
    settings_for,
    summary_of,
)
from .probes import UNLIKELY, Batch, from_problem

# Losses of every kind behind one interface.

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
"""Frames of a traceback in these folders are not the user's code."""

VOCABULARY = 512
"""Tokens of a large vocabulary. A list of the most likely tokens, as in a top-k, has fewer."""

LOGITS_TOO = f"; logits of shape {{}}, and of {VOCABULARY} tokens, which a k cannot exceed"
"""What an error says of a loss of logits."""

ROLLOUT = (
    "Rollout(logp, ref_logp, behavior_logp, token_reverse_kl, token_forward_kl (B, T), mask (B, T) bool, group (B,))"
)
"""What a cell or a term receives."""

Kind = Literal["cell", "term", "function", "framework"]
"""`cell` of `klgrad.zoo`, `term` for a `KLTerm`, `function` of a user, or `framework` for a framework's own code."""


@dataclass(frozen=True)
class Subject:
    """A named loss over a `Batch`.

    Attributes:
        name: its name in reports.
        kind: `cell`, `term`, `function` or `framework`.
        loss: returns a scalar; (B,), which is then averaged; or (B, T), which is summed over live tokens and averaged
            over rows.
        instead: what to use instead, for the advice; None if unknown or not needed.
        summary: one line about the loss.
        framework: the framework whose code this is; empty for other losses.
        temperature: by which the logits of a batch are multiplied before the loss sees them: a loss that divides them
            by it is then one of the policies of the batch.
        entries: of the vocabulary that the loss sees at least, so that its list of the most likely tokens fits in.
        added: log-prob of those that are added.
        in_micro_batches: the loss of the same batch in two halves, as the framework adds them up; None if not known.

    Example:
        >>> from klgrad.audit import catalogue
        >>> subject = catalogue()["k3-loss"]
        >>> subject.name, subject.kind
        ('k3-loss', 'cell')
    """

    name: str
    kind: Kind
    loss: Callable[[Batch], object]
    instead: Remedy | None = None
    summary: str = ""
    framework: str = ""
    temperature: float = 1.0
    entries: int = 0
    added: float = UNLIKELY
    in_micro_batches: Callable[[Batch], object] | None = None

    @property
    def place(self) -> tuple[str, int] | None:
        """The file and line where a user's loss is defined, if it is known."""
        return place_of(self.loss.function) if isinstance(self.loss, UserLoss) else None

    def __call__(self, batch: Batch) -> Tensor:
        """Evaluate the loss on one batch, as a scalar."""
        with self.named_errors(batch):
            batch = batch.with_logits_times(self.temperature).with_entries(self.entries, self.added)
            out = self.loss(batch)
        return scalar(self.name, out, batch)

    @property
    def call(self) -> str:
        """How the loss is called, in one line: what its arguments receive."""
        if isinstance(self.loss, UserLoss):
            return self.loss.text
        if self.kind == "framework":
            return f"{self.name}: by klgrad.frameworks, which passes the tensors on as {self.framework} takes them"
        return f"{self.name}({ROLLOUT})"

    def describe_call(self, batch: Batch) -> str:
        """`call`, with what becomes of values that are no scalar."""
        if self.kind != "function":
            return self.call
        return self.call + reduction_of(self.loss(batch.copy().with_entries(self.entries, self.added)), batch)

    @contextmanager
    def named_errors(self, batch: Batch) -> Iterator[None]:
        """Turn an exception of the loss into a `LossCallError` with the place in the user's code and the inputs."""
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            places = [(f.filename, f"{f.filename}, line {f.lineno}") for f in frames]
            inside = [at for file, at in places if not file.startswith(LIBRARIES) and "site-packages" not in file]
            # An error in the call itself has no frame in the user's code: then it is the place of the definition.
            definition = "{}, line {}".format(*self.place) if self.place else places[-1][1]
            where = inside[-1] if inside else definition
            raise LossCallError(
                f"{self.name} to return a differentiable loss",
                f"{type(error).__name__}: {error}",
                f"look at {where}; it was called with "
                f"{batch.logp.dtype} tensors of shape {tuple(batch.logp.shape)} and a bool mask"
                + (LOGITS_TOO.format(tuple(batch.logits.shape)) if self.is_given_logits else ""),
            ) from error

    @property
    def is_given_logits(self) -> bool:
        """Whether it is a user's loss that may look at logits."""
        return isinstance(self.loss, UserLoss) and self.loss.uses("logits")


def as_subject(
    loss: object,
    name: str | None = None,
    settings: Settings | None = None,
    names: Mapping[str, str] | None = None,
) -> Subject:
    """Wrap a loss.

    Args:
        loss: a `KLTerm`, a `Cell`, a function or module of the tensors that its signature names, or a class of one of
            these that needs no arguments; a `Subject` stays as it is.
        name: in reports; by default that of the loss.
        settings: values of the loss's own parameters.
        names: roles of its arguments whose names do not tell them, such as `{"x": "logp"}`.

    Returns:
        The loss as a subject.

    Example:
        >>> from klgrad.audit.subject import as_subject
        >>> def penalty(log_prob, y, beta):
        ...     return beta * (log_prob - y)
        >>> as_subject(penalty, settings={"beta": 0.1}, names={"y": "ref_logp"}).call
        'penalty(log_prob=logp (B, T), y=ref_logp (B, T), beta=0.1)'
    """
    settings = {**(settings or {}), **roles_of(names or {})}
    if isinstance(loss, type) and issubclass(loss, KLTerm):
        loss, taken = construct(loss, name_of(loss), settings)
        settings = {n: x for n, x in settings.items() if n not in taken}
    if isinstance(loss, (Subject, KLTerm, Cell)) and settings:
        raise LossCallError(
            "settings for a function, a module or a class", f"settings for {name or loss.name}", "leave them out"
        )
    if isinstance(loss, Subject):
        return loss
    if isinstance(loss, KLTerm):
        return of_rollout(name or loss.name, "term", loss)
    if isinstance(loss, Cell):
        return of_rollout(name or loss.name, "cell", loss, loss.instead, loss.summary)
    if callable(loss) or isinstance(loss, Method):
        name = name or name_of(loss)
        user_loss = prepare(loss, name, settings)
        return Subject(name, "function", user_loss, summary=summary_of(user_loss.function))
    raise LossCallError("a function, a module, a KLTerm or a Cell", type(loss).__name__, "pass the loss itself")


def of_rollout(
    name: str,
    kind: Literal["cell", "term"],
    loss: Callable[[Rollout], Tensor | KLResult],
    instead: Remedy | None = None,
    summary: str = "",
) -> Subject:
    """Wrap a loss that takes a `Rollout`."""
    generator = loss.generator if isinstance(loss, KLTerm) and loss.estimator == "exact" else None

    def call(batch: Batch) -> Tensor:
        out = loss(batch.rollout(generator))
        return out.loss if isinstance(out, KLResult) else out

    return Subject(name, kind, call, instead, summary)


# The losses of this package: every cell of `klgrad.zoo`, and every configuration of `KLTerm`.

WEIGHTINGS = (
    None,
    ImportanceWeighting("token", bound=None),
    ImportanceWeighting("prefix", bound=None),
    ImportanceWeighting("sequence", bound=None),
)

COMMON = (
    "k1-loss",
    "k2-loss",
    "k3-loss",
    "k3-loss-clamped",
    "ratio-k3-loss",
    "k3-no-grad",
    "k2-loss-token-mean",
    "k2-loss-length-mean",
    "stopped-ratio-k2-loss",
    "k1-reward",
    "k3-reward",
    "k1-reward-leave-one-out",
    "k1-reward-group-std",
    "reverse-token-exact",
    "reverse-sequence-exact-loo",
)
"""The losses that most people use, or should know."""

COMPROMISES = (
    KLTerm(discount=0.9),
    KLTerm(estimator="exact", discount=0.9),
    KLTerm(influence_bound=1.0),
    KLTerm(level="token", influence_bound=1.0),
    KLTerm(reduction="token"),
    KLTerm(level="token", reduction="token"),
    KLTerm(level="token", weighting=ImportanceWeighting("token", bound=Truncate(1.2))),
    KLTerm(weighting=ImportanceWeighting("prefix", bound=Truncate(1.2))),
)
"""Terms with an option that trades bias for variance, at one value of each continuous option."""


def every_term() -> Iterator[KLTerm]:
    """Every valid combination of the discrete options, then the compromises."""
    axes = {name: choices for name, choices in CHOICES.items() if name != "reduction"} | {"weighting": WEIGHTINGS}
    for values in product(*axes.values()):
        options: dict[str, Any] = dict(zip(axes, values, strict=True))
        try:
            yield KLTerm(**options)
        except MeaningError:
            continue
    yield from COMPROMISES


@cache
def catalogue() -> dict[str, Subject]:
    """All losses of this package, ready to audit.

    Returns:
        Subjects by name.

    Example:
        >>> from klgrad.audit import catalogue
        >>> catalogue()["k3-loss"].kind
        'cell'
    """
    subjects = [as_subject(cell) for cell in CELLS.values()]
    summary = (squared_sequence.__doc__ or "").split("\n")[0]
    subjects.append(of_rollout("squared-sequence", "term", squared_sequence, summary=summary))
    subjects += [as_subject(term) for term in every_term()]
    return {subject.name: subject for subject in subjects}


# Import a user's loss: `path/to/file.py:function` or `package.module:function`.
#
# The file is imported and run: audit only code that you would run.


def load(spec: str, settings: Settings | None = None, names: Mapping[str, str] | None = None) -> Subject:
    """Import a loss to audit.

    Args:
        spec: `path/to/file.py:function` or `package.module:function`; a class, an instance of one, or a method of a
            class will do. The file is run, as a test runner would do.
        settings: values of the loss's own parameters, and of its class's.
        names: as in `as_subject`.

    Returns:
        The loss as a subject named by `spec`.

    Raises:
        LossImportError: the file or module cannot be imported.
        UnknownNameError: it has no such name.

    Example:
        >>> import pathlib, tempfile
        >>> from klgrad.audit import load
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "my_losses.py"
        >>> _ = file.write_text("def k2(logp, ref_logp): return (logp - ref_logp) ** 2 / 2")
        >>> load(f"{file}:k2").kind
        'function'
    """
    return as_subject(locate(spec), spec, settings, names)


def find(spec: str) -> object:
    """Import the object behind a name; a method is one of an instance that needs no arguments."""
    x = locate(spec)
    return construct(x, x.cls.__name__, {})[0] if isinstance(x, Method) else x


def locate(spec: str) -> object:
    """Import the object behind a name; a method of a class stays a `Method`, since settings may make the instance."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise LossImportError(
            "path/to/file.py:function or package.module:function", repr(spec), "add the part after ':'"
        )
    with imports_for(spec):
        x: Any = module_of(where)
        for part in name.split("."):
            if not hasattr(x, part):
                raise UnknownNameError(f"name in {where}", name, [n for n in vars(x) if not n.startswith("_")])
            method = isinstance(x, type) and isinstance(inspect.getattr_static(x, part), FunctionType)
            x = Method(x, part) if method else getattr(x, part)
        return x


@contextmanager
def imports_for(spec: str) -> Iterator[None]:
    """Within the context, the code behind a name imports the modules beside it, not others that have their names.

    `a/losses.py` and `b/losses.py` may each have a `helpers.py`, and a test session may have imported a third one.
    Libraries are left as they are. Use it where a loss is loaded and where it is called, since it may import then.

    Args:
        spec: as in `load`; nothing happens for a name of the catalogue or of a framework.
    """
    where = spec if spec.endswith(".py") else spec.rpartition(":")[0]
    if not where:
        yield
        return
    folder = Path(where).resolve().parent if where.endswith(".py") else Path.cwd()
    beside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/*.py")}
    others = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in beside and _is_elsewhere(n, folder)}
    for name in others:
        del sys.modules[name]
    known = str(folder) in sys.path
    sys.path.insert(0, str(folder))  # for good, as pytest does: other code may call the loss, which imports then
    try:
        yield
    finally:
        if known:
            sys.path.remove(str(folder))
        replaced = {name.partition(".")[0] for name in others}
        for name in [name for name in sys.modules if name.partition(".")[0] in replaced]:
            del sys.modules[name]
        sys.modules.update(others)


def _is_elsewhere(name: str, folder: Path) -> bool:
    """Whether an imported module is neither in a folder nor of a library."""
    top = name.partition(".")[0]
    module = sys.modules.get(top)
    place = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
    if place is None or top in ("__main__", "klgrad") or top in sys.stdlib_module_names:
        return False
    home = Path(place).resolve().parent
    return home != folder and not {"site-packages", "dist-packages"} & set(home.parts)


def module_of(where: str) -> ModuleType:
    """Import a file, or a module by its name."""
    path = Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise LossImportError(
            "an existing Python file", where, "check the path; it is relative to the current directory"
        )
    with _named_errors(where):
        if path.suffix != ".py":
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None, path
        assert spec.loader is not None, path  # a .py file always has one
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look up their module there
        spec.loader.exec_module(module)
        return module


@contextmanager
def _named_errors(where: str) -> Iterator[None]:
    argv, sys.argv = sys.argv, [where]  # a script must not parse the arguments of klgrad
    try:
        yield
    except (Exception, SystemExit) as error:
        raise LossImportError(
            f"{where} to import", f"{type(error).__name__}: {error}", "make `python -c 'import ...'` work on it first"
        ) from error
    finally:
        sys.argv = argv


# Every loss of a file.


class FileLosses(NamedTuple):
    """The losses of a file, and why its other functions, modules and classes are not audited.

    Attributes:
        subjects: the losses, in the order of the file.
        skipped: name to reason; a class is there if it has a method that takes tensors of an audit.
    """

    subjects: list[Subject]
    skipped: dict[str, str]


def load_every(path: str, settings: Settings | None = None) -> FileLosses:
    r"""Import every loss of a file.

    Args:
        path: a Python file. It is run, as a test runner would do.
        settings: values of the losses' own parameters; each loss gets those that it has.

    Returns:
        The public functions, modules and terms that are defined in the file and take tensors of an audit by name,
        as subjects named `path:name`; and the reasons for leaving out the others.

    Raises:
        LossImportError: the file cannot be imported, or none of its functions is a loss.

    Example:
        >>> import pathlib, tempfile
        >>> from klgrad.audit import load_every
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "my_losses.py"
        >>> _ = file.write_text("def k1(logp, ref_logp): return logp - ref_logp\ndef scaled(x): return 2 * x")
        >>> losses = load_every(str(file))
        >>> len(losses.subjects), list(losses.skipped)
        (1, ['scaled'])
    """
    subjects, skipped = [], {}
    with imports_for(path):
        for name, loss in _candidates(module_of(path)):
            try:
                subjects.append(as_subject(loss, f"{path}:{name}", settings_for(loss, settings or {})))
            except LossCallError as error:
                skipped[name] = f"{error.received}; {error.remedy}"
    if not subjects:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise LossImportError(
            f"a loss in {path}", reasons or "no public function or module", f"name one: {path}:function"
        )
    return FileLosses(subjects, skipped)


def _candidates(module: ModuleType) -> Iterator[tuple[str, object]]:
    """The public callables that the file defines, once each."""
    seen: set[int] = set()
    public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    for name in public:
        x = getattr(module, name, None)
        if _is_defined_in(x, module) and id(x) not in seen:
            seen.add(id(x))
            yield name, x


def _is_defined_in(x: object, module: ModuleType) -> bool:
    if isinstance(x, (KLTerm, functools.partial)):
        return True
    if inspect.isclass(x):
        return x.__module__ == module.__name__ and bool(makes_callables(x) or loss_methods(x))
    if callable(x) and inspect.isfunction(function := inspect.unwrap(x)):  # a function that JAX compiles is none itself
        return Path(function.__code__.co_filename) == Path(str(module.__file__))
    return isinstance(x, nn.Module) or (callable(x) and type(x).__module__ == module.__name__)


# The derivatives of a loss, and its expected gradient on a problem.


@dataclass(frozen=True, eq=False)
class Gradient:
    """The gradient of one call of the loss, on groups drawn by the sampler.

    Attributes:
        mean: (P·V + T,) the expected gradient: on the logits, then on the masked positions of each column,
            where every target has zero.
        typical: sqrt(E‖g‖²), the size to compare a zero mean with.
        deviation: sqrt(E‖g - mean‖² times the size of the group): that of one completion, in a mean over completions.
            It is a root because squares overflow float64 from 1e155 on.
    """

    mean: Tensor
    typical: float
    deviation: float = math.nan


class Parts(NamedTuple):
    """∂loss/∂ of each leaf of a batch: (B, T), and (B, T, V) for the logits."""

    logp: Tensor
    logits: Tensor


def evaluate(subject: Subject, batch: Batch) -> tuple[Tensor, Parts]:
    """The loss, and its derivatives by each leaf of the batch."""
    with torch.enable_grad():
        # The loss gets copies, which are not leaves, so that it may modify them in place as it may a model's outputs.
        loss = subject(batch.copy())
        slopes: tuple[Tensor | None, ...] = (None,) * len(batch.leaves)
        if loss.requires_grad:  # a loss without gradient has the verdict `nothing`; it is no error
            with subject.named_errors(batch):
                slopes = torch.autograd.grad(loss, batch.leaves, allow_unused=True)
    pairs = zip(batch.leaves, slopes, strict=True)
    return loss.detach(), Parts(*(torch.zeros_like(x) if slope is None else slope for x, slope in pairs))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number of them is NaN or infinite."""
    return all(bool(torch.isfinite(x).all()) for x in tensors)


def expected_gradient(
    subject: Subject, problem: Problem, size: int, advantage: Tensor, *, at_once: bool = False
) -> Gradient:
    """Sum over every group of `size` completions; with advantages, sum what the reference adds to the gradient.

    Args:
        subject: the loss. It is called group by group.
        problem: its sampler draws the completions.
        size: completions per group.
        advantage: (N,) of each completion.
        at_once: call it once with all groups: right for a mean over rows whose groups do not influence each other.
    """
    members, probability = every_group(problem, size)
    per_group = every_gradient(subject, problem, members, advantage, at_once=at_once)
    unit = unit_of(per_group)
    mean = probability @ (per_group / unit)
    second = float(probability @ (per_group / unit).square().sum(-1))
    spread = float(probability @ (per_group / unit - mean).square().sum(-1))
    return Gradient(mean * unit, math.sqrt(second) * unit, math.sqrt(spread * size) * unit)


def unit_of(x: Tensor) -> float:
    """The power of two below the largest entry; 1 if all entries are zero.

    Divided by it, squares neither overflow nor underflow, and a division by a power of two is exact.
    """
    largest = float(x.abs().max())
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if math.isfinite(largest) and largest > 0 else 1.0


def every_gradient(
    subject: Subject, problem: Problem, members: Tensor, advantage: Tensor, *, at_once: bool = False
) -> Tensor:
    """(M, P·V + T) the gradient of the loss on each of M groups."""
    if at_once:
        parts = of_reference(subject, from_problem(problem, members, advantage))
        # A mean over all rows: multiply by the number of groups for the mean over one group.
        each = [Parts(*(part * len(members) for part in parts))]
    else:
        each = [of_reference(subject, from_problem(problem, group[None], advantage)) for group in members]
    parts = (torch.cat(part) for part in zip(*each, strict=True))
    return on_parameters(problem, members, Parts(*(part.reshape(*members.shape, *part.shape[1:]) for part in parts)))


def of_reference(subject: Subject, batch: Batch) -> Parts:
    """The derivatives of the loss; with advantages, what the reference adds to them."""
    parts = evaluate(subject, batch)[1]
    if not bool(batch.advantages.any()):
        return parts
    without = evaluate(subject, batch.at_reference().fresh())[1]
    return Parts(*(a - b for a, b in zip(parts, without, strict=True)))


def on_parameters(problem: Problem, members: Tensor, parts: Parts) -> Tensor:
    """From derivatives (M, G, T) or (M, G, T, V) by the tensors of a batch to those (M, P·V + T) by the parameters.

    The parameters are the logits of each prefix; a token's log-prob is differentiated by those of its own.
    """
    space, mask = problem.space, problem.space.mask[members]
    m, v = len(members), space.vocab
    # One number for the gradient on the logits of a position; equal weights would give 0 behind a softmax.
    weights = torch.arange(1, v + 1, dtype=parts.logits.dtype)
    padding = torch.where(mask, 0, parts.logp + parts.logits @ weights).sum(1)
    score = torch.nn.functional.one_hot(space.tokens, v) - torch.softmax(problem.logits, -1)[space.prefix]
    on_logits = torch.where(mask[..., None], parts.logits + parts.logp[..., None] * score[members], 0)
    prefix = space.prefix[members].reshape(m, -1, 1).expand(-1, -1, v)
    table = torch.zeros(m, space.prefixes, v, dtype=problem.logits.dtype)
    table.scatter_add_(1, prefix, on_logits.reshape(m, -1, v).to(table.dtype))
    return torch.cat([table.flatten(1), padding], -1)


def sum_over_rows(problem: Problem, members: Tensor, parts: Parts) -> Gradient:
    """The gradient on the parameters, from the derivatives by the tensors of one batch of these groups."""
    each = Parts(*(part[:, None] for part in parts))  # every row as a group of one
    per_row = on_parameters(problem, members.reshape(-1, 1), each)
    unit = unit_of(per_row)
    # The gradient is the sum over rows. In a mean over rows, that of one row alone would be `rows` times as large.
    typical = math.sqrt(float((per_row / unit).square().sum()) * len(per_row)) * unit
    return Gradient(per_row.sum(0), typical)

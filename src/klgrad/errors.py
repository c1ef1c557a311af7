"""Errors: each says what was expected, what was received, and what to do."""

import difflib
from collections.abc import Iterable

# The errors of this package. Every message states what was expected, what was received, and what to do.
#
# To add an error, inherit from `KlgradError` and from the built-in class that a caller would already catch.

SHOWN = 12
"""Names that contain an unknown one: how many are listed."""


class KlgradError(Exception):
    """The base class of all errors that this package raises on purpose.

    Args:
        expected: what would have been valid.
        received: what was given.
        remedy: what to do.

    Examples:
        >>> from klgrad import KlgradError, KLTerm
        >>> try:
        ...     KLTerm(discount=1.5)
        ... except KlgradError as error:
        ...     print(error)
        expected a discount in [0, 1]; received 1.5; remedy: write 1 for the whole future, or 0 for the token level
    """

    def __init__(self, expected: str, received: str, remedy: str) -> None:
        self.expected, self.received, self.remedy = expected, received, remedy
        super().__init__(f"expected {expected}; received {received}; remedy: {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the three texts, so that a worker process can send it to its parent."""
        return _rebuild, (type(self), self.expected, self.received, self.remedy)


def _rebuild(kind: type[KlgradError], expected: str, received: str, remedy: str) -> KlgradError:
    error = kind.__new__(kind)
    KlgradError.__init__(error, expected, received, remedy)
    return error


class RolloutError(KlgradError, ValueError):
    """Tensors that do not form one batch of sampled completions."""


class RunError(KlgradError, OSError):
    """A run's folder that cannot be written, read, or resumed."""


class MeaningError(KlgradError, ValueError):
    """A declaration whose options contradict each other; the remedy names a sound one."""


class ProblemError(KlgradError, ValueError):
    """An exact problem that cannot be built or is too large to sum over."""


class KernelInputError(KlgradError, ValueError):
    """Hidden states, heads, targets or logits that an exact KL cannot be computed from."""


class LossImportError(KlgradError, ImportError):
    """A loss to audit that cannot be found or imported."""


class LossCallError(KlgradError, RuntimeError):
    """A loss to audit that raised an error, or needs arguments that an audit does not have."""


class LossOutputError(KlgradError, TypeError):
    """A loss to audit that returned something that is not a loss."""


class VerdictError(KlgradError, AssertionError):
    """A loss that does not descend what a test expects."""


class NotAuditableError(KlgradError, ImportError):
    """A framework that is not installed, or cannot be imported."""


class MissingExtraError(KlgradError, ImportError):
    """An optional package that is not installed; the remedy names the extra that installs it."""


class ModelError(KlgradError, OSError):
    """A language model that cannot be found or loaded."""


class RunFileError(KlgradError, ValueError):
    """A configuration file of a run that cannot be read, or has a value that cannot be."""


class ExperimentError(KlgradError, RuntimeError):
    """Training runs of an experiment that cannot be made here, or that failed."""


class OutputError(KlgradError, OSError):
    """A file that cannot be written."""


class UnknownNameError(KlgradError, LookupError):
    """A name that is not known; the remedy suggests near matches.

    Args:
        kind: what the name is of, such as `cell`.
        name: the name that was given.
        known: the names that exist.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        within = sorted((n for n in names if name in n), key=lambda n: not n.startswith(name)) if name else []
        if near:
            remedy = f"did you mean {' or '.join(map(repr, near))}?"
        elif within:
            more = f" and {len(within) - SHOWN} more" if len(within) > SHOWN else ""
            remedy = f"names that contain it: {', '.join(within[:SHOWN])}{more}"
        else:
            remedy = f"known: {', '.join(names)}"
        super().__init__(f"a known {kind}", repr(name), remedy)


# The error that reading a log raises.


class LogError(KlgradError, ValueError):
    """A log cannot be read, or a row cannot be a sampled completion. The message names the file or the row.

    Example:
        >>> from pathlib import Path
        >>> from klgrad.logs import LogError, examine
        >>> try:
        ...     examine(Path("missing.parquet"))
        ... except LogError as error:
        ...     print(error.expected, "/", error.received)
        an existing file or folder / missing.parquet
    """


# Errors of a run. Each message says what was expected, what was received, and the remedy.


class SettingError(KlgradError, ValueError):
    """A setting, on the command line or in a file, that cannot be used."""


class DataError(KlgradError, ValueError):
    """Prompts that cannot be trained on."""


class RewardError(KlgradError, RuntimeError):
    """A reward function that raised, or that returned something other than one finite number per completion."""

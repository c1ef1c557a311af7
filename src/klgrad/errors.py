"""The error family: every message says what was expected, what came, and what to do.

To add one, inherit from `KlgradError` and from the built-in class that a caller would already catch.
"""

import difflib
from collections.abc import Iterable


class KlgradError(Exception):
    """Base of all errors raised on purpose by this package."""

    def __init__(self, expected: str, received: str, remedy: str) -> None:
        self.expected, self.received, self.remedy = expected, received, remedy
        super().__init__(f"expected {expected}; received {received}; remedy: {remedy}")

    def __reduce__(self) -> tuple[object, ...]:  # so that a worker process can raise it to its parent
        return _rebuilt, (type(self), self.expected, self.received, self.remedy)


def _rebuilt(kind: type[KlgradError], expected: str, received: str, remedy: str) -> KlgradError:
    error = kind.__new__(kind)
    KlgradError.__init__(error, expected, received, remedy)
    return error


class RolloutError(KlgradError, ValueError):
    """Tensors that cannot be one batch of sampled completions."""


class MeaningError(KlgradError, ValueError):
    """A KL term that could not mean what it says; the remedy names the sound one."""


class ProblemError(KlgradError, ValueError):
    """An exact problem that cannot be built or is too large to sum over."""


class KernelInputError(KlgradError, ValueError):
    """Hidden states, heads, targets or logits that no exact KL can be computed from."""


class LossImportError(KlgradError, ImportError):
    """A loss to audit that cannot be found or imported."""


class LossCallError(KlgradError, RuntimeError):
    """A loss to audit that raised, or asks for arguments that an audit does not have."""


class LossOutputError(KlgradError, TypeError):
    """A loss to audit that returned something that is not a loss."""


class NotAuditableError(KlgradError, ImportError):
    """A framework that is not here, or cannot be imported here."""


class MissingExtraError(KlgradError, ImportError):
    """An optional package that this needs; the remedy names the extra."""


class OutputError(KlgradError, OSError):
    """A file that cannot be written."""


class UnknownNameError(KlgradError, LookupError):
    """A name that no registry holds; near matches are suggested."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(names)}"
        super().__init__(f"a known {kind}", repr(name), remedy)

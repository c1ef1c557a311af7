"""A batch as a dictionary with every name that a framework uses."""

from typing import Any

from torch import Tensor

from ...errors import UnknownNameError
from ..batch import Batch
from .tensors import Form, argument_role, tensor

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

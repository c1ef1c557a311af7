"""TorchRL: the KL to the reference of `GRPOLoss`, and `DistillationLoss`.

`GRPOLoss._kl_to_ref` receives logp, ref_logp and the mask, with a coefficient of 1. `DistillationLoss` receives logp as
the log-probs of its student and ref_logp as those of the teacher; by default it averages over the tokens of each
completion. The package needs another version of TensorDict than verl, so only the files of the losses are loaded.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from .framework import Default, Framework
from .harness import load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

DEFAULT = "torchrl GRPOLoss kl_to_ref_coeff"


def subjects() -> list[Subject]:
    """The default with a KL, then distillation in both directions, averaged and summed."""
    return [
        _in_grpo(),
        *(_distilled(direction, mean) for direction in ("reverse", "forward") for mean in (True, False)),
    ]


def _in_grpo() -> Subject:
    grpo = object.__new__(_modules()["grpo"].GRPOLoss)

    def loss(batch: Batch) -> Tensor:
        return grpo._kl_to_ref({"_cur_log_prob": batch.logp}, ref_log_prob=batch.ref_logp, coeff=1.0, mask=batch.mask)[
            0
        ]

    # Its mean is over the width of the batch, which groups share.
    return subject("torchrl", DEFAULT, loss)


def _distilled(direction: str, mean: bool) -> Subject:
    settings = {"kl_direction": direction, "normalize_by_seq_length": mean, "reduction": "mean", "assistant_only": True}

    def loss(batch: Batch) -> Tensor:
        distillation = object.__new__(_modules()["distillation"].DistillationLoss)
        vars(distillation).update(
            settings,
            tensor_keys=SimpleNamespace(history="history", teacher_log_prob="teacher", log_probs="student"),
            actor_network=lambda data: data,
            _device_fallback=batch.logp,
            _get_masks=lambda *_: (list(batch.mask), list(batch.mask), None),
        )
        data = _Data(history=None, teacher=list(batch.ref_logp), student=list(batch.logp))
        return distillation.forward(data).loss_distill

    name = f"torchrl DistillationLoss kl_direction={direction} normalize_by_seq_length={mean}"
    return subject("torchrl", name, loss, stacks=True)


class _Data(dict[str, Any]):
    """What the loss reads of a TensorDict with one batch dimension."""

    ndim = 1

    def get(self, key: str, default: Any = None, *, as_list: bool = True) -> Any:
        return super().get(key, default)

    def select(self, *_: str) -> _Data:
        return self


@cache
def _modules() -> dict[str, ModuleType]:
    paths = {name: f"torchrl/objectives/llm/{name}.py" for name in ("grpo", "distillation")}
    found = {name: load("torchrl", path, replaced=("torchrl",)) for name, path in paths.items()}
    vars(found["distillation"]).update(_runtime_device=lambda *_, **__: None)
    return found


FRAMEWORK = Framework(
    "torchrl",
    "torchrl",
    "0.14.1",
    subjects,
    Default("no KL; with kl_to_ref_coeff alone raised", DEFAULT),
    caveats=(
        "`kl_direction=forward` is meant for samples of the teacher, on which it descends the forward KL; these audits "
        "are of samples of the student. `kl_direction=reverse`, the default, descends the forward KL too, as its "
        "docstring says.",
    ),
)

"""What the kernels for Hopper read: some tokens and some entries of both models."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Models:
    """Operands of the products.

    Attributes:
        hidden: (N, H) of the policy.
        weight: (entries, H) of its head.
        ref_hidden: (N, H') of the reference.
        ref_weight: (entries, H') of its head.
        factors: of the logits of policy and reference: scale / temperature.
        targets: (N,) sampled tokens, counted from the start of the head.
        start: the first entry, counted from the start of the head.
    """

    hidden: Tensor
    weight: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    factors: tuple[float, float]
    targets: Tensor
    start: int

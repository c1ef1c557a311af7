"""The hidden states and heads of both models, and the settings of a pass over their tiles."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .head import Transform
from .parallel import Shard
from .plan import Plan
from .project import project
from .tile import Tile


@dataclass(frozen=True, eq=False)
class Job:
    """The inputs that are not differentiated: targets and settings.

    Attributes:
        targets: (N,) sampled tokens, relative to the start of the shard.
        others: (N, k) further vocabulary entries whose log-probs are computed, relative to the start of the shard.
        plan: the sizes of tiles.
        transform: of the policy's logits.
        ref_transform: of the reference's logits.
        shard: the part of the vocabulary of this process.
        backend: the module that computes tiles, `tiles_torch` or `tiles_triton`.
        hopper: whether the kernels for Hopper compute the logits, and not the backend.
    """

    targets: Tensor
    others: Tensor
    plan: Plan
    transform: Transform
    ref_transform: Transform
    shard: Shard
    backend: ModuleType
    hopper: bool = False


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors of the policy, of the reference (or None), and the job."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ref_hidden: Tensor | None
    ref_weight: Tensor | None
    ref_bias: Tensor | None
    job: Job

    @property
    def paired(self) -> bool:
        """Whether there is a reference."""
        return self.ref_hidden is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which sums are accumulated."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def tiles(self) -> list[range]:
        """The tiles of the vocabulary."""
        return self.job.plan.tiles(len(self.weight))

    @property
    def chunks(self) -> list[slice]:
        """The chunks of the tokens."""
        return self.job.plan.chunks(len(self.hidden))

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor on the device of the hidden states."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.hidden.device)

    def buffers(self) -> list[Tensor]:
        """Buffers for the raw logits of one tile, one for each model."""
        plan = self.job.plan
        return [self.new(min(plan.strip, len(self.hidden)), plan.columns) for _ in range(2 if self.paired else 1)]

    def projected(self, rows: slice, columns: range, buffers: list[Tensor]) -> Tile:
        """The tile, with raw logits computed into the buffers."""
        raw = [buffer[: rows.stop - rows.start, : len(columns)] for buffer in buffers]
        part = slice(columns.start, columns.stop)
        project(self.hidden[rows], self.weight[part], raw[0])
        if self.ref_hidden is not None and self.ref_weight is not None:
            project(self.ref_hidden[rows], self.ref_weight[part], raw[1])
        return self.tile(rows, columns, *raw)

    def tile(self, rows: slice, columns: range, raw: Tensor | None = None, ref_raw: Tensor | None = None) -> Tile:
        """A tile with given logits, or without logits if they were kept."""
        return Tile(
            columns.start,
            len(columns),
            self.job.targets[rows],
            raw,
            ref_raw,
            self.bias,
            self.ref_bias,
            self.job.transform,
            self.job.ref_transform,
        )

"""Both models' hidden states and heads, with all that a pass over their tiles needs."""

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
    """What is not a differentiable tensor: targets, and how to go about it.

    `others` are (N, k) further vocabulary entries whose log-probs are wanted.
    """

    targets: Tensor
    others: Tensor
    plan: Plan
    transform: Transform
    ref_transform: Transform
    shard: Shard
    backend: ModuleType


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
        """What sums are accumulated in."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def tiles(self) -> list[range]:
        """The vocabulary's tiles."""
        return self.job.plan.tiles(len(self.weight))

    @property
    def chunks(self) -> list[slice]:
        """The tokens' chunks."""
        return self.job.plan.chunks(len(self.hidden))

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Unwritten memory beside the hidden states."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.hidden.device)

    def buffers(self) -> list[Tensor]:
        """Room for one tile's raw logits of each model."""
        plan = self.job.plan
        return [self.new(min(plan.strip, len(self.hidden)), plan.columns) for _ in range(2 if self.paired else 1)]

    def projected(self, rows: slice, columns: range, buffers: list[Tensor]) -> Tile:
        """The tile's raw logits, computed into the buffers."""
        raw = [buffer[: rows.stop - rows.start, : len(columns)] for buffer in buffers]
        part = slice(columns.start, columns.stop)
        project(self.hidden[rows], self.weight[part], raw[0])
        if self.ref_hidden is not None and self.ref_weight is not None:
            project(self.ref_hidden[rows], self.ref_weight[part], raw[1])
        return self.tile(rows, columns, *raw)

    def tile(self, rows: slice, columns: range, raw: Tensor | None = None, ref_raw: Tensor | None = None) -> Tile:
        """A tile around given logits, or around none where they were kept."""
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

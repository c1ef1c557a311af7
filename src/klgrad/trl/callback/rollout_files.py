"""Per-token log-probs of a run as Parquet, one file per measured step; `klgrad logs FOLDER` reads them."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import MeaningError, MissingExtraError
from ...support.atomic_files import ensure_folder, write_whole
from .passes import Columns

PER_TOKEN = {
    "logp": torch.float32,
    "ref_logp": torch.float32,
    "old_logp": torch.float32,
    "behavior_logp": torch.float32,
    "token_id": torch.int32,
}
"""The columns of lists, each with one entry per live token; a role that a run does not have has no column."""


class RolloutFiles:
    """Writes a file per step into a folder.

    Args:
        folder: made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, step: int) -> None:
        """Check the folder before training from `step` on.

        A new run refuses the files of another. A run that continues removes files of later steps: it makes these steps
        again.
        """
        _pyarrow()
        ensure_folder(self.folder)
        later = [path for path in sorted(self.folder.glob("step-*.parquet")) if (step_of(path) or 0) > step]
        if later and step == 0:
            files = f"{len(later)} file{'s' * (len(later) != 1)}"
            raise MeaningError(
                "a folder for the log-probs of one run",
                f"{self.folder}, with {files} of another run, such as {later[0].name}",
                "give another folder to log_rollouts, or remove the files",
            )
        for path in later:
            path.unlink()

    def write(self, step: int, batches: list[Columns]) -> None:
        """Write the completions of one step.

        Args:
            step: the number of the update.
            batches: the columns of its micro-batches, of all processes.
        """
        pa, pq = _pyarrow()
        rows: dict[str, Any] = {"group": [key for batch in batches for key in batch["group"].tolist()]}
        for name, dtype in PER_TOKEN.items():
            if all(batch.get(name) is not None for batch in batches):
                lists = [row for batch in batches for row in _live(batch[name], batch["mask"], dtype)]
                rows[name] = pa.array(lists, pa.list_(pa.from_numpy_dtype(lists[0].dtype)))
        rows["step"] = [step] * len(rows["group"])
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(rows), sink, compression="zstd")
        write_whole(self.folder / f"step-{step:08d}.parquet", sink.getvalue().to_pybytes())


def step_of(path: Path) -> int | None:
    """The step in a file's name, or None."""
    found = re.fullmatch(r"step-(\d+)\.parquet", path.name)
    return None if found is None else int(found[1])


def _live(x: Tensor, mask: Tensor, dtype: torch.dtype) -> list[Any]:
    """One array per completion, of its live tokens."""
    x, mask = x.to("cpu", dtype), mask.bool().cpu()
    return [row[live].numpy() for row, live in zip(x, mask, strict=True)]


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow, to write Parquet", "no such package", "pip install 'klgrad[logs]'") from error
    return pyarrow, pyarrow.parquet

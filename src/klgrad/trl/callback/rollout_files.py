"""Per-token log-probs of a run as Parquet, one file per measured step; `klgrad logs FOLDER` reads them."""

import itertools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingExtraError
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


RUN = b"klgrad.run"
"""The key in a file's metadata for the output folder of its run."""


class RolloutFiles:
    """Writes a file per step into a folder, or into a numbered folder inside it if it has the files of another run.

    Args:
        folder: made if it is missing.

    Attributes:
        folder: where the files of this run are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = self._given = folder
        self._run = ""

    def begin(self, step: int, run: str) -> bool:
        """Choose the folder before training from `step` on.

        A run that continues removes its files of later steps: it makes these steps again.

        Args:
            step: the updates that were made already.
            run: what tells the run from others: its output folder.

        Returns:
            Whether the given folder has the files of another run.
        """
        _pyarrow()
        self._run = run
        numbered = (self._given if n == 1 else self._given / f"run-{n}" for n in itertools.count(1))
        mine = lambda files: not files or (step > 0 and _run_of(files[0]) == run)
        self.folder = next(folder for folder in numbered if mine(_files(folder)))
        ensure_folder(self.folder)
        for path in _files(self.folder):
            if (step_of(path) or 0) > step:
                path.unlink()
        return self.folder != self._given

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
        table = pa.table(rows).replace_schema_metadata({RUN: self._run})
        pq.write_table(table, sink, compression="zstd")
        write_whole(self.folder / f"step-{step:08d}.parquet", sink.getvalue().to_pybytes())


def step_of(path: Path) -> int | None:
    """The step in a file's name, or None."""
    found = re.fullmatch(r"step-(\d+)\.parquet", path.name)
    return None if found is None else int(found[1])


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.parquet"))


def _run_of(path: Path) -> str:
    """The output folder of the run that wrote a file; empty if it does not say."""
    return ((_pyarrow()[1].read_schema(path).metadata or {}).get(RUN) or b"").decode()


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

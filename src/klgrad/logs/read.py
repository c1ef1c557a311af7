"""Logs in Parquet, JSONL and NPZ as a stream of chunks; no format here can carry code."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import jsonl, npz, parquet
from .chunk import Chunk
from .log_errors import LogError

CHUNK_TOKENS = 2**20
"""About as many tokens as are held at a time, of each column."""

CODE = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib")
"""Suffixes of files that can run code when they are read."""


@dataclass(frozen=True)
class Log:
    """An open log.

    Attributes:
        columns: role to the column's name.
        total: what `Chunk.done` ends at.
        chunks: reads the file, once.
    """

    columns: dict[str, str]
    total: int
    chunks: Callable[[], Iterator[Chunk]]


READERS = {".parquet": parquet.open_log, ".jsonl": jsonl.open_log, ".ndjson": jsonl.open_log, ".npz": npz.open_log}


def open_log(path: Path, chosen: dict[str, str], chunk_tokens: int = CHUNK_TOKENS) -> Log:
    """Find the columns; `chosen` maps roles to names where the recognised ones are not meant."""
    suffix = path.suffix.lower()
    if suffix not in READERS:
        remedy = "save it as Parquet (`pyarrow.parquet.write_table`), JSONL or NPZ (`numpy.savez`)"
        if suffix in CODE:
            remedy = f"a pickle can run code and is never read: {remedy}"
        raise LogError(f"a file that ends in {', '.join(READERS)}", str(path), remedy)
    if not path.is_file():
        raise LogError("an existing file", str(path), "check the path; a folder of shards is read file by file")
    if path.stat().st_size == 0:
        raise LogError("a log with rows in it", f"{path}, which is empty (0 bytes)", "write the log again")
    return Log(*READERS[suffix](path, chosen, chunk_tokens))

"""Logs in Parquet, JSONL and NPZ as a stream of chunks. Reading these formats cannot run code."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import jsonl, npz, parquet
from .chunk import Chunk
from .log_errors import LogError
from .prompt_groups import Known

CHUNK_TOKENS = 2**20
"""The approximate number of tokens in memory, for each column."""

CODE = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib")
"""Suffixes of files that can run code when they are read."""


@dataclass(frozen=True)
class Log:
    """An open log.

    Attributes:
        columns: role to the column's name.
        total: the value of `Chunk.done` at the end of the file.
        chunks: reads the file once.
    """

    columns: dict[str, str]
    total: int
    chunks: Callable[[], Iterator[Chunk]]


READERS = {".parquet": parquet.open_log, ".jsonl": jsonl.open_log, ".ndjson": jsonl.open_log, ".npz": npz.open_log}


def open_log(path: Path, chosen: dict[str, str], chunk_tokens: int = CHUNK_TOKENS, known: Known | None = None) -> Log:
    """Find the columns of a log.

    Args:
        path: the file.
        chosen: role to column name, to override the recognised names.
        chunk_tokens: the approximate number of tokens of a chunk.
        known: the numbers of prompts in the files before this one, to which those of this file are added.

    Returns:
        The log, from which nothing but names and sizes has been read.
    """
    if not path.exists():
        raise LogError("an existing file or folder", str(path), "check the path")
    suffix = path.suffix.lower()
    if suffix not in READERS:
        remedy = "save it as Parquet (`pyarrow.parquet.write_table`), JSONL or NPZ (`numpy.savez`)"
        if suffix in CODE:
            remedy = f"a pickle can run code, so it is not read: {remedy}"
        raise LogError(f"a file that ends in {', '.join(READERS)}", str(path), remedy)
    if not path.is_file():
        raise LogError("a regular file", str(path), "save the log in one")
    if path.stat().st_size == 0:
        raise LogError("a log with rows in it", f"{path}, which is empty (0 bytes)", "write the log again")
    return Log(*READERS[suffix](path, chosen, chunk_tokens, {} if known is None else known))

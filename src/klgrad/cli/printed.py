"""Limit what an audited loss prints: it is called thousands of times."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from rich.console import Console

SHOWN = 5
"""Lines that are shown."""
KEPT = 2_000
"""Bytes that are kept."""


class _Head(io.RawIOBase):
    """Keeps the beginning of the output, and counts its lines."""

    def __init__(self) -> None:
        self.kept, self.lines = b"", 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        written = bytes(data)  # pyright: ignore[reportArgumentType]
        self.lines += written.count(b"\n")
        self.kept += written[: KEPT - len(self.kept)]
        return len(written)


@contextmanager
def first_lines(name: str, console: Console) -> Iterator[None]:
    """Capture standard output and standard error within the context, and show their first lines afterwards."""
    head = _Head()
    stream = io.TextIOWrapper(io.BufferedWriter(head), encoding="utf-8", errors="backslashreplace")
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        stream.flush()
        lines = head.kept.decode("utf-8", "replace").splitlines()[:SHOWN]
        if lines:
            more = f" {head.lines:,} lines; the first {SHOWN}" if head.lines > SHOWN else ""
            console.print("\n".join([f"{name} printed{more}:", *(f"  {line}" for line in lines)]), style="dim")

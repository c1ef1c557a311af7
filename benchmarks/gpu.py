"""Timing on a GPU. Candidates run in turn, so that clock rate and power limit affect all of them.

Without a GPU the same code runs: times are the processor's for this process, so that other programs on the machine
count little, and memory is that of the process, where Linux tells it.
"""

import importlib.metadata
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import torch
from harness import provenance

Step = Callable[[], object]

HEAD_START = 10_000_000
"""Cycles that the GPU sleeps before a step, about 5 ms. Meanwhile the CPU starts kernels and is then ahead of the GPU,
as in training, where layers run before; otherwise the time of Python before the first kernel would be measured."""


@dataclass
class Measured:
    """Milliseconds of each round, and the peak memory of a run beyond the memory before it."""

    milliseconds: list[float] = field(default_factory=list)
    extra_bytes: int = 0
    failure: str = ""

    @property
    def median(self) -> float:
        """The median of the rounds, in milliseconds."""
        return median(self.milliseconds)


def in_turn(candidates: dict[str, Step], rounds: int) -> dict[str, Measured]:
    """Run every candidate `rounds` times, in a new random order each round, after two that do not count (one on a CPU).

    The previous candidate affects the temperature, and so the speed, of the GPU: a fixed order would favour a candidate
    that follows a light one. A candidate that raises an error has it as its only result, and it is printed.
    """
    found = {name: Measured() for name in candidates}
    shuffle, warming = random.Random(0), 2 if torch.cuda.is_available() else 1
    for turn in range(rounds + warming):
        running = [name for name in found if not found[name].failure]
        for name in shuffle.sample(running, len(running)):
            try:
                milliseconds, extra = _once(candidates[name])
            except Exception as error:
                found[name] = Measured(failure=_in_a_line(error))
                print(f"  {name} does not run here: {found[name].failure}")
                continue
            if turn >= warming:
                found[name].milliseconds.append(milliseconds)
                found[name].extra_bytes = max(found[name].extra_bytes, extra)
    return found


def _in_a_line(error: Exception) -> str:
    """What was raised, without addresses, which say nothing to a reader."""
    text = re.sub(r" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")
    return text[:200].replace("\n", " ")


def _once(step: Step) -> tuple[float, int]:
    if not torch.cuda.is_available():
        before = _resident("VmRSS")
        begin = time.process_time()
        step()
        return 1000 * (time.process_time() - begin), _resident("VmHWM") - before
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), torch.cuda.max_memory_allocated() - before


def _resident(field: str) -> int:
    """The memory of this process in bytes; asking for the present one (VmRSS) begins a new peak (VmHWM)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if field == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    (line,) = (line for line in status.read_text(encoding="ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def rows(
    benchmark: str, found: dict[str, Measured], floors: dict[str, str], **shape: int
) -> Iterable[dict[str, object]]:
    """CSV rows; `floors` maps each candidate to the one that it is compared with."""
    for name, measured in found.items():
        floor = floors.get(name)
        yield {
            "benchmark": benchmark,
            "candidate": name,
            **shape,
            **_numbers(measured, found.get(floor or "")),
            "floor": floor or "",
            "rounds": len(measured.milliseconds),
            "failure": measured.failure,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "triton": importlib.metadata.version("triton"),
            **provenance(),
        }


def _numbers(measured: Measured, floor: Measured | None) -> dict[str, str]:
    if measured.failure:
        return dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "times_floor", "extra_gib"), "")
    return {
        "median_ms": f"{measured.median:.4g}",
        "p20_ms": f"{quantiles(measured.milliseconds, n=5)[0]:.4g}",
        "p80_ms": f"{quantiles(measured.milliseconds, n=5)[3]:.4g}",
        "times_floor": f"{measured.median / floor.median:.3f}" if floor else "",
        "extra_gib": f"{measured.extra_bytes / 2**30:.2f}",
    }

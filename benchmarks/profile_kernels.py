"""Where the time of our exact KL goes on a GPU: the sum of each kind of kernel in one forward and backward pass.

    python benchmarks/profile_kernels.py [--out FOLDER] [--repeats N] [--hidden SIZE ...]

Kernel times are those of the profiler, in a warm process. "Between kernels" is the rest of the time of a step, in which
the GPU waits; the profiler adds to it. Inputs are not checked. The matrix products of 4 projections are profiled in the
same process. Rows: benchmarks/results/kernels_profile.csv.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from bench_kernels import ELSEWHERE, SHAPES, Case, floors, without_hopper
from harness import RESULTS, provenance, write
from torch.profiler import ProfilerActivity, profile

from klgrad.kernels import hopper

TOKENS = 8192
WARM = 3
KINDS = {
    "_statistics_kernel": "sums of logits in memory",
    "_gradient_kernel": "gradient of logits in memory",
    "_merge_kernel": "merging of sums",
    "sums_kernel": "products and sums in one kernel",
    "gradient_kernel": "products and gradient in one kernel",
    "gemm": "matrix products",
    "nvjet": "matrix products",
    "cutlass": "matrix products",
}
"""By a part of the kernel's name; the first that fits."""
REST = "the rest"
BETWEEN = "between kernels"


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    return next((kind for part, kind in KINDS.items() if part in kernel.lower()), REST)


def profiled(step: Callable[[], object], repeats: int) -> dict[str, float]:
    """Milliseconds of each kind of kernel in one step, and between them."""
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        start.record()
        for _ in range(repeats):
            step()
        end.record()
        torch.cuda.synchronize()
    spent = [(event.key, event.self_device_time_total / 1000 / repeats) for event in seen.key_averages()]
    return by_kind(spent, start.elapsed_time(end) / repeats)


def by_kind(kernels: Iterable[tuple[str, float]], elapsed: float) -> dict[str, float]:
    """The sum of each kind of kernel, and what is left of the elapsed time."""
    found: dict[str, float] = defaultdict(float)
    for name, spent in kernels:
        found[kind_of(name)] += spent
    return {**found, BETWEEN: elapsed - sum(found.values())}


def steps(case: Case) -> dict[str, Callable[[], object]]:
    """What is profiled, by name."""
    ours: dict[str, Callable[[], object]] = {"klgrad lean": case.ours, "klgrad fast": partial(case.ours, mode="fast")}
    if hopper.runs_on(case.h.device):
        ours |= {f"{name}, {ELSEWHERE}": without_hopper(step) for name, step in ours.items()}
    return floors(case, (4,)) | {name: case.cleared(step) for name, step in ours.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--hidden", type=int, nargs="+", default=[hidden for hidden, _ in SHAPES])
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    for hidden, vocabulary in SHAPES:
        if hidden not in given.hidden:
            continue
        for name, step in steps(Case(TOKENS, hidden, vocabulary)).items():
            for kind, spent in profiled(step, given.repeats).items():
                size = {"tokens": TOKENS, "hidden": hidden, "vocabulary": vocabulary}
                rows.append({"candidate": name, **size, "kernels": kind, "ms": f"{spent:.3f}", **provenance()})
                print(f"{hidden:>5}  {name:<40} {kind:<40} {spent:8.3f} ms", flush=True)
        torch.cuda.empty_cache()
        write(rows, given.out / "kernels_profile.csv")


if __name__ == "__main__":
    main()

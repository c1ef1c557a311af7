"""Time the forward pass with logits in registers against the one in use: `python benchmarks/bench_fused_forward.py`.

Candidates run in turn: the library's two products alone, with 16-bit results; the forward pass of Triton's kernels; and
that of the kernels for Hopper, with the logits that fit into the budget kept, and with none kept. `--out DIR` says
where the rows are written. It needs a Hopper GPU; `tests/kernels/test_hopper_gpu.py` checks the results.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from bench_kernels import NOTHING_KEPT, SHAPES, Case, fused_as
from gpu import in_turn, rows
from harness import RESULTS, write

from klgrad.kernels import Head, token_statistics
from klgrad.kernels.hopper.choice import Fused

TOKENS = 8192


def candidates(case: Case) -> dict[str, Any]:
    """What is timed, by name."""
    h, w = case.h.detach(), case.w.detach()
    out = torch.empty(len(h), len(w), dtype=h.dtype, device=h.device)
    forward = lambda **how: token_statistics(h, Head(w), case.y, case.h_ref, Head(case.w_ref), **how)
    return {
        "two products, 16-bit logits": lambda: (torch.mm(h, w.T, out=out), torch.mm(case.h_ref, case.w_ref.T, out=out)),
        "used: whole forward pass": fused_as(Fused.NOTHING, forward),
        "in registers: whole forward pass": fused_as(Fused.EVERYTHING, forward),
        "in registers: whole forward pass, nothing kept": fused_as(
            Fused.RECOMPUTED, lambda: forward(budget=NOTHING_KEPT)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    found: list[dict[str, object]] = []
    for hidden, vocabulary in SHAPES:
        timed = in_turn(candidates(Case(TOKENS, hidden, vocabulary)), chosen.rounds)
        found += rows("fused forward", timed, {}, tokens=TOKENS, hidden=hidden, vocabulary=vocabulary)
        write(found, chosen.out / "fused_forward.csv")
        for name, measured in timed.items():
            text = measured.failure or f"{measured.median:7.2f} ms"
            print(f"{hidden:>5} {name:<60} {text}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

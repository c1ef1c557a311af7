"""Time forward passes in registers against the one in use: `python benchmarks/bench_fused_forward.py [--out DIR]`.

First the sums of the kernels of `fused_forward.py` and `paired_forward.py` are compared with float64 at sizes that are
no multiples of their tiles. Then candidates run in turn: the library's products alone, with 16-bit and with float32
results; the statistics pass over tiles that are there; the whole forward pass; the first kernel with more and more of
its work; and the second one, alone and as a whole forward pass. It needs a Hopper GPU.
"""

import argparse
from pathlib import Path
from typing import Any

import fused_forward as fused
import merged_states
import paired_forward as paired
import torch
from gpu import in_turn, rows
from harness import RESULTS, write
from torch import Tensor

from klgrad.kernels import Head, state, tiles_triton, token_statistics
from klgrad.kernels.head import Transform
from klgrad.kernels.project import project
from klgrad.kernels.tile import Tile

SHAPES = ((4096, 128256), (2048, 151936), (1024, 151936), (896, 151936))
TOKENS, STRIP, WIDTH = 8192, 4096, 16384
ODD = ((300, 200, 136, 1000), (1111, 1024, 1024, 4224), (256, 64, 64, 38400))
"""Tokens, hidden sizes and vocabulary of the comparison with float64. The last has more tiles than steps of a tile."""
LARGEST_ERROR = 5e-5
"""Relative, of the norm of a field: float32 sums of 128 entries, and products of bf16 numbers added in float32."""
PAIRED = {"128 columns": paired.NARROW, "192 columns": paired.WIDE}
LEVELS = {"maxima of rows alone": 0, "and the reference's tile stored and read": 2, "and all sums": 3}


def tensors(tokens: int, hidden: int, ref_hidden: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and heads of policy and reference; logits have a standard deviation of 3."""
    new = lambda *size, scale=1.0: (torch.randn(*size, device="cuda") * scale).bfloat16()
    h, w = new(tokens, hidden), new(vocabulary, hidden, scale=3 / hidden**0.5)
    return h, w, new(tokens, ref_hidden), new(vocabulary, ref_hidden, scale=3 / ref_hidden**0.5)


def room(tokens: int, vocabulary: int, columns: int = fused.COLUMNS) -> tuple[Tensor, Tensor]:
    """States, filled with NaN so that what is not written shows, and the scratch area."""
    states = torch.full((fused.FIELDS, -(-vocabulary // columns), tokens), torch.nan, device="cuda")
    return states, torch.empty(fused.PROGRAMS * fused.ROWS * fused.COLUMNS, device="cuda")


def check() -> None:
    """Compare every field of every kernel with float64; raise if one differs."""
    for tokens, hidden, ref_hidden, vocabulary in ODD:
        given = tensors(tokens, hidden, ref_hidden, vocabulary)
        states, scratch = room(tokens, vocabulary)
        fused.launch(*given, states, scratch, level=3)
        compare("fused", given, states, fused.COLUMNS)
        for name, shape in PAIRED.items():
            states, _ = room(tokens, vocabulary, shape.columns)
            paired.launch(*given, states, shape)
            compare(f"paired, {name}", given, states, shape.columns)


def compare(name: str, given: tuple[Tensor, Tensor, Tensor, Tensor], states: Tensor, columns: int) -> None:
    """Compare the states of a kernel with those of float64 logits."""
    z, z_ref = given[0].double() @ given[1].double().T, given[2].double() @ given[3].double().T
    cuts = range(0, z.shape[1], columns)
    each = [state.of_logits(*(x[:, i : i + columns] for x in (z, z_ref)))[2] for i in cuts]
    expected = torch.stack(each, 1)[: fused.FIELDS]
    error = (states - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    print(f"{name}, {' x '.join(map(str, z.shape))}: largest relative error {float(error.max()):.1e}")
    if not bool((error < LARGEST_ERROR).all()):
        raise SystemExit(f"expected errors below {LARGEST_ERROR}; received {error.tolist()}")


def whole(given: tuple[Tensor, Tensor, Tensor, Tensor], y: Tensor, shape: paired.Shape) -> Any:
    """The forward pass with the kernel of `paired_forward.py`: all that the one in use returns."""
    h, w, h_ref, w_ref = given
    states, _ = room(len(h), len(w), shape.columns)
    picked = torch.empty(2, len(h), device="cuda")

    def step() -> object:
        paired.launch(*given, states, shape)
        merged_states.pick(h, w, y, picked[0])
        merged_states.pick(h_ref, w_ref, y, picked[1])
        return state.finish(state.merge(merged_states.merge(states)))

    return step


def alone(given: tuple[Tensor, Tensor, Tensor, Tensor], shape: paired.Shape) -> Any:
    """The kernel of `paired_forward.py`, without what follows it."""
    states, _ = room(len(given[0]), len(given[1]), shape.columns)
    return lambda: paired.launch(*given, states, shape)


def candidates(given: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """What is timed, by name."""
    h, w, h_ref, w_ref = given
    y = torch.randint(len(w), (len(h),), device="cuda")
    out = torch.empty(len(h), len(w), dtype=torch.bfloat16, device="cuda")
    raw = [torch.randn(STRIP, WIDTH, device="cuda") for _ in range(2)]
    slices = tiles_triton.slices(WIDTH)
    kept, picked = torch.empty(11, slices, len(h), device="cuda"), torch.zeros(2, len(h), device="cuda")
    cuts = [(i, min(WIDTH, len(w) - i), j) for i in range(0, len(w), WIDTH) for j in range(0, len(h), STRIP)]
    states, scratch = room(len(h), len(w))

    def float32_products() -> None:
        for i, width, j in cuts:
            project(h[j : j + STRIP], w[i : i + width], raw[0][:, :width])
            project(h_ref[j : j + STRIP], w_ref[i : i + width], raw[1][:, :width])

    def statistics() -> None:
        for i, width, j in cuts:
            places = slice(j, j + STRIP)
            tile = Tile(i, width, y[places], raw[0][:, :width], raw[1][:, :width], None, None, Transform(), Transform())
            tiles_triton.statistics(tile, kept[:, :, places], 0, picked[:, places], None)

    with_less = {
        f"in registers: {words}": lambda level=level: fused.launch(*given, states, scratch, level)
        for words, level in LEVELS.items()
    }
    return {
        "two products, 16-bit logits": lambda: (torch.mm(h, w.T, out=out), torch.mm(h_ref, w_ref.T, out=out)),
        "used: two products, float32 logits": float32_products,
        "used: statistics alone": statistics,
        "used: whole forward pass": lambda: token_statistics(h, Head(w), y, h_ref, Head(w_ref)),
        **with_less,
        **{f"both in registers, {name}: kernel": alone(given, shape) for name, shape in PAIRED.items()},
        **{f"both in registers, {name}: whole forward pass": whole(given, y, shape) for name, shape in PAIRED.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    check()
    found: list[dict[str, object]] = []
    for hidden, vocabulary in SHAPES:
        with torch.no_grad():
            timed = in_turn(candidates(tensors(TOKENS, hidden, hidden, vocabulary)), chosen.rounds)
        found += rows("fused forward", timed, {}, tokens=TOKENS, hidden=hidden, vocabulary=vocabulary)
        write(found, chosen.out / "fused_forward.csv")
        for name, measured in timed.items():
            text = measured.failure or f"{measured.median:7.2f} ms"
            print(f"{hidden:>5} {name:<60} {text}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

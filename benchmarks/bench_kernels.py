"""The exact KL, and other divergences, from hidden states, on a GPU; `--only divergences` on a CPU too.

    python benchmarks/bench_kernels.py [--out FOLDER] [--rounds N] [--only PART] [--hidden SIZE ...]
                                       [--rivals NAME ...] [--tiny]

A floor is the time of the matrix products alone, run in the same rounds: 4 projections for methods that keep their
logits, 6 for methods that recompute them; 3 and 4 for the log-prob alone. Memory is that of one forward and backward
pass beyond its inputs, including the gradients. Our candidates run with `validate=False`, because no rival checks the
values of its inputs (the one that would is told not to, `rivals.CHECK`); `klgrad lean, inputs checked` has the default,
which waits for the GPU once. Before each step the GPU sleeps for a few milliseconds, in which the CPU gets ahead of it
(`gpu.HEAD_START`). `--hidden` chooses among the shapes, and `--rivals` among the rivals by the beginnings of their
names; rows of an earlier run that are not measured again are then kept. On a Hopper GPU, our exact KL is also timed
with the kernels that other GPUs use. The rows are written after each shape. `--tiny` runs everything once on tiny
sizes, on a CPU too, and writes to build/tiny.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import rivals
import torch
from gpu import Measured, in_turn, rows
from harness import RESULTS, read, write

from klgrad.kernels import Head, hopper, token_statistics

SHAPES = ((4096, 128256), (2048, 151936), (1024, 151936), (896, 151936))
"""Hidden size and vocabulary of Llama 3.1 8B, Qwen3 1.7B, Qwen3 0.6B and Qwen2.5 0.5B."""
DIVERGENCE_SHAPES = ((1024, 49152), (576, 49152))
"""The vocabulary of SmolLM2, with its hidden size at 135M and a larger one."""
HIDDEN = sorted({hidden for hidden, _ in SHAPES + DIVERGENCE_SHAPES})
DIVERGENCES = ("reverse", "jensen-shannon", "chi-square")
CPU_TOKENS, CPU_ROUNDS, CPU_SMALL = 256, 3, 32 << 20
"""Of the divergences on a CPU, in float32; the last is a budget in bytes in which little is kept."""
COMPARED_WITH_ALL = (4096, 2048)
"""Hidden sizes at which the slow rivals run too."""
TINY = ((32, 512), (16, 256))
ROUNDS = 15
LINEAR_ROUNDS = 3
"""Rounds of the part with up to 131072 tokens."""
SMALL = 768 << 20
"""A budget in bytes. The kernels of other GPUs need it for tiles of 16384 entries, and then keep nothing."""
ELSEWHERE = "kernels of other GPUs"

Names = list[str] | None
"""Beginnings of the names of rivals; None for all of them."""


class Case:
    """Random hidden states and heads of a policy and a nearby reference."""

    def __init__(self, tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        new = lambda *shape, scale=1.0: (torch.randn(*shape, device=device) * scale).to(dtype)
        self.h, self.w = new(tokens, hidden), new(vocabulary, hidden, scale=2 / hidden**0.5)
        self.h_ref, self.w_ref = self.h + 0.05 * torch.randn_like(self.h), self.w.clone()
        self.h.requires_grad_()
        self.w.requires_grad_()
        self.y = torch.randint(0, vocabulary, (tokens,), device=device)
        self.up = torch.rand(4, tokens, device=device)

    def ours(self, paired: bool = True, validate: bool = False, **how: object) -> None:
        """Forward pass, and backward pass with weights on every output."""
        reference = (self.h_ref, Head(self.w_ref)) if paired else ()
        s = token_statistics(self.h, Head(self.w), self.y, *reference, validate=validate, **how)  # type: ignore[arg-type]
        outputs = (s.logp, s.entropy, s.reverse_kl, s.forward_kl) if paired else (s.logp,)
        torch.stack([(u * x).sum() for u, x in zip(self.up, outputs, strict=False) if x is not None]).sum().backward()

    def divergence(self, name: str, **how: object) -> None:
        """Forward pass, and backward pass with weights on the divergence."""
        given = (self.h, Head(self.w), self.y, self.h_ref, Head(self.w_ref))
        is_kl = name == "reverse"
        found = token_statistics(*given, divergence=None if is_kl else name, validate=False, **how)  # type: ignore[arg-type]
        found = found.reverse_kl if is_kl else found.divergence
        assert found is not None
        (self.up[0] * found).sum().backward()

    def cleared(self, step: Callable[[], object]) -> Callable[[], object]:
        """The step, after which gradients are freed, so that the memory of each step is measured."""

        def run() -> None:
            step()
            self.h.grad = self.w.grad = None

        return run


def chosen(others: dict[str, rivals.Step], names: Names) -> dict[str, rivals.Step]:
    return {name: step for name, step in others.items() if names is None or name.startswith(tuple(names))}


def floors(case: Case, counts: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    h, w, w_ref = case.h.detach(), case.w.detach(), case.w_ref
    out = torch.empty(len(h), len(w), dtype=h.dtype, device=h.device)

    def products(count: int) -> None:
        for i in range(count):
            torch.mm(h, (w_ref if i % 2 else w).T, out=out)

    return {f"{count} projections": partial(products, count) for count in counts}


def floor_of(found: dict[str, Measured], base: Iterable[str], fewer: str, more: str) -> dict[str, str]:
    """The floor of each candidate: the smaller number of projections where each logit is computed once."""
    once = ("klgrad fast", *rivals.ONE_PASS)
    return {name: fewer if name.startswith(once) else more for name in found if name not in base}


def without_hopper(step: Callable[[], object]) -> Callable[[], object]:
    """The step without the kernels for Hopper."""

    def run() -> None:
        hopper.USED = False
        try:
            step()
        finally:
            hopper.USED = True

    return run


def exact(tokens: int, hidden: int, vocabulary: int, rounds: int, names: Names) -> list[dict[str, object]]:
    case = Case(tokens, hidden, vocabulary)
    ours: dict[str, rivals.Step] = {
        "klgrad lean": partial(case.ours),
        "klgrad fast": partial(case.ours, mode="fast"),
        "klgrad, 0.75 GiB": partial(case.ours, budget=SMALL),
    }
    if hopper.runs_on(case.h.device):
        ours |= {f"{name}, {ELSEWHERE}": without_hopper(step) for name, step in ours.items()}
    ours["klgrad lean, inputs checked"] = partial(case.ours, validate=True)
    others = chosen(rivals.exact(case.h, case.w, case.h_ref, case.w_ref, case.up[0]), names)
    base = floors(case, (4, 6))
    found = in_turn(base | {name: case.cleared(step) for name, step in (ours | others).items()}, rounds)
    floor = floor_of(found, base, "4 projections", "6 projections")
    return list(rows("exact KL", found, floor, tokens=tokens, hidden=hidden, vocabulary=vocabulary))


def sampled(tokens: int, hidden: int, vocabulary: int, rounds: int, names: Names) -> list[dict[str, object]]:
    case = Case(tokens, hidden, vocabulary)
    ours = {
        "klgrad lean": partial(case.ours, paired=False),
        "klgrad fast": partial(case.ours, paired=False, mode="fast"),
    }
    others = chosen(rivals.sampled(case.h, case.w, case.y, case.up[0]), names)
    if hidden not in COMPARED_WITH_ALL:
        others = {name: step for name, step in others.items() if not name.startswith(rivals.SLOW)}
    base = floors(case, (3, 4))
    found = in_turn(base | {name: case.cleared(step) for name, step in (ours | others).items()}, rounds)
    floor = floor_of(found, base, "3 projections", "4 projections")
    return list(rows("log-prob alone", found, floor, tokens=tokens, hidden=hidden, vocabulary=vocabulary))


def divergences(tokens: int, hidden: int, vocabulary: int, rounds: int, names: Names) -> list[dict[str, object]]:
    """Against 4 projections: each logit computed once, and both gradients."""
    gpu = torch.cuda.is_available()
    case = Case(tokens, hidden, vocabulary, torch.bfloat16 if gpu else torch.float32)
    budget = SMALL if gpu else CPU_SMALL
    made: list[dict[str, object]] = []
    for name in DIVERGENCES:
        ours: dict[str, rivals.Step] = {
            "klgrad lean": partial(case.divergence, name),
            **(
                {"klgrad fast": partial(case.divergence, name, mode="fast")} if gpu else {}
            ),  # else `lean` keeps all too
            f"klgrad, {budget / 2**30:.2g} GiB": partial(case.divergence, name, budget=budget),
        }
        others = chosen(rivals.divergences(name, case.h, case.w, case.h_ref, case.w_ref, case.y, case.up[0]), names)
        base = floors(case, (4,))
        found = in_turn(base | {each: case.cleared(step) for each, step in (ours | others).items()}, rounds)
        floor = dict.fromkeys(found.keys() - base.keys(), "4 projections")
        made += rows(name, found, floor, tokens=tokens, hidden=hidden, vocabulary=vocabulary)
    return made


def linear(fewest: int, hidden: int, vocabulary: int, rounds: int, names: Names) -> list[dict[str, object]]:
    """The same step with more and more tokens; it has no rivals."""
    made: list[dict[str, object]] = []
    for tokens in (fewest * 2**i for i in range(5)):
        case = Case(tokens, hidden, vocabulary)
        found = in_turn({"klgrad lean": case.cleared(case.ours)}, rounds)
        # Without the gradients, whose memory necessarily grows with the tokens.
        for measured in found.values():
            measured.extra_bytes -= (case.h.numel() + case.w.numel()) * 2
        made += rows("tokens", found, {}, tokens=tokens, hidden=hidden, vocabulary=vocabulary)
        del case
        torch.cuda.empty_cache()
    return made


PARTS: dict[str, Callable[[int, int, int, int, Names], list[dict[str, object]]]] = {
    "exact": exact,
    "sampled": sampled,
    "linear": linear,
    "divergences": divergences,
}


def measured(part: str, given: argparse.Namespace) -> Iterator[list[dict[str, object]]]:
    """The rows of one part, shape by shape."""
    tokens, shapes = (64, TINY) if given.tiny else (8192, DIVERGENCE_SHAPES if part == "divergences" else SHAPES)
    if part == "linear":
        shapes, rounds = shapes[1:2], LINEAR_ROUNDS
    else:
        shapes, rounds = [shape for shape in shapes if given.hidden is None or shape[0] in given.hidden], given.rounds
    if part == "divergences" and not torch.cuda.is_available():
        tokens, rounds = min(tokens, CPU_TOKENS), min(rounds, CPU_ROUNDS)
    for shape in shapes:
        made = PARTS[part](tokens, *shape, rounds, given.rivals)
        yield [row | {"library": rivals.library(str(row["candidate"]))} for row in made]


def merged(earlier: list[dict[str, object]], made: list[dict[str, object]]) -> list[dict[str, object]]:
    """The earlier rows in their order, each replaced if it was measured again, and then the new ones."""
    # Read from a file, a size is a string.
    key = lambda row: (
        row["benchmark"],
        row["candidate"],
        *(str(row[size]) for size in ("tokens", "hidden", "vocabulary")),
    )
    return list(({key(row): row for row in earlier} | {key(row): row for row in made}).values())


def show(made: list[dict[str, object]]) -> None:
    for row in made:
        size = f"{row['tokens']} x {row['hidden']} x {row['vocabulary']}"
        print(
            f"{row['benchmark']:<16}{size:<24}{row['candidate']:<46}{row['median_ms']:>8} ms "
            f"[{row['p20_ms']}, {row['p80_ms']}]  {row['times_floor']:>6} x  {row['extra_gib']:>6} GiB"
            f"  {row['library']}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--hidden", type=int, nargs="+", choices=HIDDEN)
    parser.add_argument("--rivals", nargs="+")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    out = given.out or (RESULTS.parent.parent / "build" / "tiny" if given.tiny else RESULTS)
    for part in PARTS:
        if given.only in (None, part):
            start = time.perf_counter()
            on_cpu = part == "divergences" and not torch.cuda.is_available()
            made, file = [], out / f"kernels_{part}{'_cpu' if on_cpu else ''}.csv"
            earlier = read(file) if given.hidden or given.rivals else []
            for found in measured(part, given):
                show(found)
                made += found
                # After each shape, so that a run that is stopped early has rows too.
                write(merged(earlier, made), file)
            print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""Merge the states of a token's many tiles of 128 entries into a few, and write their marks, in Triton."""

# Triton compiles the kernel; it is not run as Python.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..state import FIELDS, LOWEST, NEAR

GROUPS, TOKENS, PARTS = 8, 32, 16
"""States of a token that are left; tokens of a program; states that it reads at a time."""


# A number that is 1 would be a constant of the compiler, which has no type.
@triton.jit(do_not_specialize=["parts"])
def _merge_kernel(
    states,
    out,
    marks,
    parts,
    per_program,
    tokens,
    mark_field,
    mark_stride,
    MARKS: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    LOWEST: tl.constexpr,
    NEAR: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < tokens
    first = tl.program_id(1) * per_program
    last = tl.minimum(first + per_program, parts)
    field = parts.to(tl.int64) * tokens
    high = tl.full((R,), LOWEST, tl.float32)
    ref_high = tl.full((R,), LOWEST, tl.float32)
    for i in range(first, last, P):
        part = i + tl.arange(0, P)
        live = (part < last)[:, None] & inside[None, :]
        at = states + part.to(tl.int64)[:, None] * tokens + rows[None, :]
        high = tl.maximum(high, tl.max(tl.load(at, mask=live, other=LOWEST), 0))
        ref_high = tl.maximum(ref_high, tl.max(tl.load(at + 3 * field, mask=live, other=LOWEST), 0))
    mass_sum = tl.zeros((R,), tl.float32)
    energy_sum = tl.zeros((R,), tl.float32)
    ref_mass_sum = tl.zeros((R,), tl.float32)
    gap_sum = tl.zeros((R,), tl.float32)
    ref_gap_sum = tl.zeros((R,), tl.float32)
    reverse_sum = tl.zeros((R,), tl.float32)
    forward_sum = tl.zeros((R,), tl.float32)
    for i in range(first, last, P):
        part = i + tl.arange(0, P)
        live = (part < last)[:, None] & inside[None, :]
        at = states + part.to(tl.int64)[:, None] * tokens + rows[None, :]
        top = tl.load(at, mask=live, other=LOWEST)
        ref_top = tl.load(at + 3 * field, mask=live, other=LOWEST)
        mass = tl.load(at + field, mask=live, other=0.0)
        energy = tl.load(at + 2 * field, mask=live, other=0.0)
        ref_mass = tl.load(at + 4 * field, mask=live, other=0.0)
        gap = tl.load(at + 5 * field, mask=live, other=0.0)
        ref_gap = tl.load(at + 6 * field, mask=live, other=0.0)
        if MARKS:
            mark = marks + rows.to(tl.int64)[None, :] * mark_stride + part[:, None]
            tl.store(mark, top, mask=live)
            tl.store(mark + mark_field, ref_top, mask=live)
            tl.store(mark + 2 * mark_field, gap / mass, mask=live)
        drop = top - high[None, :]
        ref_drop = ref_top - ref_high[None, :]
        p = tl.exp(drop)
        q = tl.exp(ref_drop)
        d = tl.where(live, drop - ref_drop, 0.0)
        square = d * d
        even = square * (1 / 2 + square * (1 / 24 + square * (1 / 720)))
        odd = square * d * (1 / 6 + square * (1 / 120 + square * (1 / 5040)))
        near = tl.abs(d) < NEAR
        reverse = tl.where(near, p * (even - odd), q - p + p * d)
        forward = tl.where(near, q * (even + odd), p - q - q * d)
        mass_sum += tl.sum(p * mass, 0)
        energy_sum += tl.sum(tl.where(live, p * (energy + drop * mass), 0.0), 0)
        ref_mass_sum += tl.sum(q * ref_mass, 0)
        gap_sum += tl.sum(p * (gap + d * mass), 0)
        ref_gap_sum += tl.sum(q * (ref_gap - d * ref_mass), 0)
        own_reverse = tl.load(at + 7 * field, mask=live, other=0.0)
        own_forward = tl.load(at + 8 * field, mask=live, other=0.0)
        reverse_sum += tl.sum(q * own_reverse + reverse * mass + (p - q) * gap, 0)
        forward_sum += tl.sum(p * own_forward + forward * ref_mass - (p - q) * ref_gap, 0)
    to = out + tl.program_id(1).to(tl.int64) * tokens + rows
    step = tl.num_programs(1).to(tl.int64) * tokens
    tl.store(to, high, mask=inside)
    tl.store(to + step, mass_sum, mask=inside)
    tl.store(to + 2 * step, energy_sum, mask=inside)
    tl.store(to + 3 * step, ref_high, mask=inside)
    tl.store(to + 4 * step, ref_mass_sum, mask=inside)
    tl.store(to + 5 * step, gap_sum, mask=inside)
    tl.store(to + 6 * step, ref_gap_sum, mask=inside)
    tl.store(to + 7 * step, reverse_sum, mask=inside)
    tl.store(to + 8 * step, forward_sum, mask=inside)


def merge(states: Tensor, marks: Tensor | None) -> Tensor:
    """Merge (9, parts, N) states, in which no entry is banned, into at most GROUPS, (FIELDS, groups, N).

    The states' maxima and means of d are written into `marks`, (3, N, parts), unless it is None.
    """
    _, parts, tokens = states.shape
    per_group = triton.cdiv(parts, GROUPS)
    groups = triton.cdiv(parts, per_group)  # no group is empty
    out = states.new_zeros(FIELDS, groups, tokens)
    grid = (triton.cdiv(tokens, TOKENS), groups)
    to = states if marks is None else marks  # a kernel needs a valid pointer even if it writes nothing
    sizes = (parts, per_group, tokens, *to.stride()[:2])
    _merge_kernel[grid](states, out, to, *sizes, marks is not None, PARTS, TOKENS, LOWEST, NEAR[torch.float32])
    return out

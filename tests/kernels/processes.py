"""The work of each process in `test_distributed.py`; a separate file, so that a new process can import it."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kernels.cases import SMALL_TILES, Case, make, weighted_sum
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from klgrad.kernels import hopper, tiling

WORLD = 2
CUTS = {"unequal": (13, 37), "the first small": (3, 47)}


DIVERGENCE = "jensen-shannon"


def the_case() -> Case:
    """The problem for one process."""
    return make((2, 4), 50, bias=True, ref_bias=True, policy={"softcap": 3.0, "temperature": 0.8})


def simple_case() -> Case:
    """A problem that the kernels for Hopper do, for one process."""
    return make((2, 4), 50, 16, entries=0, dtype=torch.bfloat16)


def part_of(case: Case, cut: tuple[int, int], rank: int) -> Case:
    """The same hidden states, and this rank's rows of both heads."""
    mine = slice(0, cut[0]) if rank == 0 else slice(cut[0], None)
    own = lambda h: replace(h, weight=h.weight[mine].clone(), bias=None if h.bias is None else h.bias[mine].clone())
    return replace(case, head=own(case.head), ref_head=own(case.ref_head))


def work(rank: int, folder: str) -> None:
    """Join the other process, compute everything, and write the results to a file."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD, timeout=limit)
    for name, value in SMALL_TILES.items():
        setattr(tiling, name, value)
    made = {"split": split_vocabulary(rank), "sharded": sharded_parameters(rank), "hopper": split_on_hopper(rank)}
    torch.save(made, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def outcome(case: Case, **options) -> dict:
    """Values and gradients."""
    case.require_grad()
    found = case.statistics(**options)
    gradients = torch.autograd.grad(weighted_sum(found), case.leaves)
    return {"values": [x.detach() for x in found if x is not None], "gradients": gradients}


def split_vocabulary(rank: int) -> dict:
    """Each way of splitting, and a target beyond all parts."""
    results = {}
    for name, cut in CUTS.items():
        results[name] = outcome(part_of(the_case(), cut, rank), group=dist.group.WORLD, divergence=DIVERGENCE)
    stray = part_of(the_case(), CUTS["unequal"], rank)
    stray.targets[0, 0] = 50
    try:
        stray.statistics(group=dist.group.WORLD)
    except ValueError as error:
        results["stray"] = str(error)
    return results


def split_on_hopper(rank: int) -> dict:
    """A split vocabulary with the formulas of the kernels for Hopper; nothing where Triton has no Gluon."""
    if not hopper._importable():
        return {}
    from kernels import on_torch

    calls = []
    with pytest.MonkeyPatch.context() as patch:
        on_torch.install(patch, calls)
        found = outcome(part_of(simple_case(), CUTS["unequal"], rank), group=dist.group.WORLD)
    return found | {"calls": len(calls)}


def tokens_of(case: Case, rank: int) -> Case:
    """This rank's share of the batch."""
    cut = lambda x: x[rank : rank + 1].clone()
    return replace(
        case,
        hidden=cut(case.hidden),
        targets=cut(case.targets),
        ref_hidden=cut(case.ref_hidden),
        entries=cut(case.entries),
    )


def sharded_parameters(rank: int) -> dict:
    """Weights sharded by FSDP2, and different tokens on every rank."""
    mesh = init_device_mesh("cpu", (WORLD,))
    shard = lambda x: distribute_tensor(x.detach(), mesh, [Shard(0)])
    case = tokens_of(the_case(), rank)
    held = lambda h: replace(h, weight=shard(h.weight), bias=shard(h.bias))
    result = outcome(replace(case, head=held(case.head), ref_head=held(case.ref_head)))
    hidden, *parameters = result["gradients"]
    assert all(g.placements == (Shard(0),) for g in parameters)
    whole = [g.full_tensor() for g in parameters]
    local = [g.to_local().shape[0] for g in parameters]
    return {"values": result["values"], "gradients": [hidden, *whole], "local": local}

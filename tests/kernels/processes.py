"""The work of each process in `test_distributed.py`; a separate file, so that a new process can import it."""

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from kernels.cases import SMALL_TILES, Case, make, weighted_sum
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from klgrad.kernels import tiling

WORLD = 2


def the_case() -> Case:
    """The problem for one process."""
    return make((2, 4), 50, bias=True, ref_bias=True, policy={"softcap": 3.0, "temperature": 0.8})


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


def outcome(case: Case) -> dict:
    """Values and gradients."""
    case.require_grad()
    found = case.statistics()
    gradients = torch.autograd.grad(weighted_sum(found), case.leaves)
    return {"values": [x.detach() for x in found if x is not None], "gradients": gradients}


def work(rank: int, folder: str) -> None:
    """Join the other process, compute with sharded weights and other tokens, and write the results to a file."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD, timeout=limit)
    for name, value in SMALL_TILES.items():
        setattr(tiling, name, value)
    mesh = init_device_mesh("cpu", (WORLD,))
    shard = lambda x: distribute_tensor(x.detach(), mesh, [Shard(0)])
    case = tokens_of(the_case(), rank)
    held = lambda h: replace(h, weight=shard(h.weight), bias=shard(h.bias))
    result = outcome(replace(case, head=held(case.head), ref_head=held(case.ref_head)))
    hidden, *parameters = result["gradients"]
    assert all(g.placements == (Shard(0),) for g in parameters)
    result["gradients"] = [hidden, *(g.full_tensor() for g in parameters)]
    result["local"] = [g.to_local().shape[0] for g in parameters]
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

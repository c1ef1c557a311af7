"""Two processes, over which FSDP2 has sharded the parameters."""

import pytest
import torch
import torch.distributed as dist
from kernels.processes import WORLD, outcome, the_case, tokens_of, work
from tolerances import EXACT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


def test_sharded_parameters_get_the_mean_gradient_of_all_ranks_tokens(tmp_path):
    """As FSDP does for every other parameter: each rank has a loss over its own tokens."""
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=WORLD)
    truth = [outcome(tokens_of(the_case(), rank)) for rank in range(WORLD)]
    for rank, alone in enumerate(truth):
        one = torch.load(tmp_path / f"{rank}.pt")
        for x, y in zip(one["values"], alone["values"], strict=True):
            EXACT.check(x, y)
        EXACT.check(one["gradients"][0], alone["gradients"][0])
        assert one["local"] == [25, 25]
        for i in (1, 2):
            EXACT.check(one["gradients"][i], sum(t["gradients"][i] for t in truth) / WORLD)

"""Two processes: a vocabulary split over them, and parameters sharded over them."""

import pytest
import torch
import torch.distributed as dist
from kernels.processes import CUTS, DIVERGENCE, WORLD, outcome, simple_case, the_case, tokens_of, work
from tolerances import BFLOAT16, EXACT, SINGLE

from klgrad.kernels import hopper

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of each process; they are started once, since importing torch takes time."""
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def test_a_split_vocabulary_gives_what_one_process_gives(ranks):
    truth = outcome(the_case(), divergence=DIVERGENCE)
    for name, cut in CUTS.items():
        found = [rank["split"][name] for rank in ranks]
        for one in found:
            for x, y in zip(one["values"], truth["values"], strict=True):
                EXACT.check(x, y)
            EXACT.check(one["gradients"][0], truth["gradients"][0])
        for i in (1, 2):  # weight and bias: each rank has the rows it holds
            parts = [one["gradients"][i] for one in found]
            assert [len(x) for x in parts] == list(cut)
            EXACT.check(torch.cat(parts), truth["gradients"][i])


@pytest.mark.skipif(not hopper._importable(), reason="there is no Triton with the parts of Gluon that are used")
def test_a_split_vocabulary_with_the_formulas_for_hopper(ranks):
    truth, found = outcome(simple_case().to(torch.float64)), [rank["hopper"] for rank in ranks]
    for one in found:
        assert one["calls"]
        for x, y in zip(one["values"][:5], truth["values"][:5], strict=True):
            SINGLE.check(x.double(), y)
        BFLOAT16.check_vector(one["gradients"][0].double(), truth["gradients"][0])
    BFLOAT16.check_vector(torch.cat([one["gradients"][1] for one in found]).double(), truth["gradients"][1])


def test_a_target_beyond_all_parts_is_refused(ranks):
    assert all("targets from 0 to 49" in rank["split"]["stray"] for rank in ranks)


def test_sharded_parameters_get_the_mean_gradient_of_all_ranks_tokens(ranks):
    """As FSDP does for every other parameter: each rank has a loss over its own tokens."""
    truth = [outcome(tokens_of(the_case(), rank)) for rank in range(WORLD)]
    for one, alone in zip((rank["sharded"] for rank in ranks), truth, strict=True):
        for x, y in zip(one["values"], alone["values"], strict=True):
            EXACT.check(x, y)
        EXACT.check(one["gradients"][0], alone["gradients"][0])
        assert one["local"] == [25, 25]
        for i in (1, 2):
            EXACT.check(one["gradients"][i], sum(t["gradients"][i] for t in truth) / WORLD)

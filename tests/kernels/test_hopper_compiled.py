"""The kernels for Hopper, compiled for an absent GPU, and the merging of their states by Triton's interpreter.

On a GPU, `test_hopper_gpu.py` and `test_gpu.py` check their numbers.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from klgrad.kernels import hopper
from klgrad.kernels.head import Transform
from klgrad.kernels.hopper import HopperOperands
from klgrad.kernels.tiling import MARKED, CachedLogits, Tile

if not hopper._importable():
    pytest.skip("there is no Triton with the parts of Gluon that are used", allow_module_level=True)
from klgrad.kernels.hopper import gluon

triton = pytest.importorskip("triton")
GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget

pytestmark = [
    pytest.mark.many,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),  # Triton 3.9 announces a default of 3.10
]
SHARED_MEMORY, REGISTERS = 227 * 1024, 64 * 1024
"""Of a multiprocessor of compute capability 9.0."""
SPILLED = {"sums": 0, "sums, kept": 64, "gradient": 32}
"""Most bytes of a thread's stack with Triton 3.9; Triton 3.6 needs none."""


class AbsentGPU:
    """What Triton asks its driver before it compiles."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    is_active = staticmethod(lambda: True)


@pytest.fixture
def absent_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGPU())  # reset_active() needs a GPU


def start(name, tokens=300, vocabulary=1001):
    """Call the function that starts a kernel."""
    new = lambda *shape, dtype=torch.bfloat16: torch.zeros(*shape, dtype=dtype)
    operands = (new(tokens, 200), new(vocabulary, 200), new(tokens, 64), new(vocabulary, 64))
    models = HopperOperands(*operands, (1.0, 0.7), new(tokens, dtype=torch.long), 0)
    if name == "gradient":
        gluon.gradient(models, new(7, tokens, dtype=torch.float32), new(tokens, 1024)[:, :vocabulary])
        return
    room = lambda: new(tokens, 1008, dtype=torch.float16)[:, :vocabulary]
    states, picked = new(9, 8, tokens, dtype=torch.float32), new(2, tokens, dtype=torch.float32)
    gluon.sums(models, states, picked, CachedLogits(room(), room()) if name == "sums, kept" else None)


@pytest.fixture(scope="module", params=SPILLED)
def compiled(request, tmp_path_factory):
    made = []
    compile_only = lambda kernel, models, *given: made.append(kernel.warmup(*given, num_warps=4, grid=(132,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(gluon, "_start", compile_only)
        patch.setattr(triton.runtime.driver, "_active", AbsentGPU())
        start(request.param)
    return SimpleNamespace(asm=made[0].asm, metadata=made[0].metadata, name=request.param)


def test_it_fits_into_a_multiprocessor(compiled):
    assert compiled.metadata.shared <= SHARED_MEMORY
    ptx = compiled.asm["ptx"]
    threads, at_start = (int(re.search(rf"\.{word} (\d+)", ptx)[1]) for word in ("reqntid", "maxnreg"))
    assert threads * at_start <= REGISTERS
    # One request for more than the groups have together, and setmaxnreg waits for ever.
    consumer, producer = gluon.CONSUMER, gluon.PRODUCER
    asked = {int(x) for x in re.findall(r"setmaxnreg\.\S+\s+(\d+);", ptx)}
    assert {consumer, producer} <= asked
    assert 128 * (2 * consumer + producer) <= threads * at_start


def stack(compiled, folder):
    """Bytes that a thread spills."""
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def test_next_to_nothing_is_spilled(compiled, tmp_path):
    allowed = 0 if triton.__version__.startswith("3.6.") else SPILLED[compiled.name]
    assert stack(compiled, tmp_path) <= allowed


@pytest.mark.parametrize("vocabulary", [4096, 4001])
@pytest.mark.usefixtures("absent_gpu")
def test_kept_logits_are_read_and_overwritten_16_bytes_at_a_time(vocabulary, monkeypatch, tmp_path):
    """The kernel that reads marks, as it is started; also for a vocabulary that 16 does not divide."""
    from klgrad.kernels import tiles_triton

    made = []
    compile_only = lambda kernel, tile, *given, **how: made.append(kernel.warmup(*given, **how, num_warps=4, grid=(1,)))
    monkeypatch.setattr(tiles_triton, "_launch", compile_only)
    room = lambda: torch.zeros(300, -(-vocabulary // 8) * 8, dtype=torch.float16)[:, :vocabulary]
    kept = CachedLogits(room(), room(), torch.zeros(3, 300, -(-vocabulary // MARKED)))
    one = Tile(0, vocabulary, torch.zeros(300).long(), None, None, None, None, Transform(), Transform())
    tiles_triton.gradient(
        one, torch.zeros(7, 300), torch.zeros(11, 8, 300), 0, kept, kept.a_or_minus_b.view(torch.bfloat16)
    )
    accesses = re.findall(r"(?:ld|st)\.global\S*\.(?:v\d\.)?b16|(?:ld|st)\.global\S*\.v4\.b32", made[0].asm["ptx"])
    assert len(accesses) == 3 * tiles_triton.SLICE // (4 * 32 * 8)  # two numbers read and one written, by 4 warps
    assert all(access.endswith("v4.b32") for access in accesses)
    assert stack(made[0], tmp_path) == 0


def test_a_loop_gives_back_the_stage_of_the_step_before(compiled):
    """A stage that the loop does not change is given back again and again, and the others never: the ring stops."""
    lines = compiled.asm["ttgir"].splitlines()
    found = [(m[1], i) for i, line in enumerate(lines) if (m := re.match(r"\s*(%\w+)(?::\d+)? = ", line))]
    # Groups of warps may use a name twice: the last definition before its use counts.
    defined = lambda name, use: max(i for n, i in found if n == name and i < use)
    loops = [i for i, line in enumerate(lines) if "scf.for" in line and "#mma" in line]
    assert len(loops) == 4  # two products of two consumers
    for start in loops:
        body = range(start, next(i for i in range(start, len(lines)) if "scf.yield" in lines[i]))
        freed = [defined(m[1], i) for i in body if (m := re.search(r"arrive_barrier (%\w+), ", lines[i]))]
        stages = [(m[1], i) for i in freed if (m := re.search(r"memdesc_index .*\[(%\w+)\]", lines[i]))]
        assert stages
        assert all(defined(stage, i) in body for stage, i in stages)


def test_a_store_waits_for_all_warps(compiled):
    """Between the last write into shared memory and its copy: a fence for the copy engine, then a barrier."""
    order = re.findall(
        r"(stmatrix|fence\.proxy\.async|bar\.sync|cp\.async\.bulk\.tensor\.2d\.global)", compiled.asm["ptx"]
    )
    stores = [i for i, word in enumerate(order) if word.endswith("global")]
    assert len(stores) == {"sums": 0, "sums, kept": 4, "gradient": 2}[compiled.name]
    for i in stores:
        assert order[i - 2 : i] == ["fence.proxy.async", "bar.sync"]
        assert order[i - 3] == "stmatrix"


@pytest.mark.parametrize(("parts", "tokens"), [(1187, 8192), (9, 300), (1, 1)])
@pytest.mark.usefixtures("absent_gpu")
def test_the_merging_compiles(parts, tokens, monkeypatch, tmp_path):
    """Also where a size is 1, which is a constant of the compiler."""
    made, kernel = [], gluon._merge_kernel

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given: made.append(kernel.warmup(*given, grid=grid))

    monkeypatch.setattr(gluon, "_merge_kernel", Kernel())
    for marks in (None, torch.zeros(3, tokens, parts)):
        gluon.merge(torch.zeros(9, parts, tokens), marks)
        assert stack(made[-1], tmp_path) == 0


def test_merged_states_are_those_of_torch():
    code = """
import torch
from klgrad.kernels import state
from klgrad.kernels.hopper import gluon
torch.manual_seed(0)
z = torch.randn(45, 8 * 37) * 5
for apart, count in ((0.02, 37), (3.0, 37), (3.0, 3), (0.02, 9), (3.0, 1)):
    z_ref = z + apart * torch.randn_like(z)
    cuts = range(0, 8 * count, 8)
    parts = torch.stack([state.of_logits(z[:, i:i + 8], z_ref[:, i:i + 8])[2] for i in cuts], 1)
    wide = torch.full((3, 45, count + 2), torch.nan)
    merged = gluon.merge(parts[:9].contiguous(), wide[:, :, 1:-1])
    assert merged.shape[1] <= gluon.GROUPS
    torch.testing.assert_close(wide[:, :, 1:-1].mT, torch.stack([parts[0], parts[3], parts[5] / parts[1]]))
    assert wide[:, :, [0, -1]].isnan().all()
    assert torch.equal(gluon.merge(parts[:9].contiguous(), None), merged)
    got = state.finish(state.merge(merged))
    for name, value in state.finish(state.merge(parts))._asdict().items():
        torch.testing.assert_close(getattr(got, name), value, rtol=2e-5, atol=1e-6, msg=lambda m: name + m)
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=200)

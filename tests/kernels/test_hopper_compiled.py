"""The kernels for Hopper, compiled for an absent GPU, and the merging of their states by Triton's interpreter.

A GPU checks their numbers: `test_gpu.py`.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),  # Triton 3.9 announces a default of 3.10
]
SHARED_MEMORY, REGISTERS = 227 * 1024, 64 * 1024
"""Of a multiprocessor of compute capability 9.0."""
SPILLED = {"sums": 0, "sums, kept": 64, "gradient": 32}
"""Most bytes of a thread's stack with Triton 3.9; Triton 3.6 needs none."""
POINTERS = {"targets": "*i64", "states": "*fp32", "picked": "*fp32", "numbers": "*fp32"}
FLOATS = ("factor", "ref_factor", "tiny", "limit")


def variant(name):
    """The kernel, the types of its descriptors, and its constants."""
    from klgrad.kernels.hopper import gradient, ring, sums

    given = {"WIDTH": ring.PART, "CONSUMER": ring.CONSUMER, "PRODUCER": ring.PRODUCER}
    operands = {"h": ("bf16", ring.ROWS, ring.DEPTH), "w": ("bf16", ring.COLUMNS, ring.DEPTH)}
    operands |= {f"{x}_ref": operands[x] for x in ("h", "w")}
    out = lambda dtype: (dtype, ring.ROWS // 2, ring.COLUMNS)
    if name == "gradient":
        return gradient.gradient_kernel, operands | {"out": out("bf16")}, given | {"STAGES": gradient.STAGES}
    if name == "sums":
        return sums.sums_kernel, operands, given | {"larger": None, "apart": None, "STAGES": sums.STAGES, "KEEP": False}
    kept = {"larger": out("fp16"), "apart": out("fp16")}
    return sums.sums_kernel, operands | kept, given | {"STAGES": sums.KEEPING_STAGES, "KEEP": True}


@pytest.fixture(scope="module", params=SPILLED)
def compiled(request, tmp_path_factory):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from klgrad.kernels.hopper import launch

    kernel, descriptors, constants = variant(request.param)
    kinds = POINTERS | dict.fromkeys(FLOATS, "fp32")
    kinds |= {name: f"tensordesc<{d}[{m}, {n}],{launch.SHARED!r}>" for name, (d, m, n) in descriptors.items()}
    names = [p.name for p in kernel.params]
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    given = {(names.index(name),): value for name, value in constants.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        source = GluonASTSource(fn=kernel, signature=signature, constexprs=given)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return SimpleNamespace(asm=made.asm, metadata=made.metadata, constants=constants, name=request.param)


def test_it_fits_into_a_multiprocessor(compiled):
    assert compiled.metadata.shared <= SHARED_MEMORY
    ptx = compiled.asm["ptx"]
    threads, at_start = (int(re.search(rf"\.{word} (\d+)", ptx)[1]) for word in ("reqntid", "maxnreg"))
    assert threads * at_start <= REGISTERS
    # One request for more than the groups have together, and setmaxnreg waits for ever.
    consumer, producer = compiled.constants["CONSUMER"], compiled.constants["PRODUCER"]
    asked = {int(x) for x in re.findall(r"setmaxnreg\.\S+\s+(\d+);", ptx)}
    assert {consumer, producer} <= asked
    assert 128 * (2 * consumer + producer) <= threads * at_start


def test_next_to_nothing_is_spilled(compiled, tmp_path):
    import triton

    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    allowed = 0 if triton.__version__.startswith("3.6.") else SPILLED[compiled.name]
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= allowed


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


def test_merged_states_are_those_of_torch():
    code = """
import torch
from klgrad.kernels import state
from klgrad.kernels.hopper import merge as merging
torch.manual_seed(0)
z = torch.randn(45, 8 * 37) * 5
for apart, count in ((0.02, 37), (3.0, 37), (3.0, 3), (0.02, 9)):
    z_ref = z + apart * torch.randn_like(z)
    cuts = range(0, 8 * count, 8)
    parts = torch.stack([state.of_logits(z[:, i:i + 8], z_ref[:, i:i + 8])[2] for i in cuts], 1)
    merged = merging.merge(parts[:9].contiguous())
    assert merged.shape[1] <= merging.GROUPS
    got = state.finish(state.merge(merged))
    for name, value in state.finish(state.merge(parts))._asdict().items():
        torch.testing.assert_close(getattr(got, name), value, rtol=2e-5, atol=1e-6, msg=lambda m: name + m)
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=200)

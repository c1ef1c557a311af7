"""The forward pass of `benchmarks/paired_forward.py`, compiled for an absent GPU, and the merging of its states.

A GPU checks its sums: `benchmarks/bench_fused_forward.py`.
"""

import importlib
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
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHARED_MEMORY, REGISTERS = 227 * 1024, 64 * 1024
"""Of a multiprocessor of compute capability 9.0."""
SPILLED = {128: 0, 192: 128}
"""Most bytes of a thread's stack, by columns of a tile. At 192 columns Triton 3.6 needs none, Triton 3.9 needs 72."""


@pytest.fixture(scope="module", params=["NARROW", "WIDE"])
def compiled(request, tmp_path_factory):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    sys.path.insert(0, str(BENCHMARKS))
    paired = importlib.import_module("paired_forward")
    shape = getattr(paired, request.param)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    operand = lambda rows: f"tensordesc<bf16[{rows}, {paired.DEPTH}],{layout!r}>"
    second = operand(shape.n2 or shape.n1)
    kinds = {"h": operand(paired.ROWS), "h_ref": operand(paired.ROWS), "states": "*fp32"}
    kinds |= {"w": operand(shape.n1), "w_ref": operand(shape.n1), "w2": second, "w_ref2": second}
    constants = {"BM": paired.ROWS, "N1": shape.n1, "N2": shape.n2, "BK": paired.DEPTH, "STAGES": shape.stages}
    constants |= {"LAG": shape.lag, "WIDTH": paired.PART, "CONSUMER": paired.CONSUMER, "PRODUCER": paired.PRODUCER}
    names = [p.name for p in paired._forward.params]
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    given = {(names.index(name),): value for name, value in constants.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        source = GluonASTSource(fn=paired._forward, signature=signature, constexprs=given)
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return SimpleNamespace(
        asm=kernel.asm,
        metadata=kernel.metadata,
        columns=shape.columns,
        registers=(paired.CONSUMER, paired.PRODUCER),
    )


def test_it_fits_into_a_multiprocessor(compiled):
    assert compiled.metadata.shared <= SHARED_MEMORY
    ptx = compiled.asm["ptx"]
    threads, at_start = (int(re.search(rf"\.{word} (\d+)", ptx)[1]) for word in ("reqntid", "maxnreg"))
    assert threads * at_start <= REGISTERS
    # One request for more than the groups have together, and setmaxnreg waits for ever.
    consumer, producer = compiled.registers
    asked = {int(x) for x in re.findall(r"setmaxnreg\.\S+\s+(\d+);", ptx)}
    assert {consumer, producer} <= asked
    assert 128 * (2 * consumer + producer) <= threads * at_start


def test_next_to_nothing_is_spilled(compiled, tmp_path):
    import triton

    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    assert int(re.search(r"STACK:(\d+)", usage)[1]) <= SPILLED[compiled.columns]


def test_a_loop_gives_back_the_stage_of_the_step_before(compiled):
    """A stage that the loop does not change is given back again and again, and the others never: the ring stops."""
    lines = compiled.asm["ttgir"].splitlines()
    defined = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(%\w+)(?::\d+)? = ", line))}
    loops = [i for i, line in enumerate(lines) if "scf.for" in line and "#mma" in line]
    assert len(loops) == 4  # two products of two consumers
    for start in loops:
        body = range(start, next(i for i in range(start, len(lines)) if "scf.yield" in lines[i]))
        freed = [m[1] for i in body if (m := re.search(r"arrive_barrier (%\w+), ", lines[i]))]
        stages = [re.search(r"\[(%\w+)\]", lines[defined[x]]) for x in freed if "memdesc_index" in lines[defined[x]]]
        assert stages
        assert all(stage and defined[stage[1]] in body for stage in stages)


def test_merged_states_are_those_of_torch():
    code = f"""
import sys; sys.path.insert(0, {str(BENCHMARKS)!r})
import torch, merged_states
from klgrad.kernels import state
torch.manual_seed(0)
z = torch.randn(45, 8 * 37) * 5
for apart in (0.02, 3.0):
    z_ref = z + apart * torch.randn_like(z)
    parts = torch.stack([state.of_logits(z[:, i:i + 8], z_ref[:, i:i + 8])[2] for i in range(0, z.shape[1], 8)], 1)
    got = state.finish(state.merge(merged_states.merge(parts[:9].contiguous(), groups=3)))
    for name, value in state.finish(state.merge(parts))._asdict().items():
        torch.testing.assert_close(getattr(got, name), value, rtol=2e-5, atol=1e-6, msg=lambda m: name + m)
h, w, targets, out = torch.randn(5, 200), torch.randn(30, 200), torch.randint(30, (5,)), torch.empty(5)
merged_states.pick(h, w, targets, out)
torch.testing.assert_close(out, (h * w[targets]).sum(-1), rtol=1e-5, atol=1e-5)
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=200)

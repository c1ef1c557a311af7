"""The Triton kernels on a machine without a GPU: run by the interpreter, and compiled for an absent GPU.

The first is `interpreted.py`, in a process where the interpreter is on before Triton is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.cases import GENERATORS
from some import first

FILE = Path(__file__).with_name("interpreted.py")
QUIET = ["-W", "ignore::RuntimeWarning"]  # numpy's, of infinities that a GPU passes over in silence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def test_the_kernels_do_what_torch_does():
    command = [sys.executable, "-m", "pytest", str(FILE), "-q", "-n", "0", "-p", "no:cacheprovider", *QUIET]
    environment, root = {**os.environ, "TRITON_INTERPRET": "1"}, FILE.parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


NUMBERS = ("scale", "cap", "inverse_temperature", "ref_scale", "ref_cap", "ref_inverse_temperature")
SWITCHES = dict.fromkeys(
    ("PAIRED", "BIAS", "REF_BIAS", "SOFTCAP", "REF_SOFTCAP", "KEEP", "EXTRA", "KEPT", "PLACES"), True
)
PARTS = tuple((0.1 * i, *part[1:]) for i, d in enumerate(GENERATORS) for part in d.parts)
"""Every generator."""
VARIANTS = {
    "everything": {},
    "nothing": dict.fromkeys(SWITCHES, False) | {"EVEN": True, "FINITE": True},
    "finite": {"FINITE": True, "BIAS": False, "REF_BIAS": False},
    "policy alone": {"PAIRED": False},
    "recomputed": {"KEPT": False, "KEEP": False},
    "marks": {"MARKED": 128},
    "divergences": {"PARTS": PARTS},
    "divergences, recomputed": {"PARTS": PARTS, "KEPT": False},
}


@pytest.mark.parametrize("variant", first(VARIANTS, 1))
@pytest.mark.parametrize("kernel", ["_statistics_kernel", "_divergence_kernel", "_gradient_kernel"])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces a default of 3.10
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")
def test_the_kernels_compile_for_cuda(kernel, variant, monkeypatch, tmp_path):
    """Errors that the interpreter does not detect: different types in branches, values that cannot be stored."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from klgrad.kernels import tiles_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(tiles_triton, kernel)
    given = {**SWITCHES, "TINY": 6e-5, "EVEN": False, "FINITE": False, "SLICE": tiles_triton.SLICE, "MARKED": 0}
    given["PARTS"] = ()
    names = [p.name for p in function.params]
    constants = {name: value for name, value in (given | VARIANTS[variant]).items() if name in names}
    kinds = {"targets_ptr": "*i64", "places_ptr": "*i64", "out_ptr": "*bf16"}
    kinds |= {"a_or_minus_b_ptr": "*fp16", "delta_ptr": "*fp16"}
    kinds |= dict.fromkeys(NUMBERS, "fp32")
    kind = lambda name: kinds.get(name, "*fp32" if name.endswith("_ptr") else "i32")
    constants["PARTS"] = tuple((weight, tiles_triton.KINDS[kind], x) for weight, kind, x in constants.get("PARTS", ()))
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiles_triton.WARPS})
    assert compiled.asm["cubin"]

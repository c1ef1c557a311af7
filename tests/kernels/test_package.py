"""The package for Hugging Face's `kernels` library; and the page and the benchmark agree with the code."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from some import first
from tolerances import SINGLE

import klgrad.kernels
from klgrad.kernels import Head, head, state, tiling, token_statistics

ROOT = Path(__file__).parent.parent.parent
LIBRARY = os.environ.get("KERNELS_LIBRARY")
"""A folder with the library, which cannot be in the path of these tests: their own folder is called `kernels`."""
SCRIPT = ROOT / "scripts" / "kernels_package.py"

LOAD = """
import importlib.abc, json, sys
from pathlib import Path
class WithoutKlgrad(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "klgrad":
            raise ImportError("the package must not need klgrad")
sys.meta_path.insert(0, WithoutKlgrad())
"""
BY_KERNELS = (
    LOAD
    + """
from kernels import get_local_kernel
loaded = get_local_kernel(Path(sys.argv[1]))
"""
)
BY_HAND = (
    LOAD
    + """
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("_by_its_id", Path(sys.argv[1]) / "build" / "torch-cuda" / "__init__.py")
loaded = sys.modules["_by_its_id"] = module_from_spec(spec)
spec.loader.exec_module(loaded)
"""
)
COMPUTE = """
import torch
generator = torch.Generator().manual_seed(0)
new = lambda *shape: torch.randn(*shape, generator=generator)
hidden, weight = new(6, 8).requires_grad_(), new(300, 8).requires_grad_()
found = token_statistics(hidden, Head(weight), torch.arange(6), new(6, 8), Head(new(300, 8)))
(found.logp + found.entropy + 2 * found.reverse_kl + 3 * found.forward_kl).sum().backward()
result = [x.tolist() for x in (found.reverse_kl, found.forward_kl, found.logp, hidden.grad, weight.grad)]
"""


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("kernels_package", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("klgrad-kernels")
    script.build(folder)
    return folder


def metadata(package):
    return [json.loads(path.read_text()) for path in sorted(package.glob("build/*/metadata.json"))]


def test_all_public_names_are_exported(script):
    assert script.public_names() == sorted(name for name in vars(klgrad.kernels) if _is_public(name))


def _is_public(name):
    value = getattr(klgrad.kernels, name)
    return not name.startswith("_") and not isinstance(value, type(klgrad))


def test_the_files_are_those_of_the_source(package, script):
    for variant in (package / "build").iterdir():
        copies = {path for path in variant.rglob("*.py") if path != variant / "__init__.py"}
        assert {path.relative_to(variant) for path in copies} == {
            path.relative_to(script.SOURCE) for path in script.files()
        }
        for copy in copies:
            assert copy.read_bytes() == (script.SOURCE / copy.relative_to(variant)).read_bytes()


def test_the_metadata_has_what_the_library_requires(package):
    for each in metadata(package):
        assert {"name", "id", "version", "license", "backend", "digest"} <= set(each)
        assert each["id"].isidentifier()
        variant = package / "build" / f"torch-{each['backend']['type']}"
        for name, digest in each["digest"]["files"].items():
            assert base64.b64encode(hashlib.sha256((variant / name).read_bytes()).digest()).decode() == digest
    assert len({each["id"] for each in metadata(package)}) == 2


def test_another_source_has_another_id(package, script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "INIT", script.INIT + "# changed\n")
    script.build(tmp_path)
    assert {each["id"] for each in metadata(tmp_path)}.isdisjoint(each["id"] for each in metadata(package))


def computed(package, loading, **environment):
    source = loading + "token_statistics, Head = loaded.token_statistics, loaded.Head\n" + COMPUTE
    command = [sys.executable, "-c", source + "print(json.dumps(result))", str(package)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    )
    assert done.returncode == 0, done.stderr
    return [torch.tensor(x) for x in json.loads(done.stdout.splitlines()[-1])]


def expected():
    names = {"token_statistics": token_statistics, "Head": Head}
    exec(COMPUTE, names)
    return [torch.tensor(x) for x in names["result"]]


def check(found):
    for mine, known in zip(found, expected(), strict=True):
        SINGLE.check_vector(mine, known)


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", first([False, True], 1))
def test_it_computes_the_same_without_klgrad(package, interpreted):
    """Triton's interpreter runs the kernels that a GPU runs."""
    if interpreted:
        pytest.importorskip("triton")
    check(computed(package, BY_HAND, TRITON_INTERPRET=str(int(interpreted))))


@pytest.mark.slow
@pytest.mark.skipif(not LIBRARY, reason="KERNELS_LIBRARY names no folder: `make kernels-package` sets it")
def test_the_library_loads_it(package):
    check(computed(package, BY_KERNELS, PYTHONPATH=str(LIBRARY)))


# The page.

PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
BENCHMARK = (ROOT / "benchmarks" / "bench_kernels.py").read_text(encoding="utf-8")


def test_the_usage_line_names_the_options_that_there_are():
    usage = BENCHMARK.split('"""')[1]
    assert set(re.findall(r"\[(--\w+)", usage)) == set(re.findall(r'add_argument\("(--\w+)"', BENCHMARK))


def test_the_page_names_the_number_of_rounds():
    """That of the other tables stands below each."""
    linear = re.search(r"^LINEAR_ROUNDS = (\d+)$", BENCHMARK, re.MULTILINE)[1]
    assert f"and {linear} in the table by number of tokens" in PAGE


def test_the_page_names_the_number_of_sums():
    maxima = [name for name in state.State._fields if name.endswith("top")]
    assert (len(maxima), state.FIELDS - len(maxima)) == (2, 9)
    assert "11 numbers per token and slice: two maxima and nine sums" in PAGE
    assert state.FIELDS == len(state.State._fields) == 11


def test_the_page_names_tile_and_budget():
    assert f"({tiling.STRIP} tokens x {tiling.WIDTH} entries)" in PAGE
    assert f"has {tiling.LEAN_BUDGET >> 30} GiB" in PAGE


def test_the_page_names_a_refused_family():
    assert "chameleon" in head.REFUSED
    assert "Chameleon" in PAGE

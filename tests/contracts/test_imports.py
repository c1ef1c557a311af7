"""The core, the kernels and the audit need torch alone; import-linter checks what may import what."""

import subprocess
import sys

import pytest

BLOCKED_IMPORT = """
import sys
from importlib.metadata import packages_distributions, requires
from packaging.requirements import Requirement

def closure(name, seen):
    if name not in seen:
        seen.add(name)
        for line in requires(name) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                closure(need.name.lower().replace("_", "-"), seen)
    return seen

allowed = {n.replace("_", "-") for n in closure("torch", set())} | {"klgrad"}
blocked = {
    module for module, owners in packages_distributions().items()
    if not any(owner.lower().replace("_", "-") in allowed for owner in owners)
}
assert {"typer", "rich", "numpy", "matplotlib", "pytest"} <= blocked, blocked
for name in [m for m in sys.modules if m.split(".")[0] in blocked]:
    del sys.modules[name]

class Hide:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hide, sys.meta_path)
import warnings
warnings.simplefilter("error")  # also that of torch: numpy is missing
import klgrad
assert "klgrad.audit" not in sys.modules  # a part is imported when it is used
klgrad.audit
import klgrad.enumeration, klgrad.kernels, klgrad.logs.reader, torch  # pyarrow is needed when a log is read
logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
klgrad.KLTerm()(klgrad.Rollout(logp, logp - 1, torch.ones(1, 2))).loss.backward()
assert logp.grad is not None
assert klgrad.audit.audit(klgrad.KLTerm()).verdict == "reverse-kl-sequence"
hidden, head = torch.ones(1, 2, 4, requires_grad=True), klgrad.kernels.Head(torch.ones(5, 4))
found = klgrad.kernels.token_statistics(hidden, head, torch.zeros(1, 2, dtype=torch.long), hidden.detach(), head)
klgrad.KLTerm(estimator="exact")(found.rollout(torch.ones(1, 2))).loss.backward()
assert hidden.grad is not None
print("core needs torch alone")
"""


@pytest.mark.slow
def test_the_core_the_kernels_and_the_audit_need_torch_alone():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "core needs torch alone\n", done.stderr

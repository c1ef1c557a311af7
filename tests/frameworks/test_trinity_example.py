"""`examples/trinity` with Trinity-RFT's own files: what it descends, by the audit."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from klgrad.audit import audit
from klgrad.audit.subject import Subject
from klgrad.frameworks import FRAMEWORKS

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.skipif(FRAMEWORKS["trinity"].installed is None, reason="Trinity-RFT is not installed"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "trinity" / "declared_kl.py"
SUM = "seq-mean-token-sum"


class Registry(dict):
    """In the place of Trinity's: its package does not import here without vLLM and more."""

    def register_module(self, name):
        return lambda kind: self.setdefault(name, kind)


@pytest.fixture
def example(monkeypatch):
    from klgrad.frameworks.functions import trinity_functions
    from klgrad.frameworks.harness import load

    package: Any = ModuleType("trinity.algorithm.kl_fn")
    package.KLFn, package.KL_FN = trinity_functions().KLFn, Registry()
    utils = load("trinity-rft", "trinity/algorithm/utils.py")
    for name, module in {
        "trinity": ModuleType("trinity"),
        "trinity.algorithm": ModuleType("trinity.algorithm"),
        "trinity.algorithm.kl_fn": package,
        "trinity.algorithm.utils": utils,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("declared_kl", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, package.KL_FN


def test_it_is_the_declared_kl_on_and_off_policy(example, monkeypatch):
    from klgrad import ImportanceWeighting, KLTerm

    module, registry = example
    # The bound of the example adds bias; without it the audit finds the target off-policy too.
    monkeypatch.setattr(module, "OFF_POLICY", KLTerm(weighting=ImportanceWeighting("prefix", None)))
    kl = registry["klgrad"](kl_coef=1.0)

    def loss(batch):
        return kl.calculate_kl_loss(batch.logp, batch.ref_logp, batch.mask, SUM, batch.old_logp)[0]

    found = audit(Subject("trinity klgrad", "framework", loss, framework="trinity", stacks=True))
    assert (found.verdict, found.verdict_off_policy) == ("reverse-kl-sequence", "reverse-kl-sequence")


def test_it_is_refused_as_a_reward(example):
    with pytest.raises(NotImplementedError, match="kl_loss_fn"):
        example[1]["klgrad"]().calculate_kl(None, None)

"""The configurations of `examples/verl`, composed and checked by verl's own code."""
# pyright: reportMissingImports=false

from pathlib import Path

import pytest
import tiny
from on_verl.configuration import HAS_TRAINERS

EXAMPLES = Path(__file__).parents[2] / "examples" / "verl"
FILES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRAINERS, reason="verl with TransferQueue is not installed"),
]


def loaded(name):
    import hydra

    with hydra.initialize_config_dir(str(EXAMPLES), version_base=None):
        return hydra.compose(name, overrides=[f"actor_rollout_ref.model.path={tiny.folder()}"])


def test_there_are_examples():
    assert FILES == ["distillation", "multi_node"]


@pytest.mark.parametrize("name", FILES)
def test_verl_builds_the_trainer_of_it(name):
    from klgrad.verl.trainers import KLTrainerSync

    trainer = KLTrainerSync(loaded(name))
    trainer._init_resource_pool_mgr()
    assert trainer.use_reference_policy == (name == "multi_node")
    expected = {
        "multi_node": "reverse-sequence-k1-prefix-ratio-truncate2",
        "distillation": "reverse-token-k1-prefix-ratio-truncate2",
    }
    assert trainer.declaration.term.name == expected[name]


def test_the_workers_of_two_nodes_are_asked_for():
    from klgrad.verl.trainers import KLTrainerSync

    trainer = KLTrainerSync(loaded("multi_node"))
    trainer._init_resource_pool_mgr()
    assert trainer.resource_pool_manager.resource_pool_spec["global_pool"] == [8, 8]

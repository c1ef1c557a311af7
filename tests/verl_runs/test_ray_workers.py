"""verl's workers with klgrad in Ray processes: one is killed, and another one is started in its place."""
# pyright: reportMissingImports=false

import subprocess
import sys

import pytest
from on_verl.configuration import HAS_TRAINERS
from on_verl.whole_runs import environment

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.many,
    pytest.mark.skipif(not HAS_TRAINERS, reason="verl with TransferQueue is not installed"),
]

KILLED = """
import os
import ray, tiny
from on_verl.configuration import composed
from on_verl.whole_runs import model_overrides
from omegaconf import open_dict

kept = ("PYTHONPATH", "VERL_USE_EXTERNAL_MODULES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
variables = {name: os.environ[name] for name in kept}
ray.init(num_cpus=4, resources={"NPU": 2}, include_dashboard=False, runtime_env={"env_vars": variables})
from klgrad.errors import ActivationError
from klgrad.verl.handshake import check_status, expected_status
from klgrad.verl.declaration import term_of
from klgrad.verl.handshake import to_worker_node
from klgrad.verl.trainers import KLActorWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

declaration = term_of({"level": "token"})
config = composed(*model_overrides(tiny.folder()))
with open_dict(config):
    config.actor_rollout_ref["klgrad"] = to_worker_node(declaration)

def start():
    made = RayClassWithInitArgs(ray.remote(KLActorWorker), config=config.actor_rollout_ref, role="actor")
    pool = RayResourcePool([1], max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")

def check(group):
    try:
        check_status(expected_status(declaration), group.klgrad_status())
        return "active"
    except (ActivationError, ray.exceptions.RayActorError) as error:
        return f"{type(error).__name__} {error}"

group = start()
group.init_model()
print("1:", check(group))
ray.kill(group.workers[0])
print("2:", check(group).split()[0])
del group
again = start()
print("3:", check(again))
again.init_model()
print("4:", check(again))
"""


def test_a_killed_worker_stops_the_run_and_another_one_is_refused_until_it_has_the_loss():
    """verl lets no worker restart by itself: Ray no longer has the arguments of its constructor."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment(),
    )
    said = done.stdout + done.stderr
    assert "1: active\n" in said, said
    assert "2: ActorDiedError\n" in said, said
    assert "3: ActivationError expected klgrad active in every worker (declaration:" in said, said
    assert "4: active\n" in said, said

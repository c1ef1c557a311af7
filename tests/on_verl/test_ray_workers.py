"""verl's workers with klgrad in Ray processes: one is killed and started again, as Ray does."""
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
import os, time
import ray, tiny
from on_verl.configuration import composed
from on_verl.whole_runs import model_overrides
from omegaconf import open_dict

kept = ("PYTHONPATH", "VERL_USE_EXTERNAL_MODULES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
variables = {name: os.environ[name] for name in kept}
ray.init(num_cpus=4, resources={"NPU": 1}, include_dashboard=False, runtime_env={"env_vars": variables})
from klgrad.errors import ActivationError
from klgrad.verl.active import check_status, expected
from klgrad.verl.declaration import term_of
from klgrad.verl.sent import sent
from klgrad.verl.workers import KLActorWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

declaration = term_of({"level": "token"})
config = composed(*model_overrides(tiny.folder()))
with open_dict(config):
    config.actor_rollout_ref["klgrad"] = sent(declaration)
made = RayClassWithInitArgs(ray.remote(KLActorWorker), config=config.actor_rollout_ref, role="actor")
made.update_options({"max_restarts": 1, "max_task_retries": 0})
pool = RayResourcePool([1], max_colocate_count=1)
group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")

def check():
    check_status(expected(declaration), group.klgrad_status())

group.init_model()
check()
before = group.klgrad_status()[0]["where"]
ray.kill(group.workers[0], no_restart=False)
for _ in range(60):
    try:
        check()
        print("active without a model")
        break
    except ActivationError as error:
        print("refused:", error)
        break
    except ray.exceptions.RayError:
        time.sleep(1)
group.init_model()
check()
print("another process:", group.klgrad_status()[0]["where"] != before)
print("active again")
"""


def test_a_worker_that_is_killed_is_refused_until_it_is_set_up_and_then_active():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment(),
    )
    assert "refused: expected klgrad active in every worker (declaration:" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("another process: True\nactive again\n"), done.stdout + done.stderr

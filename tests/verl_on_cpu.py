"""What verl lacks to run without an accelerator: a platform, and a rollout server. A stub, written for the tests.

verl imports this module in every process where VERL_USE_EXTERNAL_MODULES names it. The platform stands for a device
that is the CPU; the rollout server samples with transformers, one request at a time, and has the actor's weights after
each update. Trainer, workers, FSDP engine, losses, TransferQueue, agent loop and rewards are verl's own.
"""
# pyright: reportMissingImports=false

import asyncio
import contextlib
import types
from typing import Any

import torch
import torch.distributed

SLOT = "NPU"
"""The Ray resource that stands for an accelerator; verl counts those of the names GPU and NPU."""


def device_module():
    """`torch.cpu` with the functions of `torch.cuda` that verl calls."""
    module: Any = types.ModuleType("torch_cpu_as_device")
    module.__dict__.update(vars(torch.cpu))
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *_: 0)
    for name in ("empty_cache", "set_device", "synchronize", "reset_peak_memory_stats", "ipc_collect", "manual_seed"):
        setattr(module, name, lambda *_, **__: None)
    module.mem_get_info = lambda *_: (1, 1)
    module.is_available = lambda: False
    module.current_device = lambda: "cpu"
    module.get_device_name = lambda *_: "CPU"
    return module


def make_platform():
    from verl.plugin.platform.platform_base import PlatformBase

    answers = {
        "device_name": property(lambda _: "cpu"),
        "vendor_name": property(lambda _: "cpu"),
        "device_module": property(lambda _: MODULE),
        "is_available": lambda _: True,
        "current_device": lambda _: "cpu",
        "device_count": lambda _: 1,
        "communication_backend_name": lambda _: "gloo",
        "visible_devices_envvar": lambda _: "KLGRAD_NO_DEVICES",
        "get_device_capability": lambda _, index=0: (None, None),
        "nvtx_range": lambda _, msg: contextlib.nullcontext(),
        "ray_resource_name": lambda _: SLOT,
        "ray_noset_envvars": lambda _: [],
        "is_ipc_supported": lambda _: False,
        "cudart": lambda _: None,
    }
    idle = {name: lambda *_, **__: None for name in PlatformBase.__abstractmethods__ if name not in answers}
    return type("PlatformCPU", (PlatformBase,), answers | idle)()


def without_duplicates(init):
    """verl asks for `cpu:gloo,<device>:<backend>`, which names the CPU twice here."""

    def wrapped(backend=None, *args, **kwargs):
        return init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    return wrapped


class Server:
    """A Ray actor that samples with transformers, and returns the log-prob of each token."""

    def __init__(self, path):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.end = self.model.config.eos_token_id
        self.step = 0

    def update(self, weights, step):
        self.model.load_state_dict(weights, strict=False)
        self.step = step

    @torch.no_grad()
    def generate(self, prompt_ids, sampling_params, **_):
        from verl.workers.rollout.replica import TokenOutput

        tokens, logps = [], []
        for _ in range(sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or 6):
            logits = self.model(torch.tensor([prompt_ids + tokens])).logits[0, -1]
            logp = torch.log_softmax(logits.double(), -1)
            token = int(torch.multinomial(logp.exp(), 1))
            tokens.append(token)
            logps.append(float(logp[token]))
            if token == self.end:
                break
        return TokenOutput(
            token_ids=tokens, log_probs=logps, stop_reason="completed", extra_fields={"global_steps": self.step}
        )

    def nothing(self, *_, **__):
        pass

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


def server_name(rank):
    return f"klgrad_test_server_{rank}"


def make_replica():
    import ray
    from verl.workers.rollout.replica import RolloutReplica

    class Replica(RolloutReplica):
        async def launch_servers(self):
            made = ray.remote(Server).options(name=server_name(self.replica_rank), num_cpus=0)
            self._server_handle = made.remote(self.model_config.path)
            self._server_address = f"stub:{self.replica_rank}"
            self.servers = [self._server_handle]

    return Replica


class Adapter:
    """verl's side of the server in a worker: it sends the weights."""

    def __init__(self, config, model_config, device_mesh, **_):
        pass

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **_):
        import ray

        kept = {name: x.detach().to("cpu", torch.float32).clone() for name, x in weights}
        rank = torch.distributed.get_rank()
        await asyncio.wrap_future(ray.get_actor(server_name(rank)).update.remote(kept, global_steps).future())


def install():
    from verl.plugin.platform.platform_manager import set_platform

    torch.distributed.init_process_group = without_duplicates(torch.distributed.init_process_group)
    torch.Tensor.pin_memory = lambda self, device=None: self  # there is no device to pin memory for
    set_platform(make_platform())
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    base._ROLLOUT_REGISTRY["stub", "async"] = f"{__name__}.Adapter"
    RolloutReplicaRegistry.register("stub", make_replica)


MODULE = device_module()
install()

"""`python -m verl.trainer.main_ppo` on a tiny model, without an accelerator; `verl_on_cpu.py` says what is a stub."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import tiny

TESTS = Path(__file__).parent.parent
SOURCE = TESTS.parent / "src"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(solution_str.split().count(ground_truth)) + 0.01 * len(solution_str)
"""
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))


def environment(**more):
    found = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", **more}
    return {**os.environ, **found, "PYTHONPATH": f"{SOURCE}:{TESTS}"}


def model_overrides(model):
    """The actor and the reference, on a CPU."""
    return [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        f"{ROLLOUT}.name=stub",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.agent.num_workers=1",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        f"{REF}.log_prob_micro_batch_size_per_gpu=4",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.optim.lr=1e-2",
        *(f"{part}.strategy=fsdp2" for part in (ACTOR, REF)),
        *(f"{part}.fsdp_config.model_dtype=fp32" for part in (ACTOR, REF)),
        *(f"{part}.fsdp_config.dtype=float32" for part in (ACTOR, REF)),
        "trainer.device=cpu",
    ]


def data_overrides(folder):
    import pandas

    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    shutil.copytree(tiny.folder(), folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"w{i} w{(7 * i) % 30}"}],
            "data_source": "tiny",
            "reward_model": {"style": "rule", "ground_truth": "w5"},
            "extra_info": {"index": i},
        }
        for i in range(16)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    return [
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'train.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "data.dataloader_num_workers=0",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "reward.num_workers=1",
    ]


def main_ppo(folder, *overrides, workers=1, seconds=400, **variables):
    """A run of verl's own command; its output as one text."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo"),
        *data_overrides(folder),
        *model_overrides(folder / "model"),
        "algorithm.adv_estimator=grpo",
        "critic.enable=false",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.n_gpus_per_node={workers}",
        "trainer.val_before_train=false",
        "trainer.logger=[console]",
        "trainer.resume_mode=disable",
        "ray_kwargs.ray_init.num_cpus=12",
        "+ray_kwargs.ray_init.include_dashboard=false",
        f"+ray_kwargs.ray_init.resources.NPU={workers}",
        *overrides,
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=seconds,
    )
    return done.returncode, done.stdout


def steps(output):
    """The metrics of each step that verl's console logger printed."""
    lines = re.findall(r"step:(\d+) - (.*)", output)
    number = r"([\w/.@+-]+):(?:np\.float64\()?(-?[\d.]+(?:e-?\d+)?|nan|inf)"
    return [{name: float(value) for name, value in re.findall(number, line)} for _, line in lines]

"""The configurations in `examples/`, as far as they can be built without the hardware that they are for."""

from pathlib import Path

import pytest
import yaml

from klgrad.training.data import is_dataset, load_reward
from klgrad.training.settings import parse
from klgrad.trl.config import notes

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = sorted(EXAMPLES.glob("train-*.yaml"))
PAIRS = {
    "train-7b-fsdp2": ("accelerate-fsdp2", 8),
    "train-7b-zero3": ("accelerate-zero3", 8),
    "train-7b-nodes-vllm": ("accelerate-nodes", 32),
}
DISTILLATION = EXAMPLES / "distill-7b-fsdp2.yaml"
HERE = ("--use_cpu", "--bf16", "false")
"""This machine has no GPU, and TRL checks."""

pytestmark = [pytest.mark.filterwarnings("ignore")]


def test_every_example_is_tested():
    assert {path.stem for path in RUNS} == set(PAIRS)
    assert list(EXAMPLES.glob("distill-*.yaml")) == [DISTILLATION]
    assert {path.stem for path in EXAMPLES.glob("accelerate-*.yaml")} == {name for name, _ in PAIRS.values()}


@pytest.mark.parametrize("name", PAIRS)
def test_a_run_is_what_its_comments_say(name):
    settings = parse("train", ["--config", str(EXAMPLES / f"{name}.yaml"), *HERE])
    training, (launcher, processes) = settings.training, PAIRS[name]
    term = training.objective.term
    assert (term.divergence, term.level, term.baseline, term.weighting.ratio) == (
        "reverse", "sequence", "leave_one_out", "prefix",
    )  # fmt: skip
    completions = processes * training.per_device_train_batch_size * training.gradient_accumulation_steps
    text = (EXAMPLES / f"{name}.yaml").read_text()
    assert f"= {completions} completions an update: {completions // training.num_generations} prompts of 8" in text
    assert training.use_vllm
    assert training.vllm_mode == ("server" if "nodes" in name else "colocate")
    if settings.run.accelerate_config is not None:
        assert Path(settings.run.accelerate_config).stem == launcher
    assert yaml.safe_load(text)["bf16"] is True
    assert callable(load_reward(settings.run.reward))
    assert is_dataset(settings.run.task)


def test_the_distillation_is_what_its_comments_say():
    settings = parse("distill", ["--config", str(DISTILLATION), *HERE])
    training, text = settings.training, DISTILLATION.read_text()
    assert (settings.run.reward, training.kl_coef, training.num_iterations) == (None, 1.0, 2)
    assert training.objective.term.descends.off_policy == "reverse-kl-token-sampler"
    assert notes(training) == []
    completions = 8 * training.per_device_train_batch_size * training.gradient_accumulation_steps
    assert f"= {completions} completions an update: {completions // training.num_generations} prompts of 2" in text
    assert Path(settings.run.accelerate_config or "").stem == "accelerate-fsdp2"
    assert is_dataset(settings.run.task)


def launched(name):
    """What `accelerate launch` makes of a configuration: its arguments, and the environment of each process."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    parser = launch_command_parser()
    args = parser.parse_args(["--config_file", str(EXAMPLES / f"{name}.yaml"), "-m", "klgrad"])
    args, config, _ = _validate_launch_command(args)
    assert isinstance(config, ClusterConfig)
    args.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config or {})
    environment = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return args, config, environment


@pytest.mark.parametrize(("name", "processes"), dict(PAIRS.values()).items())
def test_accelerate_takes_it(name, processes, monkeypatch):
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    args, config, environment = launched(name)
    assert config.num_processes == processes
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert args.num_machines == (4 if "nodes" in name else 1)
    assert args.use_fsdp == ("zero3" not in name)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    if args.use_fsdp:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is True
        assert "SHARDED" in str(plugin.state_dict_type)
    else:
        plugin = DeepSpeedPlugin()
        assert plugin.zero_stage == 3
        assert plugin.deepspeed_config["zero_optimization"]["stage"] == 3

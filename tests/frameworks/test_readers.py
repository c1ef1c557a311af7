"""`klgrad advise --config` by transcribed formulae: which KLs are on, what is never read, and what to change.

The excerpts have the keys and values of files in the frameworks' own repositories, which are named beside them.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import RunFileError
from klgrad.frameworks import READERS
from klgrad.frameworks.run_file import find, read_run


@pytest.fixture
def leads_to_its_target(changed):
    """Every KL of the changed run descends the target, in large batches or in every one."""

    def check(run):
        after = changed(run)
        assert after.parts
        assert not [change for change in after.changes if not change.optional]
        for found in find(after):
            assert (found.verdict, found.holds) in ((run.target, "always"), (run.target, "large-batches")), found.words

    return check


def places(run):
    return [(part.place, part.coefficient) for part in run.parts]


def shown(path):
    return CliRunner().invoke(app, ["advise", "--config", str(path)]).stdout


# slime

SLIME = "python3 train.py --hf-checkpoint m --ref-load m --rollout-batch-size 32 --n-samples-per-prompt 8 "


def test_a_script_of_slime_with_a_kl_in_the_loss(read):
    """THUDM/slime examples/search-r1/run_qwen2.5_3B.sh: arrays, behind `ray job submit`."""
    script = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/../../scripts/models/qwen2.5-3B.sh"
ROLLOUT_ARGS=(--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
)
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py --colocate ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} \\
   --hf-checkpoint Qwen/Qwen2.5-3B ${GRPO_ARGS[@]}
"""
    run = read(script)
    assert (run.framework, places(run)) == ("slime", [("loss", 0.001)])
    assert run.stale == ["sampled with SGLang, whose log-probs differ from those of the trainer"]
    assert run.notes == ["What is in ${MODEL_ARGS[@]} is not read: it is no setting of a KL by convention."]
    assert {c.name: c.value for c in run.changes} == {
        "kl_loss_type": "k3",
        "use_unbiased_kl": True,
        "calculate_per_token_loss": True,
    }


def test_kls_of_slime_that_are_never_read_or_only_logged(read, tmp_path):
    """THUDM/slime tests/test_gspo.sh sets kl-coef and kl-loss-coef with gspo, both 0 there."""
    run = read(f"{SLIME}--advantage-estimator gspo --kl-loss-type low_var_kl --kl-coef 0.1")
    assert (run.parts, list(run.unread)) == ([], ["kl_coef"])
    said = shown(tmp_path / "run.sh")
    assert "This run has no KL to a reference.\nkl_coef is set and never read: the advantages of gspo" in said
    assert "\n--use-kl-loss  # was false" in said
    both = read(f"{SLIME}--kl-loss-coef 0.1 --use-unbiased-kl")
    assert list(both.unread) == ["kl_loss_coef", "use_unbiased_kl"]
    assert read(f"{SLIME}--kl-coef 0.1 --advantage-estimator ppo").unread == {}
    # THUDM/slime scripts/run-qwen3-4B.sh has use-kl-loss with a coefficient of 0.00.
    logged = read(f"{SLIME}--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl")
    assert logged.parts == []
    assert "the KL logged, and nothing is descended" in logged.notes[0]


def test_a_rollout_of_slime_is_distilled_or_stale(read):
    """THUDM/slime examples/on_policy_distillation/run-qwen3-8B-opd.sh and scripts/run-deepseek-r1.sh."""
    run = read(f"{SLIME}--use-opd --opd-type sglang --opd-kl-coef 1.0 --use-kl-loss --kl-loss-coef 0.00")
    assert places(run) == [("advantage", 1.0)]
    assert [change.name for change in run.changes] == ["calculate_per_token_loss"]
    assert "num_steps_per_rollout=4" in read(f"{SLIME}--num-steps-per-rollout 4").stale[0]
    above = "rollout_batch_size=32 times n_samples_per_prompt=8 above global_batch_size=64"
    assert above in read(f"{SLIME}--global-batch-size 64").stale[0]


NEMO = "loss_fn:\n  reference_policy_kl_penalty: 0.01\n"
WHITENED = "--normalize-advantages --advantage-estimator"
LOSSES = [
    *(f"--kl-loss-type {x}{more}" for x in ("k1", "k2", "k3", "low_var_kl") for more in ("", " --use-unbiased-kl")),
    *("--advantage-estimator ppo", f"--kl-loss-type k3 {WHITENED} ppo", f"{WHITENED} reinforce_plus_plus"),
]
RECIPES = [
    "",
    "  reference_policy_kl_type: k2\n",  # NVIDIA-NeMo/RL examples/configs/prorlv2.v2.yaml
    "  token_level_loss: false\n",
    "  use_on_policy_kl_approximation: true\n",
    "  use_kl_in_reward: true\n",
    "  use_kl_in_reward: true\ngrpo:\n  adv_estimator:\n    name: reinforce_plus_plus\n",
]


@pytest.mark.slow
@pytest.mark.parametrize("more", [*LOSSES, *RECIPES])
def test_the_changes_lead_to_the_reverse_kl(read, leads_to_its_target, more):
    in_reward = "--advantage-estimator" in more
    coefficient = "--kl-coef 0.01 " if in_reward else "--use-kl-loss --kl-loss-coef 0.01 "
    run = read(f"{SLIME}{coefficient}{more}") if more in LOSSES else read(NEMO + more, "run.yaml")
    assert more in RECIPES or run.target == ("reverse-kl-sequence" if in_reward else "reverse-kl-token")
    leads_to_its_target(run)


@pytest.mark.slow
def test_a_baseline_of_slime_has_a_kl_of_single_tokens(read):
    run = read(SLIME + "--kl-coef 0.01 --advantage-estimator reinforce_plus_plus_baseline --normalize-advantages")
    assert run.target == "reverse-kl-token"
    (found,) = find(run)
    assert "looks ahead" in dict(found.parts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kl-loss-type k4", "kl_loss_type as one of k1, k2, k3, low_var_kl"),
        ("--custom-advantage-function-path my.py:f", "custom_advantage_function_path as one of"),
        ("--kl-loss-coef $BETA", r"give it by --set kl_loss_coef=VALUE"),
        ("--kl-penalty 0.1", "kl_penalty, which may be of a KL"),
        ("--colocate ${MORE_ARGS[@]}", r"what is in \$\{MORE_ARGS\[@\]\} is not read"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(flags, message, read):
    with pytest.raises(RunFileError, match=message):
        read(SLIME + flags)


# NeMo-RL


def test_a_recipe_of_nemo_rl_and_those_that_it_builds_on(tmp_path, read):
    """NVIDIA-NeMo/RL examples/configs/grpo_math_8B.yaml: `defaults: "grpo_math_1B.yaml"`, whose KL it keeps."""
    (tmp_path / "grpo_math_1B.yaml").write_text(
        "grpo:\n  num_prompts_per_step: 32\n  num_generations_per_prompt: 16\n  adv_estimator:\n    name: grpo\n"
        "    normalize_rewards: ${grpo.normalize_rewards}\nloss_fn:\n  reference_policy_kl_penalty: 0.01\n"
        "  reference_policy_kl_type: k3\n  kl_input_clamp_value: 20.0\n  kl_output_clamp_value: 10.0\n"
        "  token_level_loss: true\n  use_kl_in_reward: false\npolicy:\n  train_global_batch_size: 512\n"
    )
    run = read('defaults: "grpo_math_1B.yaml"\ngrpo:\n  num_prompts_per_step: 64\n', "run.yaml")
    assert (run.framework, places(run)) == ("nemo-rl", [("loss", 0.01)])
    assert [(c.name, c.value) for c in run.changes if not c.optional] == [("loss_fn.kl_output_clamp_value", None)]
    assert run.stale[0].startswith("grpo.num_prompts_per_step=64 times grpo.num_generations_per_prompt=16 above")
    (tmp_path / "grpo_math_1B.yaml").unlink()
    with pytest.raises(RunFileError, match=r"grpo_math_1B.yaml among its defaults"):
        read_run(tmp_path / "run.yaml", "nemo-rl")


def test_a_kl_of_nemo_rl_in_the_reward_that_grpo_never_adds(read):
    run = read(NEMO + "  use_kl_in_reward: true\n", "run.yaml")
    assert run.parts == []
    assert list(run.unread) == ["loss_fn.reference_policy_kl_penalty"]
    assert run.changes[0].name == "loss_fn.use_kl_in_reward"


def test_recipes_of_nemo_rl_for_ppo_and_for_distillation(read):
    """NVIDIA-NeMo/RL examples/configs/ppo_math_1B.yaml and distillation_math.yaml."""
    run = read(
        "ppo:\n  num_prompts_per_step: 32\n  num_generations_per_prompt: 16\n  adv_estimator:\n    name: gae\n"
        "    gae_lambda: 1.0\nloss_fn:\n  reference_policy_kl_penalty: 0.0\n  use_kl_in_reward: false\n",
        "run.yaml",
    )
    assert (run.trainer, run.parts, run.changes[0].name) == ("gae", [], "loss_fn.reference_policy_kl_penalty")
    with pytest.raises(RunFileError, match=r"loss_fn.kl_type, of distillation or of DPO"):
        read("loss_fn:\n  kl_type: mixed\n  mixed_kl_weight: 0.5\n", "run.yaml")


# AReaL

AREAL = "gconfig:\n  n_samples: 4\nactor:\n  eps_clip: 0.4\n  ppo_n_minibatches: 1\n  optimizer:\n    beta1: 0.9\n"
REF = "ref:\n  path: m\n"


@pytest.mark.slow
def test_a_kl_of_areal_in_the_reward(read):
    """areal-project/AReaL examples/math/gsm8k_reinforce_baseline.yaml."""
    lines = "  kl_ctl: 0.001\n  kl_estimator: {}\n  adv_norm:\n    mean_level: batch\n    std_level: {}\n"
    run = read(AREAL + lines.format("k2", "batch") + REF, "run.yaml")
    assert (run.framework, places(run)) == ("areal", [("reward", 0.001)])
    assert [(c.name, c.value) for c in run.changes] == [
        ("actor.kl_estimator", "k1"),
        ("actor.adv_norm.std_level", None),
    ]
    (found,) = find(read(AREAL + lines.format("k1", "null") + REF, "run.yaml"))
    assert dict(found.parts)["divergence"].startswith("reverse KL")
    assert not dict(found.parts)["looks ahead"].startswith("no")


def test_a_run_of_areal_without_a_kl(read):
    """areal-project/AReaL examples/math/gsm8k_grpo.yaml."""
    run = read(AREAL + "  kl_ctl: 0.0\n  adv_norm:\n    mean_level: batch\n" + REF, "run.yaml")
    assert (run.parts, run.settings["actor.adv_norm.std_level"]) == ([], "batch")  # the default of a section
    assert [c.name for c in run.changes] == ["actor.kl_ctl"]


def test_a_coefficient_of_areal_without_a_reference_is_an_entropy_bonus(read):
    run = read(AREAL, "run.yaml")
    assert run.parts == []
    assert "an entropy bonus" in run.notes[0]
    assert run.changes[0].value == 0


@pytest.mark.slow
def test_the_joint_distillation_of_areal_ignores_the_teacher(read, leads_to_its_target):
    """areal-project/AReaL examples/distillation/gsm8k_grpo_distill_mode_trainEngine.yaml."""
    teacher = "teacher:\n  rl_loss_weight: 1.0\n  distill_loss_weight: 0.005\nref:\n  path: m\n"
    run = read(AREAL + "  kl_ctl: 0.0\n" + teacher, "run.yaml")
    assert places(run) == [("loss", 0.005)]
    (found,) = find(run)
    assert found.verdict == "nothing"
    assert run.target == "reverse-kl-token"
    leads_to_its_target(run)
    pure = read(AREAL + "  kl_ctl: 0.2\n" + teacher.replace("rl_loss_weight: 1.0", "rl_loss_weight: 0"), "run.yaml")
    assert list(pure.unread) == ["actor.kl_ctl"]


# Axolotl

AXOLOTL = "base_model: Qwen/Qwen2.5-1.5B-Instruct\nrl: grpo\n"


def test_a_synchronous_run_of_axolotl_has_the_loss_of_trl(read):
    """axolotl-ai-cloud/axolotl examples/llama-3/qlora-1b-gdpo.yaml."""
    pytest.importorskip("trl")
    run = read(
        "base_model: meta-llama/Llama-3.2-1B-Instruct\nrl: gdpo\nrl_beta: 0.1\ntrl:\n  beta: 0.001\n"
        "  num_generations: 2\n  use_vllm: false\n  scale_rewards: true\ngradient_accumulation_steps: 8\n",
        "run.yaml",
    )
    assert (run.framework, places(run)) == ("axolotl", [("loss", 0.001)])
    assert run.parts[0].loss.endswith("use_bias_correction_kl=True")
    assert run.unread == {"rl_beta": "trl.beta is set, and comes first"}
    assert [c.name for c in run.changes] == ["trl.loss_type"]
    (found,) = find(run)
    assert found.verdict == "reverse-kl-token"
    assert "trl 1." in found.source


def test_a_run_of_axolotl_without_a_beta(read):
    """axolotl-ai-cloud/axolotl src/axolotl/integrations/nemo_gym/examples/nemo_gym_sudoku.yaml."""
    run = read(AXOLOTL + "trl:\n  use_vllm: false\n  num_generations: 8\n", "run.yaml")
    assert (run.parts, run.changes[0].name) == ([], "trl.beta")


@pytest.mark.slow
def test_the_asynchronous_trainer_of_axolotl_loses_the_ratio(read, leads_to_its_target):
    """Keys of axolotl-ai-cloud/axolotl docs/grpo.qmd."""
    run = read(
        AXOLOTL + "trl:\n  beta: 0.01\n  use_vllm: true\n  use_data_producer: true\n  async_prefetch: true\n",
        "run.yaml",
    )
    (found,) = find(run)
    assert dict(found.parts)["divergence"].startswith("forward KL")
    assert [c.name for c in run.changes] == ["trl.use_bias_correction_kl"]
    assert "skip_zero_advantage_batches" in run.notes[0]
    leads_to_its_target(run)
    mean = read(AXOLOTL + "trl:\n  beta: 0.01\n  async_prefetch: true\n  loss_type: grpo\n", "run.yaml")
    leads_to_its_target(mean)


def test_other_trainers_of_axolotl_are_refused(read):
    """axolotl-ai-cloud/axolotl examples/llama-3/qlora-1b.yml has no rl; examples/ebft have another."""
    with pytest.raises(RunFileError, match="a configuration without rl"):
        read("base_model: m\nadapter: qlora\n", "run.yaml")
    with pytest.raises(RunFileError, match="rl as one of grpo, gdpo"):
        read("base_model: m\nrl: ebft\n", "run.yaml")
    with pytest.raises(RunFileError, match="klgrad audit liger"):
        read(AXOLOTL + "trl:\n  beta: 0.1\n  use_liger_loss: true\n", "run.yaml")


# Tunix and MaxText


@pytest.mark.slow
def test_the_default_kl_of_tunix_ignores_the_reference(read, leads_to_its_target):
    """google/tunix examples/rl/grpo/gsm8k/run_qwen3.sh and configs/gemma3_1b.yaml."""
    script = "python3 -m tunix.cli.grpo_main base_config.yaml grpo_config.beta=0.08 grpo_config.num_iterations=2 "
    run = read(script + 'rl_training_config.actor_optimizer_config.opt_type="adamw"')
    same = read("grpo_config:\n  beta: 0.08\n  num_iterations: 2\n", "run.yaml")
    assert (run.framework, places(run)) == ("tunix", [("loss", 0.08)])
    assert run.settings == same.settings
    assert "num_iterations=2" in run.stale[0]
    (found,) = find(run)
    assert found.words.startswith("nothing: ref has no effect; it lowers E[1/length]")
    leads_to_its_target(run)


@pytest.mark.slow
def test_a_script_of_tunix_may_name_a_file(tmp_path, read):
    """google/tunix examples/rl/grpo/gsm8k/run_gemma3_1b.sh."""
    (tmp_path / "gemma.yaml").write_text("grpo_config:\n  beta: 0.08\n")
    script = "python3 -m tunix.cli.grpo_main base_config.yaml override_config_file=gemma.yaml batch_size=1"
    assert places(read(script)) == [("loss", 0.08)]


def test_the_agentic_grpo_and_the_ppo_of_tunix(read, leads_to_its_target):
    """google/tunix examples/frozenlake/configs/gemma4_e2b.yaml and examples/rl/ppo/gsm8k/configs/gemma_2b.yaml."""
    run = read("agentic_grpo_config:\n  beta: 0.0\n  kl_loss_mode: low_var_kl\n", "run.yaml")
    assert (run.parts, run.trainer, run.changes[0].name) == ([], "agentic_grpo_config", "agentic_grpo_config.beta")
    ppo = read("ppo_config:\n  gamma: 0.9999\n  gae_lambda: 0.99\n  beta: 0.08\n", "run.yaml")
    assert places(ppo) == [("reward", 0.08)]
    assert [c.name for c in ppo.changes] == ["ppo_config.kl_method", "ppo_config.gamma", "ppo_config.gae_lambda"]
    leads_to_its_target(ppo)
    with pytest.raises(RunFileError, match="loss_agg_mode as one of token-mean"):
        read("grpo_config:\n  beta: 0.1\n  loss_agg_mode: seq-mean-token-scale\n", "run.yaml")


def test_no_setting_of_maxtext_makes_its_kl_act(tmp_path, read):
    """AI-Hypercomputer/maxtext src/maxtext/configs/post_train/rl.yml, and a command of its RL trainer."""
    run = read("rl:\n  num_generations: 2\n  grpo_beta: 0.08\n  loss_algo: 'grpo'\n", "run.yml")
    assert (run.framework, places(run)) == ("maxtext", [("loss", 0.08)])
    assert run.parts[0].loss == "maxtext rl.grpo_beta rl.loss_agg_mode=sequence-mean-token-mean"
    assert "no setting makes this KL act" in run.notes[0]
    assert [(change.name, change.value) for change in run.changes] == [("rl.grpo_beta", 0.0)]
    assert run.target is None
    said = shown(tmp_path / "run.yml")
    assert "These lines lead to no reverse KL. Change\n\nrl:\n  grpo_beta: 0" in said
    script = "python3 -m maxtext.trainers.post_train.rl.train_rl model_name=m rl.grpo_beta=0.0 rl.off_policy_steps=2"
    off = read(script)
    assert (off.parts, len(off.stale)) == ([], 1)


# prime-rl


def test_runs_of_prime_rl_have_no_reference_unless_they_distil(tmp_path, read):
    """PrimeIntellect-ai/prime-rl configs/debug/algo/grpo.toml, opd.toml and mixed_grpo_opd.toml."""
    head = '[orchestrator]\nbatch_size = 128\n[orchestrator.algo]\ntype = "{}"\n'
    plain = read(head.format("grpo") + "[trainer.loss]\nkl_tau = 0.01\n", "run.toml")
    assert (plain.framework, plain.parts, plain.unread) == ("prime-rl", [], {})
    assert plain.notes[0].startswith("kl_tau=0.01 is no KL to a reference")
    said = shown(tmp_path / "run.toml")
    assert "No setting of prime-rl that is read here adds one." in said
    opd = read(head.format("opd") + "[trainer.loss]\nkl_tau = 0.01\n", "run.toml")
    assert (places(opd), list(opd.unread)) == ([("advantage", 1.0)], ["trainer.loss.kl_tau"])
    source = '[[orchestrator.train.source]]\nname = "{}"\n'
    own = '[orchestrator.train.source.algo]\ntype = "opd"\n'
    mixed = read(head.format("grpo") + source.format("a") + source.format("b") + own, "run.toml")
    assert (mixed.trainer, places(mixed)) == ("grpo, opd", [("advantage", 1.0)])
    with pytest.raises(RunFileError, match=r"trainer\.loss\.type as one of default, ipo"):
        read(head.format("grpo") + '[trainer.loss]\ntype = "custom"\n', "run.toml")


# ms-swift

SWIFT = "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --use_vllm true "


@pytest.mark.slow
def test_a_script_of_ms_swift(read, leads_to_its_target):
    """modelscope/ms-swift examples: megatron/grpo/dense_colocate.sh, train/grpo: internal/rloo.sh and opd_rl.sh."""
    run = read(f"{SWIFT}--beta 0.001 --loss_type grpo --steps_per_generation 4")
    assert (run.framework, places(run), len(run.stale)) == ("ms-swift", [("loss", 0.001)], 2)
    (found,) = find(run)
    assert dict(found.parts)["divergence"].startswith("forward KL")
    leads_to_its_target(run)
    rloo = read(f"{SWIFT}--beta 0.001 --advantage_estimator rloo --kl_in_reward true --loss_type grpo")
    assert (places(rloo), [c.name for c in rloo.changes]) == ([("reward", 0.001)], ["loss_type"])
    both = read(f"{SWIFT}--teacher_model Qwen/Qwen3.5-9B")
    assert places(both) == [("loss", 0.04), ("advantage", 1.0)]


def test_what_ms_swift_never_reads_and_other_types(read):
    """modelscope/ms-swift examples/train/grpo/internal/real.sh has a loss that is not read."""
    assert list(read(f"{SWIFT}--teacher_kl_coef 0.5").unread) == ["teacher_kl_coef"]
    with pytest.raises(RunFileError, match="received 'real'"):
        read(f"{SWIFT}--loss_type real")
    with pytest.raises(RunFileError, match="a run of GRPO; received rlhf_type gkd"):
        read("swift rlhf --rlhf_type gkd --beta 0.5")


# verl's distillation


OPD = "python3 -m verl.trainer.main_ppo distillation.enabled=True "
LOSS = "distillation.distillation_loss."


def test_the_distillation_of_verl(read):
    """verl-project/verl examples/on_policy_distillation_trainer/run_qwen3_8b_fsdp.sh and run_qwen3_8b_megatron.sh."""
    run = read(
        f"{OPD}{LOSS}loss_mode=k1 {LOSS}use_policy_gradient=True {LOSS}use_task_rewards=False {LOSS}loss_max_clamp=10.0"
    )
    assert places(run) == [("advantage", 1.0)]
    assert run.parts[0].loss == "verl distillation loss_mode=k1 use_policy_gradient=True loss_max_clamp=10"
    assert [c.name.split(".")[-1] for c in run.changes if not c.optional] == ["loss_max_clamp"]
    default = read(OPD)
    assert (places(default), default.changes[0].value) == ([("loss", 1.0)], "k2")
    (found,) = find(default)
    assert found.words.startswith("forward KL")
    topk = read(f"{OPD}{LOSS}loss_mode=forward_kl_topk {LOSS}topk=64")
    assert "tail" in topk.changes[0].why
    assert topk.notes[0].startswith("loss_mode=forward_kl_topk descends the forward KL from the teacher restricted")
    with pytest.raises(RunFileError, match="verl refuses it"):
        read(f"{OPD}{LOSS}loss_mode=k1")


def test_a_coefficient_of_verls_distillation_that_is_never_read(read):
    run = read(f"{OPD}{LOSS}use_task_rewards=False {LOSS}distillation_loss_coef=0.1")
    assert run.unread == {"distillation.distillation_loss.distillation_loss_coef": "without use_task_rewards it is 1"}
    assert places(run) == [("loss", 1.0)]
    actor = "actor_rollout_ref.actor."
    both = read(f"{OPD}{LOSS}distillation_loss_coef=0.1 {actor}use_kl_loss=True {actor}kl_loss_coef=0.01")
    assert places(both) == [("loss", 0.01), ("loss", 0.1)]
    assert both.notes == ["Both KLs are on: their gradients add up."]


def test_a_run_of_which_nothing_is_recognised_is_an_error(read):
    for name, reader in READERS.items():
        with pytest.raises(RunFileError):
            read("model:\n  name: m\n", "run.yaml", name)
        assert reader.source == "" or "read on" in reader.source


# The runs in the frameworks' own repositories: the settings of each file, and what its reader makes of them.

RUNS = json.loads((Path(__file__).parent / "run_files" / "real_runs.json").read_text())
"""With the file and the commit; the settings are those that were read from the whole file."""


@pytest.mark.parametrize("known", RUNS, ids=lambda known: known["file"])
def test_a_run_has_the_kls_of_its_settings(known):
    run = READERS[known["framework"]].read(known["given"], None)
    assert [[part.place, part.coefficient, part.loss] for part in run.parts] == known["parts"]
    assert list(run.unread) == known["unread"]


def test_each_framework_has_three_files():
    counts = Counter(known["framework"] for known in RUNS)
    with_source = {name for name, reader in READERS.items() if reader.source}
    assert {name for name, count in counts.items() if count >= 3} == with_source | {"verl"}

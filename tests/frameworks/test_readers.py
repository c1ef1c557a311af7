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


def run_of(tmp_path, text, framework=None, suffix=".sh", **options):
    path = tmp_path / f"run{suffix}"
    path.write_text(text)
    return read_run(path, framework, **options)


def changed(tmp_path, run, optional=True):
    """The same run with the lines that it is told to change."""
    values = {change.name: change.value for change in run.changes if optional or not change.optional}
    given = {name: run.settings[name] for name in run.given} | values
    return READERS[run.framework].read(given, None)


def leads_to_its_target(tmp_path, run):
    """Every KL of the changed run descends the target, in large batches or in every one."""
    after = changed(tmp_path, run)
    assert after.parts
    assert not [change for change in after.changes if not change.optional]
    for found in find(after):
        assert (found.verdict, found.holds) in ((run.target, "always"), (run.target, "large-batches")), found.words


def places(run):
    return [(part.place, part.coefficient) for part in run.parts]


def parts_of(run):
    return [dict(found.parts) for found in find(run)]


# slime

SLIME = "python3 train.py --hf-checkpoint m --ref-load m --rollout-batch-size 32 --n-samples-per-prompt 8 "


def slime(tmp_path, flags):
    return run_of(tmp_path, SLIME + flags)


def test_a_script_of_slime_with_a_kl_in_the_loss(tmp_path):
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
    run = run_of(tmp_path, script)
    assert (run.framework, places(run)) == ("slime", [("loss", 0.001)])
    assert run.stale == ["sampled with SGLang, whose log-probs differ from those of the trainer"]
    assert run.notes == ["What is in ${MODEL_ARGS[@]} is not read: it is no setting of a KL by convention."]
    assert {c.name: c.value for c in run.changes} == {
        "kl_loss_type": "k3",
        "use_unbiased_kl": True,
        "calculate_per_token_loss": True,
    }


def test_other_arrays_that_are_not_known_are_refused(tmp_path):
    with pytest.raises(RunFileError, match=r"what is in \$\{MORE_ARGS\[@\]\} is not read"):
        slime(tmp_path, "--colocate ${MORE_ARGS[@]}")


def test_a_kl_coefficient_of_slime_that_grpo_never_reads(tmp_path):
    """THUDM/slime tests/test_gspo.sh sets kl-coef and kl-loss-coef with gspo, both 0 there."""
    run = slime(tmp_path, "--advantage-estimator gspo --kl-loss-type low_var_kl --kl-coef 0.1")
    assert run.parts == []
    assert list(run.unread) == ["kl_coef"]
    shown = CliRunner().invoke(app, ["advise", "--config", str(tmp_path / "run.sh")]).stdout
    assert "This run has no KL to a reference.\nkl_coef is set and never read: the advantages of gspo" in shown
    assert "\n--use-kl-loss  # was false" in shown
    both = slime(tmp_path, "--kl-loss-coef 0.1 --use-unbiased-kl")
    assert list(both.unread) == ["kl_loss_coef", "use_unbiased_kl"]
    assert slime(tmp_path, "--kl-coef 0.1 --advantage-estimator ppo").unread == {}


def test_a_kl_of_slime_that_is_only_logged(tmp_path):
    """THUDM/slime scripts/run-qwen3-4B.sh: use-kl-loss with a coefficient of 0.00."""
    run = slime(tmp_path, "--use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl")
    assert run.parts == []
    assert "the KL logged, and nothing is descended" in run.notes[0]


def test_the_distillation_of_slime(tmp_path):
    """THUDM/slime examples/on_policy_distillation/run-qwen3-8B-opd.sh."""
    run = slime(tmp_path, "--use-opd --opd-type sglang --opd-kl-coef 1.0 --use-kl-loss --kl-loss-coef 0.00")
    assert places(run) == [("advantage", 1.0)]
    assert [change.name for change in run.changes] == ["calculate_per_token_loss"]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("unbiased", ["", " --use-unbiased-kl"])
@pytest.mark.slow
def test_the_changes_to_a_loss_of_slime_lead_to_the_reverse_kl(tmp_path, kind, unbiased):
    run = slime(tmp_path, f"--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type {kind}{unbiased}")
    leads_to_its_target(tmp_path, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--advantage-estimator ppo",
        "--advantage-estimator ppo --kl-loss-type k3 --normalize-advantages",
        "--advantage-estimator reinforce_plus_plus --normalize-advantages",
    ],
)
def test_the_changes_to_a_reward_of_slime_lead_to_the_reverse_kl(tmp_path, flags):
    run = slime(tmp_path, f"--kl-coef 0.01 {flags}")
    assert run.target == "reverse-kl-sequence"
    leads_to_its_target(tmp_path, run)


@pytest.mark.slow
def test_a_baseline_of_slime_has_a_kl_of_single_tokens(tmp_path):
    run = slime(tmp_path, "--kl-coef 0.01 --advantage-estimator reinforce_plus_plus_baseline --normalize-advantages")
    assert run.target == "reverse-kl-token"
    (parts,) = parts_of(run)
    assert "looks ahead" in parts


def test_several_updates_of_a_rollout_of_slime_are_stale(tmp_path):
    """THUDM/slime scripts/run-deepseek-r1.sh."""
    assert "num_steps_per_rollout=4" in slime(tmp_path, "--num-steps-per-rollout 4").stale[0]
    assert (
        "rollout_batch_size=32 times n_samples_per_prompt=8 above global_batch_size=64"
        in slime(tmp_path, "--global-batch-size 64").stale[0]
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kl-loss-type k4", "kl_loss_type as one of k1, k2, k3, low_var_kl"),
        ("--custom-advantage-function-path my.py:f", "custom_advantage_function_path as one of"),
        ("--kl-loss-coef $BETA", r"give it by --set kl_loss_coef=VALUE"),
        ("--kl-penalty 0.1", "kl_penalty, which may be of a KL"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, flags, message):
    with pytest.raises(RunFileError, match=message):
        slime(tmp_path, flags)


# NeMo-RL

NEMO = "loss_fn:\n  reference_policy_kl_penalty: 0.01\n"


def nemo(tmp_path, lines="", more=""):
    return run_of(tmp_path, f"{NEMO}{lines}{more}", suffix=".yaml")


def test_a_recipe_of_nemo_rl_and_those_that_it_builds_on(tmp_path):
    """NVIDIA-NeMo/RL examples/configs/grpo_math_8B.yaml: `defaults: "grpo_math_1B.yaml"`, whose KL it keeps."""
    (tmp_path / "grpo_math_1B.yaml").write_text(
        "grpo:\n  num_prompts_per_step: 32\n  num_generations_per_prompt: 16\n  adv_estimator:\n    name: grpo\n"
        "    normalize_rewards: ${grpo.normalize_rewards}\nloss_fn:\n  reference_policy_kl_penalty: 0.01\n"
        "  reference_policy_kl_type: k3\n  kl_input_clamp_value: 20.0\n  kl_output_clamp_value: 10.0\n"
        "  token_level_loss: true\n  use_kl_in_reward: false\npolicy:\n  train_global_batch_size: 512\n"
    )
    run = run_of(tmp_path, 'defaults: "grpo_math_1B.yaml"\ngrpo:\n  num_prompts_per_step: 64\n', suffix=".yaml")
    assert (run.framework, places(run)) == ("nemo-rl", [("loss", 0.01)])
    assert [(c.name, c.value) for c in run.changes if not c.optional] == [("loss_fn.kl_output_clamp_value", None)]
    assert run.stale[0].startswith("grpo.num_prompts_per_step=64 times grpo.num_generations_per_prompt=16 above")
    (tmp_path / "grpo_math_1B.yaml").unlink()
    with pytest.raises(RunFileError, match=r"grpo_math_1B.yaml among its defaults"):
        read_run(tmp_path / "run.yaml", "nemo-rl")


def test_a_kl_of_nemo_rl_in_the_reward_that_grpo_never_adds(tmp_path):
    run = nemo(tmp_path, "  use_kl_in_reward: true\n")
    assert run.parts == []
    assert list(run.unread) == ["loss_fn.reference_policy_kl_penalty"]
    assert run.changes[0].name == "loss_fn.use_kl_in_reward"


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        "",
        "  reference_policy_kl_type: k2\n",  # examples/configs/prorlv2.v2.yaml
        "  token_level_loss: false\n",
        "  use_on_policy_kl_approximation: true\n",
        "  use_kl_in_reward: true\n",
        "  use_kl_in_reward: true\ngrpo:\n  adv_estimator:\n    name: reinforce_plus_plus\n",
    ],
)
def test_the_changes_to_nemo_rl_lead_to_the_reverse_kl(tmp_path, lines):
    leads_to_its_target(tmp_path, nemo(tmp_path, lines))


def test_recipes_of_nemo_rl_for_ppo_and_for_distillation(tmp_path):
    """NVIDIA-NeMo/RL examples/configs/ppo_math_1B.yaml and distillation_math.yaml."""
    run = run_of(
        tmp_path,
        "ppo:\n  num_prompts_per_step: 32\n  num_generations_per_prompt: 16\n  adv_estimator:\n    name: gae\n"
        "    gae_lambda: 1.0\nloss_fn:\n  reference_policy_kl_penalty: 0.0\n  use_kl_in_reward: false\n",
        suffix=".yaml",
    )
    assert (run.trainer, run.parts, run.changes[0].name) == ("gae", [], "loss_fn.reference_policy_kl_penalty")
    with pytest.raises(RunFileError, match=r"loss_fn.kl_type, of distillation or of DPO"):
        run_of(tmp_path, "loss_fn:\n  kl_type: mixed\n  mixed_kl_weight: 0.5\n", suffix=".yaml")


# AReaL

AREAL = "gconfig:\n  n_samples: 4\nactor:\n  eps_clip: 0.4\n  ppo_n_minibatches: 1\n  optimizer:\n    beta1: 0.9\n"


def areal(tmp_path, lines, more="ref:\n  path: m\n"):
    return run_of(tmp_path, AREAL + lines + more, suffix=".yaml")


@pytest.mark.slow
def test_a_kl_of_areal_in_the_reward(tmp_path):
    """areal-project/AReaL examples/math/gsm8k_reinforce_baseline.yaml."""
    lines = "  kl_ctl: 0.001\n  kl_estimator: {}\n  adv_norm:\n    mean_level: batch\n    std_level: {}\n"
    run = areal(tmp_path, lines.format("k2", "batch"))
    assert (run.framework, places(run)) == ("areal", [("reward", 0.001)])
    assert [(c.name, c.value) for c in run.changes] == [
        ("actor.kl_estimator", "k1"),
        ("actor.adv_norm.std_level", None),
    ]
    (found,) = find(areal(tmp_path, lines.format("k1", "null")))
    assert dict(found.parts)["divergence"].startswith("reverse KL")
    assert not dict(found.parts)["looks ahead"].startswith("no")


def test_a_run_of_areal_without_a_kl(tmp_path):
    """areal-project/AReaL examples/math/gsm8k_grpo.yaml."""
    run = areal(tmp_path, "  kl_ctl: 0.0\n  adv_norm:\n    mean_level: batch\n")
    assert (run.parts, run.settings["actor.adv_norm.std_level"]) == ([], "batch")  # the default of a section
    assert [c.name for c in run.changes] == ["actor.kl_ctl"]


def test_a_coefficient_of_areal_without_a_reference_is_an_entropy_bonus(tmp_path):
    run = areal(tmp_path, "", more="")
    assert run.parts == []
    assert "an entropy bonus" in run.notes[0]
    assert run.changes[0].value == 0


@pytest.mark.slow
def test_the_joint_distillation_of_areal_ignores_the_teacher(tmp_path):
    """areal-project/AReaL examples/distillation/gsm8k_grpo_distill_mode_trainEngine.yaml."""
    teacher = "teacher:\n  rl_loss_weight: 1.0\n  distill_loss_weight: 0.005\nref:\n  path: m\n"
    run = areal(tmp_path, "  kl_ctl: 0.0\n", teacher)
    assert places(run) == [("loss", 0.005)]
    (found,) = find(run)
    assert found.verdict == "nothing"
    assert run.target == "reverse-kl-token"
    leads_to_its_target(tmp_path, run)
    pure = areal(tmp_path, "  kl_ctl: 0.2\n", teacher.replace("rl_loss_weight: 1.0", "rl_loss_weight: 0"))
    assert list(pure.unread) == ["actor.kl_ctl"]


# Axolotl

AXOLOTL = "base_model: Qwen/Qwen2.5-1.5B-Instruct\nrl: grpo\n"


def axolotl(tmp_path, lines):
    return run_of(tmp_path, AXOLOTL + lines, suffix=".yaml")


def test_a_synchronous_run_of_axolotl_has_the_loss_of_trl(tmp_path):
    """axolotl-ai-cloud/axolotl examples/llama-3/qlora-1b-gdpo.yaml."""
    pytest.importorskip("trl")
    run = run_of(
        tmp_path,
        "base_model: meta-llama/Llama-3.2-1B-Instruct\nrl: gdpo\nrl_beta: 0.1\ntrl:\n  beta: 0.001\n"
        "  num_generations: 2\n  use_vllm: false\n  scale_rewards: true\ngradient_accumulation_steps: 8\n",
        suffix=".yaml",
    )
    assert (run.framework, places(run)) == ("axolotl", [("loss", 0.001)])
    assert run.parts[0].loss.endswith("use_bias_correction_kl=True")
    assert run.unread == {"rl_beta": "trl.beta is set, and comes first"}
    assert [c.name for c in run.changes] == ["trl.loss_type"]
    (found,) = find(run)
    assert found.verdict == "reverse-kl-token"
    assert "trl 1." in found.source


def test_a_run_of_axolotl_without_a_beta(tmp_path):
    """axolotl-ai-cloud/axolotl src/axolotl/integrations/nemo_gym/examples/nemo_gym_sudoku.yaml."""
    run = axolotl(tmp_path, "trl:\n  use_vllm: false\n  num_generations: 8\n")
    assert (run.parts, run.changes[0].name) == ([], "trl.beta")


@pytest.mark.slow
def test_the_asynchronous_trainer_of_axolotl_loses_the_ratio(tmp_path):
    """Keys of axolotl-ai-cloud/axolotl docs/grpo.qmd."""
    run = axolotl(tmp_path, "trl:\n  beta: 0.01\n  use_vllm: true\n  use_data_producer: true\n  async_prefetch: true\n")
    (found,) = find(run)
    assert dict(found.parts)["divergence"].startswith("forward KL")
    assert [c.name for c in run.changes] == ["trl.use_bias_correction_kl"]
    assert "skip_zero_advantage_batches" in run.notes[0]
    leads_to_its_target(tmp_path, run)
    mean = axolotl(tmp_path, "trl:\n  beta: 0.01\n  async_prefetch: true\n  loss_type: grpo\n")
    leads_to_its_target(tmp_path, mean)


def test_other_trainers_of_axolotl_are_refused(tmp_path):
    """axolotl-ai-cloud/axolotl examples/llama-3/qlora-1b.yml has no rl; examples/ebft have another."""
    with pytest.raises(RunFileError, match="a configuration without rl"):
        run_of(tmp_path, "base_model: m\nadapter: qlora\n", suffix=".yaml")
    with pytest.raises(RunFileError, match="rl as one of grpo, gdpo"):
        run_of(tmp_path, "base_model: m\nrl: ebft\n", suffix=".yaml")
    with pytest.raises(RunFileError, match="klgrad audit liger"):
        axolotl(tmp_path, "trl:\n  beta: 0.1\n  use_liger_loss: true\n")


# Tunix and MaxText


@pytest.mark.slow
def test_the_default_kl_of_tunix_ignores_the_reference(tmp_path):
    """google/tunix examples/rl/grpo/gsm8k/run_qwen3.sh and configs/gemma3_1b.yaml."""
    script = "python3 -m tunix.cli.grpo_main base_config.yaml grpo_config.beta=0.08 grpo_config.num_iterations=2 "
    run = run_of(tmp_path, script + 'rl_training_config.actor_optimizer_config.opt_type="adamw"')
    same = run_of(tmp_path, "grpo_config:\n  beta: 0.08\n  num_iterations: 2\n", suffix=".yaml")
    assert (run.framework, places(run)) == ("tunix", [("loss", 0.08)])
    assert run.settings == same.settings
    assert "num_iterations=2" in run.stale[0]
    (found,) = find(run)
    assert found.words.startswith("nothing: ref has no effect; it lowers E[1/length]")
    leads_to_its_target(tmp_path, run)


@pytest.mark.slow
def test_a_script_of_tunix_may_name_a_file(tmp_path):
    """google/tunix examples/rl/grpo/gsm8k/run_gemma3_1b.sh."""
    (tmp_path / "gemma.yaml").write_text("grpo_config:\n  beta: 0.08\n")
    script = "python3 -m tunix.cli.grpo_main base_config.yaml override_config_file=gemma.yaml batch_size=1"
    assert places(run_of(tmp_path, script)) == [("loss", 0.08)]


def test_the_agentic_grpo_and_the_ppo_of_tunix(tmp_path):
    """google/tunix examples/frozenlake/configs/gemma4_e2b.yaml and examples/rl/ppo/gsm8k/configs/gemma_2b.yaml."""
    run = run_of(tmp_path, "agentic_grpo_config:\n  beta: 0.0\n  kl_loss_mode: low_var_kl\n", suffix=".yaml")
    assert (run.parts, run.trainer, run.changes[0].name) == ([], "agentic_grpo_config", "agentic_grpo_config.beta")
    ppo = run_of(tmp_path, "ppo_config:\n  gamma: 0.9999\n  gae_lambda: 0.99\n  beta: 0.08\n", suffix=".yaml")
    assert places(ppo) == [("reward", 0.08)]
    assert [c.name for c in ppo.changes] == ["ppo_config.kl_method", "ppo_config.gamma", "ppo_config.gae_lambda"]
    leads_to_its_target(tmp_path, ppo)
    with pytest.raises(RunFileError, match="loss_agg_mode as one of token-mean"):
        run_of(tmp_path, "grpo_config:\n  beta: 0.1\n  loss_agg_mode: seq-mean-token-scale\n", suffix=".yaml")


def test_no_setting_of_maxtext_makes_its_kl_act(tmp_path):
    """AI-Hypercomputer/maxtext src/maxtext/configs/post_train/rl.yml, and a command of its RL trainer."""
    run = run_of(tmp_path, "rl:\n  num_generations: 2\n  grpo_beta: 0.08\n  loss_algo: 'grpo'\n", suffix=".yml")
    assert (run.framework, places(run)) == ("maxtext", [("loss", 0.08)])
    assert run.parts[0].loss == "maxtext rl.grpo_beta rl.loss_agg_mode=sequence-mean-token-mean"
    assert "no setting makes this KL act" in run.notes[0]
    assert [(change.name, change.value) for change in run.changes] == [("rl.grpo_beta", 0.0)]
    assert run.target is None
    shown = CliRunner().invoke(app, ["advise", "--config", str(tmp_path / "run.yml")]).stdout
    assert "These lines lead to no reverse KL. Change\n\nrl:\n  grpo_beta: 0" in shown
    script = "python3 -m maxtext.trainers.post_train.rl.train_rl model_name=m rl.grpo_beta=0.0 rl.off_policy_steps=2"
    off = run_of(tmp_path, script)
    assert (off.parts, len(off.stale)) == ([], 1)


# prime-rl


def test_runs_of_prime_rl_have_no_reference_unless_they_distil(tmp_path):
    """PrimeIntellect-ai/prime-rl configs/debug/algo/grpo.toml, opd.toml and mixed_grpo_opd.toml."""
    head = '[orchestrator]\nbatch_size = 128\n[orchestrator.algo]\ntype = "{}"\n'
    plain = run_of(tmp_path, head.format("grpo") + "[trainer.loss]\nkl_tau = 0.01\n", suffix=".toml")
    assert (plain.framework, plain.parts, plain.unread) == ("prime-rl", [], {})
    assert plain.notes[0].startswith("kl_tau=0.01 is no KL to a reference")
    shown = CliRunner().invoke(app, ["advise", "--config", str(tmp_path / "run.toml")]).stdout
    assert "No setting of prime-rl that is read here adds one." in shown
    opd = run_of(tmp_path, head.format("opd") + "[trainer.loss]\nkl_tau = 0.01\n", suffix=".toml")
    assert (places(opd), list(opd.unread)) == ([("advantage", 1.0)], ["trainer.loss.kl_tau"])
    source = '[[orchestrator.train.source]]\nname = "{}"\n'
    own = '[orchestrator.train.source.algo]\ntype = "opd"\n'
    mixed = run_of(tmp_path, head.format("grpo") + source.format("a") + source.format("b") + own, suffix=".toml")
    assert (mixed.trainer, places(mixed)) == ("grpo, opd", [("advantage", 1.0)])
    with pytest.raises(RunFileError, match=r"trainer\.loss\.type as one of default, ipo"):
        run_of(tmp_path, head.format("grpo") + '[trainer.loss]\ntype = "custom"\n', suffix=".toml")


# ms-swift

SWIFT = "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B --use_vllm true "


@pytest.mark.slow
def test_a_script_of_ms_swift(tmp_path):
    """modelscope/ms-swift examples: megatron/grpo/dense_colocate.sh, train/grpo: internal/rloo.sh and opd_rl.sh."""
    run = run_of(tmp_path, f"{SWIFT}--beta 0.001 --loss_type grpo --steps_per_generation 4")
    assert (run.framework, places(run), len(run.stale)) == ("ms-swift", [("loss", 0.001)], 2)
    (found,) = find(run)
    assert dict(found.parts)["divergence"].startswith("forward KL")
    leads_to_its_target(tmp_path, run)
    rloo = run_of(tmp_path, f"{SWIFT}--beta 0.001 --advantage_estimator rloo --kl_in_reward true --loss_type grpo")
    assert (places(rloo), [c.name for c in rloo.changes]) == ([("reward", 0.001)], ["loss_type"])
    both = run_of(tmp_path, f"{SWIFT}--teacher_model Qwen/Qwen3.5-9B")
    assert places(both) == [("loss", 0.04), ("advantage", 1.0)]


def test_what_ms_swift_never_reads_and_other_types(tmp_path):
    """modelscope/ms-swift examples/train/grpo/internal/real.sh has a loss that is not read."""
    assert list(run_of(tmp_path, f"{SWIFT}--teacher_kl_coef 0.5").unread) == ["teacher_kl_coef"]
    with pytest.raises(RunFileError, match="received 'real'"):
        run_of(tmp_path, f"{SWIFT}--loss_type real")
    with pytest.raises(RunFileError, match="a run of GRPO; received rlhf_type gkd"):
        run_of(tmp_path, "swift rlhf --rlhf_type gkd --beta 0.5")


# verl's distillation


def verl_opd(tmp_path, *settings):
    name = "distillation.distillation_loss."
    written = " ".join(x if "." in x.split("=")[0] else f"{name}{x}" for x in settings)
    return run_of(tmp_path, f"python3 -m verl.trainer.main_ppo distillation.enabled=True {written}")


def test_the_distillation_of_verl(tmp_path):
    """verl-project/verl examples/on_policy_distillation_trainer/run_qwen3_8b_fsdp.sh and run_qwen3_8b_megatron.sh."""
    run = verl_opd(
        tmp_path, "loss_mode=k1", "use_policy_gradient=True", "use_task_rewards=False", "loss_max_clamp=10.0"
    )
    assert places(run) == [("advantage", 1.0)]
    assert run.parts[0].loss == "verl distillation loss_mode=k1 use_policy_gradient=True loss_max_clamp=10"
    assert [c.name.split(".")[-1] for c in run.changes if not c.optional] == ["loss_max_clamp"]
    default = verl_opd(tmp_path)
    assert (places(default), default.changes[0].value) == ([("loss", 1.0)], "k2")
    (found,) = find(default)
    assert found.words.startswith("forward KL")
    topk = verl_opd(tmp_path, "loss_mode=forward_kl_topk", "topk=64")
    assert "tail" in topk.changes[0].why
    assert topk.notes[0].startswith("loss_mode=forward_kl_topk descends the forward KL from the teacher restricted")
    with pytest.raises(RunFileError, match="verl refuses it"):
        verl_opd(tmp_path, "loss_mode=k1")


def test_a_coefficient_of_verls_distillation_that_is_never_read(tmp_path):
    run = verl_opd(tmp_path, "use_task_rewards=False", "distillation_loss_coef=0.1")
    assert run.unread == {"distillation.distillation_loss.distillation_loss_coef": "without use_task_rewards it is 1"}
    assert places(run) == [("loss", 1.0)]
    actor = "actor_rollout_ref.actor."
    both = verl_opd(tmp_path, "distillation_loss_coef=0.1", f"{actor}use_kl_loss=True", f"{actor}kl_loss_coef=0.01")
    assert places(both) == [("loss", 0.01), ("loss", 0.1)]
    assert both.notes == ["Both KLs are on: their gradients add up."]


def test_a_run_of_which_nothing_is_recognised_is_an_error(tmp_path):
    for name, reader in READERS.items():
        with pytest.raises(RunFileError):
            run_of(tmp_path, "model:\n  name: m\n", name, suffix=".yaml")
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

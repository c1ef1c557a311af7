"""`klgrad advise --config` by transcribed formulae: which KLs are on, what is never read, and what to change.

The excerpts have the keys and values of files in the frameworks' own repositories, which are named beside them.
"""

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
   --hf-checkpoint /root/Qwen2.5-3B/ ${GRPO_ARGS[@]}
"""
    run = run_of(tmp_path, script)
    assert (run.framework, places(run)) == ("slime", [("loss", 0.001)])
    assert run.stale == ("slime samples with SGLang, whose log-probs differ from those of the trainer",)
    assert run.notes == ("What is in ${MODEL_ARGS[@]} is not read: it is no setting of a KL by convention.",)
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
    assert run.parts == ()
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
    assert run.parts == ()
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
        "256 completions of a rollout above global_batch_size=64" in slime(tmp_path, "--global-batch-size 64").stale[0]
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

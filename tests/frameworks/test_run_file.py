"""`klgrad advise --config`: the settings of a run, what its KL descends, and lines that lead to the reverse KL."""

import dataclasses
import json
import subprocess
import sys
import time
from itertools import pairwise, product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import RunFileError, UnknownNameError
from klgrad.frameworks import recorded
from klgrad.frameworks.run_file import find, names_like_a_kl, read_data, read_run
from klgrad.frameworks.run_settings import SEVERAL
from klgrad.frameworks.trl import TRAINERS
from klgrad.frameworks.verl import KNOWN as VERL

FILES = Path(__file__).parent / "run_files"
ACTOR = "actor_rollout_ref.actor."
ENGINE = "sampled with an inference engine, whose log-probs differ from those of the trainer"
VLLM = ENGINE.replace("an inference engine", "vLLM")


def advised(*arguments, status=0):
    shown = CliRunner().invoke(app, ["advise", *map(str, arguments)])
    assert shown.exit_code == status, shown.output
    return shown.stdout


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr("klgrad.frameworks.Framework.installed", None)


# Reading


VERL_LOSS, OPENRLHF_LOSS = "verl use_kl_loss kl_loss_type=", "openrlhf algo.kl.use_loss estimator="
DR_GRPO = "trl grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=False"
IN_FILES = {
    "grpo.yaml": ("0.04 " + DR_GRPO, "use_bias_correction_kl", f"num_iterations=2: {SEVERAL}"),  # 4e-2 in YAML is text
    "rloo.yaml": ("0.05 trl rloo normalize_advantages=True", "normalize_advantages", ""),
    "grpo_arguments.py": (f"0.04 {DR_GRPO} use_vllm=True", "use_bias_correction_kl", None),
    "verl.sh": (f"0.001 {VERL_LOSS}low_var_kl loss_agg_mode=token-mean", "kl_loss_type loss_agg_mode", None),
    "verl_variables.sh": (f"0.002 {VERL_LOSS}low_var_kl+ loss_agg_mode=seq-mean-token-sum", "", ENGINE),
    "openrlhf.sh": (f"0.001 {OPENRLHF_LOSS}k3 unbiased_gradient=False", "unbiased_gradient", None),
    # 64 times 8 completions, and 512 in an update
    "openrlhf_old.sh": (f"1e-05 {OPENRLHF_LOSS}k3 unbiased_gradient=False", "unbiased_gradient", VLLM),
    "skyrl.yaml": ("0.001 skyrl use_kl_loss kl_estimator_type=k3", "kl_estimator_type", ENGINE),
}
"""The KL of a file, the settings to change, and why its samples are stale; None is not compared."""


@pytest.mark.parametrize("file", IN_FILES)
def test_files(file):
    run = read_run(FILES / file)
    (part,) = run.parts
    kl, changes, stale = IN_FILES[file]
    assert f"{part.coefficient:g} {part.loss}" == kl
    assert [change.name.split(".")[-1] for change in run.changes] == changes.split()
    assert stale is None or "; ".join(run.stale) == stale


def test_more_of_the_files():
    grpo, rloo, arguments = (read_run(FILES / name) for name in ("grpo.yaml", "rloo.yaml", "grpo_arguments.py"))
    assert (grpo.framework, grpo.trainer, grpo.parts[0].place) == ("trl", "GRPOTrainer", "loss")
    assert grpo.given == ["beta", "loss_type", "use_bias_correction_kl", "num_iterations"]
    assert [(c.name, c.value, c.was) for c in grpo.changes] == [("use_bias_correction_kl", True, False)]
    assert (rloo.trainer, rloo.target) == ("RLOOTrainer", "reverse-kl-sequence")
    assert (arguments.settings["num_iterations"], arguments.settings["steps_per_generation"]) == (2, 4)
    assert read_run(FILES / "skyrl.yaml").changes[0].value == "k2"
    assert read_run(FILES / "openrlhf_old.sh").changes[0].why.endswith("; releases with the old flags lack it")
    verl, variables = read_run(FILES / "verl.sh"), read_run(FILES / "verl_variables.sh")
    assert verl.given == [name for name in VERL if name in verl.given]
    assert verl.settings["algorithm.adv_estimator"] == "grpo"
    sizes = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
    assert [variables.settings[name] for name in sizes] == [128, 128]
    assert variables.notes == [
        "The script's own arguments are not read.",
        "`actor_rollout_ref.actor.kl_loss_coef` is 0.002 unless $KL_COEF is another.",
    ]
    both = read_run(FILES / "verl.yaml")  # every batch is used once
    assert [part.loss for part in both.parts] == [
        f"{VERL_LOSS}mse loss_agg_mode=seq-mean-token-sum",
        "verl use_kl_in_reward kl_penalty=low_var_kl adv_estimator=grpo",
    ]
    assert [change.name.split(".")[-1] for change in both.changes] == ["kl_penalty", "norm_adv_by_std_in_grpo"]
    assert both.stale == [ENGINE]


@pytest.mark.parametrize("trainer", [{"loss_type": "dapo"}, {"normalize_advantages": True}])
@pytest.mark.parametrize(
    ("size", "accumulated", "processes"),
    [(64, 1, 8), (64, 2, 4), ("64", 3, 3), (16, 2, None), (8, 2, None), ("None", 1, None)],
)
def test_a_generation_above_one_update_is_stale_with_few_processes(size, accumulated, processes, trainer, read):
    sizes = {"generation_batch_size": size, "gradient_accumulation_steps": accumulated}
    run = read({**trainer, **sizes})
    above = f"per_device_train_batch_size=8 times gradient_accumulation_steps={accumulated}"
    reason = f"generation_batch_size={size} above {above}: {SEVERAL}, unless there are at least {processes} processes"
    assert run.stale == ([reason] if processes else [])
    assert read({**trainer, **sizes, "per_device_train_batch_size": 64}).stale == []
    steps = read({**trainer, "steps_per_generation": "4", "gradient_accumulation_steps": 2}).stale
    assert steps == [f"steps_per_generation=4 above gradient_accumulation_steps=2: {SEVERAL}"]


def test_a_file_of_verl_with_klgrad():
    run = read_run(Path(__file__).parents[2] / "examples" / "verl" / "multi_node.yaml")
    (part,) = run.parts
    assert (part.place, part.coefficient, run.target) == ("loss", 0.02, "reverse-kl-sequence")
    assert run.settings["klgrad.ratio"] == "prefix"
    assert "klgrad.ratio" in run.given
    assert "klgrad placement=loss divergence=reverse level=sequence ratio=prefix" in part.loss
    assert [change.name for change in run.changes] == ["actor_rollout_ref.actor.loss_agg_mode"]
    assert run.notes == []


def test_a_script_of_verl_with_klgrad_beside_its_own_kl(read):
    own = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"
    run = read(f"python -m verl.trainer.main_ppo +klgrad.coef=1e-2 +klgrad.level=token {own}")
    assert [part.place for part in run.parts] == ["loss", "loss"]
    assert run.parts[1].coefficient == 0.01
    assert run.notes == ["klgrad refuses to train beside a KL of verl's own: switch one of them off."]
    assert run.changes[-1].name == "klgrad.ratio"


TOKEN_SUM = {f"{ACTOR}loss_agg_mode": "token-sum"}
UNBOUNDED = {"klgrad.level": "token", "klgrad.ratio_bound": "none"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "off_policy"),
    [
        ({f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_type": "k3+", **TOKEN_SUM}, "squared-token"),
        ({**UNBOUNDED, "klgrad.ratio": "token", **TOKEN_SUM}, "reverse-kl-token-sampler"),
        ({**UNBOUNDED, "klgrad.ratio": "prefix", f"{ACTOR}loss_agg_mode": "seq-mean-token-sum"}, "reverse-kl-token"),
    ],
)
def test_sums_over_tokens_or_completions_get_the_verdict_of_a_mean_over_rows(settings, off_policy, read):
    pytest.importorskip("verl.workers")
    (found,) = find(read(settings))
    assert (found.verdict, found.verdict_off_policy, found.holds) == ("reverse-kl-token", off_policy, "always")
    assert found.source == "audited here with verl 0.9.1"


def test_a_sum_over_the_tokens_of_the_batch_is_not_said_to_divide_by_lengths(read):
    settings = {"algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "rloo", **TOKEN_SUM}
    (part,) = read(settings).parts
    assert part.caveat.endswith("token-sum is the same times the number of completions.")


IN_REWARD = {
    "algorithm.": {"use_kl_in_reward": True},
    "trainer.algorithm.": {"use_kl_loss": False, "use_kl_in_reward": True, "kl_estimator_type": "k1"},
}
WHITENED = {
    "algorithm.": ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    "trainer.algorithm.": ("gae", "reinforce++"),
}
"""The advantages that verl and SkyRL whiten."""

PLAIN = {"algorithm.": ("remax", "opo", "gpg", "gdpo", "rloo_vectorized", "my_own"), "trainer.algorithm.": ("my_own",)}
ADVANTAGES = [(x, name, known is WHITENED) for known in (WHITENED, PLAIN) for x in known for name in known[x]]


@pytest.mark.parametrize(("section", "estimator", "whitened"), ADVANTAGES)
def test_only_whitened_advantages_are_said_to_divide_the_kl(section, estimator, whitened, read, nothing_installed):
    name = {"algorithm.": "adv_estimator", "trainer.algorithm.": "advantage_estimator"}[section]
    run = read({f"{section}{x}": value for x, value in {**IN_REWARD[section], name: estimator}.items()})
    change, _ = run.changes  # the other one is the reduction
    assert (change.name, change.value) == (f"{section}{name}", "rloo")
    assert ("standard deviation" in change.why) == whitened
    assert (change.why == "this estimator is not audited") == (not whitened)
    (found,) = find(run)
    assert (found.source == "not audited: no audit has these settings") == (not found.verdict)
    assert whitened or not found.verdict
    if run.framework == "skyrl":
        assert ("divided by the spread of the batch" in found.words) == bool(found.verdict) == whitened


@pytest.mark.parametrize(
    "text",
    [
        'args = GRPOConfig(output_dir="x", beta=0.04, num_iterations=2)',
        'args = trl.GRPOConfig(\n    output_dir="x",\n    num_iterations=2,\n    beta=0.04)',
        "args = GRPOConfig(num_iterations=2)\nargs.beta = 0.04",
        "args = GRPOConfig(num_iterations=2, beta=0.9)\nargs.beta = 0.04\nself.beta = 0.5",
        "args = DPOConfig(beta=0.5)\nargs = GRPOConfig(num_iterations=2, beta=0.04)\nargs = DPOConfig(beta=0.5)",
        'warn("\\d")\nargs = MyConfig(num_iterations=2, beta=0.04)',
        "more = dict(beta=0.04, num_iterations=1)\nmore['num_iterations'] = 2\nGRPOConfig('out', **more)",
        "more = {'beta': 0.04}\nGRPOConfig(num_iterations=2, **more, **{'output_dir': 'x'})",
        "c = GRPOConfig(num_iterations=2, beta=0.04)\nprint(c, c.beta)\nt = GRPOTrainer(m, c)\nlog(c.to_dict())",
        "more = {'beta': 0.04}\nprint(more['beta'], more.get('x'))\nA(args=GRPOConfig(num_iterations=2, **more))",
        "BETA = 0.04\nif True:\n    args = GRPOConfig(num_iterations=2)\n    args.beta = BETA\nscheduler.beta = 0.0",
    ],
)
def test_python_scripts(text, read):
    run = read(text, "run.py")
    assert (run.framework, run.trainer, run.given) == ("trl", "GRPOTrainer", ["beta", "num_iterations"])
    assert run.settings["beta"] == 0.04
    assert run.settings["num_iterations"] == 2
    assert [note for note in run.notes if "literal" in note] == []


def test_the_class_in_a_python_script_is_that_of_the_trainer(read):
    run = read('args = RLOOConfig(output_dir="x")', "run.py")
    assert (run.trainer, run.given, run.notes) == ("RLOOTrainer", [], [])
    assert read("args = GRPOConfig(beta=0.1)", "run.py", trainer="rloo").trainer == "RLOOTrainer"


MADE = "args = GRPOConfig(beta=0.1)\n"
ARGUMENT = "p.add_argument('--beta', type=float, default=0.04)\na = p.parse_args()\n"


def test_the_default_of_an_argument_is_followed(read):
    run = read(f"{ARGUMENT}GRPOConfig(beta=a.beta, num_iterations=2)", "run.py")
    assert run.settings["beta"] == 0.04
    assert "`beta` is a.beta: 0.04 is the default of --beta." in run.notes


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("base = GRPOConfig(beta=0.1)\nbase = replace(base, beta=0.0)", r"replace\(base, beta=0.0\) .*, line 2"),
        (f"{MADE}setattr(args, 'beta', 0.0)", r"setattr\(args"),
        (f"{MADE}vars(args)['beta'] = 0", r"vars\(args\)"),
        (f"{MADE}args.__dict__.update(beta=0)", "args.__dict__"),
        (f"{MADE}args.set_training(beta=0)", r"args.set_training\(beta=0\)"),
        (f"{MADE}other = args\nother.loss_type = 'grpo'", "other = args"),
        (f"{MADE}args = tweaked()", r"args = tweaked\(\)"),
        (f"{MADE}t = GRPOTrainer(args=args)\nsetattr(t.args, 'beta', 0)", r"setattr\(t.args"),
        ("args = tweaked(GRPOConfig(beta=0.1))", r"tweaked\(GRPOConfig"),
        ("def make():\n    return GRPOConfig(beta=0.1)\ntweak(make())", r"GRPOConfig\(beta=0.1\)"),
        ("kw = {'beta': 0.1}\ntweak(kw)\nGRPOConfig(**kw)", r"tweak\(kw\)"),
        ("kw = {'beta': 0.1}\nkw.update(beta=0)\nGRPOConfig(**kw)", r"kw.update"),
        ("kw = {'beta': 0.1}\ndel kw['beta']\nGRPOConfig(**kw)", r"kw\['beta'\]"),
        ("kw = {'beta': 0.1}\nkw |= more\nGRPOConfig(**kw)", "kw"),
    ],
)
def test_a_configuration_that_a_python_script_may_change_is_refused(text, use, read):
    with pytest.raises(RunFileError, match=f"received .*{use}"):
        read(text, "run.py")


@pytest.mark.parametrize("framework", [None, "trl"])
@pytest.mark.parametrize(
    "text",
    [
        "print('--beta 0.1')",
        "args.beta = 0.1",
        "args = parser.parse_args()",
        "from trl import SFTConfig as S, AsyncGRPOConfig\nAsyncGRPOConfig(beta=0.1, num_iterations=2)",
    ],
)
def test_a_python_script_without_settings(framework, text, read):
    with pytest.raises(
        RunFileError, match=r"written as in args = GRPOConfig\(beta=0.04\) or, after it, args.beta = 0.04"
    ):
        read(text, "run.py", framework)


# Shell scripts


ADDED = """
ARGS=(actor_rollout_ref.actor.use_kl_loss=True)
case "$DEVICE" in
    npu) ARGS+=(trainer.n_gpus_per_node=16 {}) ;;
esac
python3 -m verl.trainer.main_ppo "${{ARGS[@]}}" --sizes 1 2 $(seq 16 8 256)
"""


def test_words_that_a_branch_adds_to_an_array(read):
    """verl-project/verl examples/grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh, and sizes as of THUDM/slime."""
    assert [part.coefficient for part in read(ADDED.format("")).parts] == [0.001]
    name = "actor_rollout_ref.actor.kl_loss_coef"
    with pytest.raises(RunFileError, match=f"{name}=0.1 in a branch that may not run; remedy: add --set {name}=VALUE"):
        read(ADDED.format(f"{name}=0.1"))
    assert read(ADDED.format(f"{name}=0.1"), **{name: "0.2"}).parts[0].coefficient == 0.2
    with pytest.raises(RunFileError, match=r"kl_loss_koef, which may be of a KL"):
        read(ADDED.format("actor_rollout_ref.actor.kl_loss_koef=0.1"))


LAUNCH = "accelerate launch --config_file zero3.yaml --gradient_accumulation_steps 9 train.py"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{LAUNCH} --beta 0.04 --loss_type dr_grpo --no_use_bias_correction_kl", {"use_bias_correction_kl": False}),
        (f"{LAUNCH} --beta 0.04 --no-use-bias-correction-kl", {"use_bias_correction_kl": False}),
        (f"{LAUNCH} --beta 0.04 --loss-type=grpo --num-iterations 4", {"loss_type": "grpo", "num_iterations": 4}),
        (f"{LAUNCH} --beta 0.04", {"gradient_accumulation_steps": 1}),
        ("beta=0.5\ntrl grpo --beta 0.04 \\\n  --use_vllm\nbeta=0.0", {"beta": 0.04, "use_vllm": True}),
        ("BETA=0.04; trl grpo --beta $BETA", {"beta": 0.04}),
        ('export BETA=0.04 N=2\ntrl grpo --beta "${BETA}" --num_iterations=$((N * (1 + 1)))', {"num_iterations": 4}),
        ("B=0.04 # 0.1\nX='0.'\nX+=04\nARGS=(--beta $X)\ntrl grpo \"${ARGS[@]}\" $@", {"beta": 0.04}),
        ('A=\'--beta 0.04\'\nCMD="trl grpo $A"\nsrun bash -c "$CMD" 2>&1 | tee log', {"beta": 0.04}),
        ("cat > a <<'END'\ntrl grpo --beta 1\nEND\ntrl grpo --beta 0.04", {"beta": 0.04}),
        ("python data.py --beta 3\ntrl vllm-serve --model m &\ntrl grpo --beta 0.04", {"beta": 0.04}),
        ("trl grpo --beta 0.04 # \\\n--beta 1", {"beta": 0.04}),
        ("python -m torch.distributed.run --nproc 2 grpo.py --beta 0.04", {"beta": 0.04}),
        ("trl grpo --beta 0.04 --use_vllm yes --sync_ref_model F", {"use_vllm": True, "sync_ref_model": False}),
        ("trl grpo --beta 0.04 --use_vllm 1 --sync_ref_model n", {"use_vllm": True, "sync_ref_model": False}),
        ("B=0.04; set -euo pipefail; source venv/bin/activate\ntrl grpo --beta $B", {}),
    ],
)
def test_shell_scripts(text, expected, read):
    run = read(text, framework="trl")
    assert {name: run.settings[name] for name in expected} == expected
    assert run.settings["beta"] == 0.04
    assert run.trainer == "GRPOTrainer"


def test_what_is_from_outside_of_a_script_is_noted(read):
    run = read("B=${BETA:-0.04}\ntrl grpo --beta $B --num_iterations ${N-2} $EXTRA ${MORE:-}")
    assert (run.settings["beta"], run.settings["num_iterations"]) == (0.04, 2)
    assert run.notes == [
        "`beta` is 0.04 unless $BETA is another.",
        "`num_iterations` is 2 unless $N is another.",
        "The script does not set $EXTRA: settings in it are not read.",
    ]
    own = read('trl grpo --beta ${1:-0.04} --use_vllm "$@"')
    assert (own.settings["beta"], own.settings["use_vllm"]) == (0.04, True)
    assert own.notes == ["The script's own arguments are not read.", "`beta` is 0.04 unless $1 is another."]


COMPUTED = {
    "run.py": [
        "args = GRPOConfig(beta=0.1, output_dir=folder)\nargs.beta = options.beta",
        "GRPOConfig(beta=options.beta)",
        "p.add_argument('--beta')\nGRPOConfig(beta=p.parse_args().beta)",
        "args = GRPOConfig(beta=0.1)\nif cold:\n    args.beta = 0.0",
        "def f(args):\n    args.beta = 0.0\nargs = GRPOConfig(beta=0.1)",
        "BETA = 0.04\nBETA = 0.0\nGRPOConfig(beta=BETA)",
        "def main(beta):\n    GRPOConfig(beta=beta)",
        f"{MADE}t = GRPOTrainer(args=args)\nt.args.beta = 0.0",
        f"{MADE}t = GRPOTrainer(args=args)\nt.beta = 0.0",
    ],
    "run.sh": [
        "trl grpo --beta $BETA",
        "BETA=$(cat beta)\ntrl grpo --beta $BETA",
        "BETA=0.1\nif [ $x = y ]; then BETA=0; fi\ntrl grpo --beta $BETA",
        "BETA=0.1\n[ -z $x ] && BETA=0\ntrl grpo --beta $BETA",
        "for b in 0.1 0.2; do trl grpo --beta $b; done",
        "case $1 in a) BETA=1;; *) BETA=2;; esac\ntrl grpo --beta $BETA",
        "f() {\n BETA=$1\n trl grpo --beta $BETA\n}\nf 0.1",
        "B=1; [ -f x ] && B=2; B=0.04; trl grpo --beta $B",
        "main() { local B=0.04; trl grpo --beta $B; }\nmain",
        "B=0.04; [ -f x ] && echo hi && B=0.1\ntrl grpo --beta $B",
        "B=0.04; source ./common.sh; trl grpo --beta $B",
        ". ./common.sh; trl grpo --beta ${B:-0.04}",
        'B=0.04; eval "B=0"; trl grpo --beta $B',
        "B=4; let B=0; trl grpo --beta $B",
        "B=4; ((B=0)); trl grpo --beta $B",
        "B=0.04; printf -v B 0; trl grpo --beta $B",
        "B=0.04; f() { B=0; }\nB=0.1; f; trl grpo --beta $B",
        "B=0.04; for i in 1 2; do trl grpo --beta $B; B=0; done",
        "B=0.04; f() { trl grpo --beta $B; }\nB=0; f",
        "B=0.04; while [ $# -gt 0 ]; do case $1 in --b) B=$2;; esac; shift; done; trl grpo --beta $B",
        "B=(0.04); B[0]=1; trl grpo --beta $B",
        "set -- 0.04; trl grpo --beta ${1:-0.1}",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in COMPUTED for text in COMPUTED[name]])
def test_a_value_that_only_a_run_of_the_script_knows_is_asked_for(name, text, read):
    by_hand = "add" if name == "run.py" else "give it by"
    with pytest.raises(RunFileError, match=f"remedy: {by_hand} --set beta=VALUE"):
        read(text, name)
    run = read(text, name, beta="0.25")
    assert (run.settings["beta"], run.overrides) == (0.25, ["beta"])


REFUSED = {
    "run.sh": [
        ("trl grpo --config base.yaml --loss_type dr_grpo", "what is in base.yaml is not read"),
        ("accelerate launch src/grpo.py --config recipes/a.yaml", "what is in recipes/a.yaml is not read"),
        ("python -m verl.trainer.main_ppo --config-name=mine a.b=1", "what is in mine.yaml is not read"),
        ("python -m verl.trainer.main_ppo --config-path $D -cn ppo_trainer", r"what is in \$D/ppo_trainer.yaml is not"),
        ("main_ppo algorithm=mine", "each setting by its whole name; received algorithm, the beginning of others"),
        ("trl grpo --bet 0.04", "received bet, the beginning of others"),
        ("main_ppo algorithm.use_kl_in_rewards=True", "algorithm.use_kl_in_rewards, which may be of a KL"),
        ("main_ppo ~algorithm.kl_coef", "algorithm.kl_coef, which may be of a KL"),
        ("trl grpo --kl_weight 0.1", "kl_weight, which may be of a KL"),
        ("python -m openrlhf.cli.train_ppo_ray --use_kl_estimator_k3", "use_kl_estimator_k3, which may be of a KL"),
        ("trl grpo --beta 0.1 $(cat more)", r"what is in \$\(cat more\) is not read"),
        ('f() {\n trl grpo --beta 0.1 "$@"\n}\nf --beta 1', r"what is in \$@ is not read"),
        ('set -- --beta 0.04 --loss_type grpo; trl grpo "$@"', r"what is in \$@ is not read"),
        ("if $x; then A='--beta 0.1'; fi; trl grpo $A", r"what is in \$A is not read"),
        ("trl grpo --beta 0.1\ntrl grpo --beta 0.2", "one command that starts a run; .* trl grpo and trl grpo"),
        ("klgrad train --model m", "--dry-run"),
        ("trl sft --per_device_train_batch_size 2", "none of their settings"),
        ("trl dpo --beta 0.1", "none of their settings"),
        ("torchrun -m verl.trainer.sft_trainer data.train_batch_size=9", "none of their settings"),
        ("uv run -m skyrl.train.entrypoints.main_generate trainer.algorithm.lambd=1", "none of their settings"),
        ("beta=0.1", "none of their settings"),
        ("echo trl grpo --beta 0.1", "none of their settings"),
        ("trl grpo --beta --use_vllm", "beta as a number; received True"),
        ("main_ppo algorithm.use_kl_in_reward=no", "use_kl_in_reward as true or false; received 'no'"),
        ("trl grpo --beta 'x", "a shell script"),
    ],
    "run.yaml": [
        ("beta: [", "as YAML"),
        ("- beta", "names and values"),
        ("learning_rate: 1", "name the framework"),
        ("loss_type: grpo\nbeta: much", "beta as a number; received 'much'"),
        ("use_bias_correction_kl: maybe", "true or false"),
        ("loss_type: grpo\nbeta: true", "beta as a number; received True"),
        ("num_iterations: 2.5", "num_iterations as a whole number; received 2.5"),
        ("loss_type: sigmoid", "loss_type as one of dapo"),
        ("kl_coef: 0.1", "klgrad train --config FILE --dry-run"),
        ("algorithm: {use_kl_in_reward: '${x}'}", "--cfg job --resolve"),
        ("trainer: {algorithm: {use_kl_in_reward: true}}", "SkyRL refuses both"),
    ],
    "run.json": [
        ("{", "as JSON"),
    ],
    "run.py": [
        ("GRPOConfig(beta=", "a Python script"),
        ("GRPOConfig(beta=1)\nRLOOConfig()", "with GRPOConfig in line 1 and RLOOConfig in line 2"),
        ("KLConfig(num_iterations=2)", "klgrad train --config FILE --dry-run"),
        ("GRPOConfig(beta='much')", "beta as a number; received 'much'"),
    ],
}
"""By the name of the file."""


@pytest.mark.parametrize(("name", "text", "message"), [(name, *row) for name in REFUSED for row in REFUSED[name]])
def test_what_is_not_read_is_refused_and_named(name, text, message, read):
    with pytest.raises(RunFileError, match=message):
        read(text, name)


@pytest.mark.parametrize("folder", [".", "scripts"])
def test_the_file_that_a_command_names_is_read(folder, tmp_path, read):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "base.yaml").write_text("beta: 0.04\nloss_type: grpo\n")
    run = read("trl grpo --config conf/base.yaml --loss_type dr_grpo", f"{folder}/run.sh")
    assert (run.settings["beta"], run.settings["loss_type"]) == (0.04, "dr_grpo")
    assert any("base.yaml" in note for note in run.notes)


def test_a_configuration_of_hydra_is_read_with_its_defaults(tmp_path, read):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "base.yaml").write_text("actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_type: k2}}")
    mine = tmp_path / "conf" / "mine.yaml"
    mine.write_text("defaults: [ppo_trainer, base, _self_]\nactor_rollout_ref: {actor: {kl_loss_type: k3}}")
    text = "D=conf\npython -m verl.trainer.main_ppo --config-path=$D --config-name='mine' data.train_batch_size=8"
    for run in (read(text), read_run(mine, "verl")):
        assert run.parts[0].loss == "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean"
    mine.write_text("defaults: [ppo_trainer, other]\nalgorithm: {use_kl_in_reward: true}")
    with pytest.raises(RunFileError, match="other among its defaults"):
        read(text)


def test_a_configuration_of_verl_itself_has_the_defaults(read):
    text = "main_ppo --config-path=config --config-name=ppo_megatron_trainer.yaml algorithm.use_kl_in_reward=True"
    assert read(text).settings["algorithm.use_kl_in_reward"] is True


def test_flags_of_openrlhf_before_0_10_2(read):
    flags = "--use_kl_loss --kl_estimator k2 --init_kl_coef 1e-5 --advantage_estimator reinforce_baseline"
    run = read(f"ray job submit -- python3 -m openrlhf.cli.train_ppo_ray {flags} --max_epochs 2")
    assert run.framework == "openrlhf"
    assert run.parts[0].loss == "openrlhf algo.kl.use_loss estimator=k2 unbiased_gradient=False"
    assert run.parts[0].coefficient == 1e-5
    assert run.settings["algo.advantage.estimator"] == "reinforce_baseline"
    assert run.settings["train.max_epochs"] == 2
    assert any("before 0.10.2" in note for note in run.notes)
    in_reward = read({"init_kl_coef": 0.1, "no_advantage_std_norm": True})
    assert [(change.name, change.optional) for change in in_reward.changes] == [("advantage_estimator", True)]


@pytest.mark.parametrize(
    ("program", "framework"),
    [
        ("python -m verl.trainer.main_ppo", "verl"),
        ("python verl/trainer/main_ppo.py", "verl"),
        ("uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base", "skyrl"),
        ("python -m openrlhf.cli.train_ppo_ray", "openrlhf"),
        ("trl rloo", "trl"),
        ("accelerate launch --num_processes 8 -m trl.scripts.grpo", "trl"),
    ],
)
def test_the_program_tells_the_framework(program, framework, read):
    assert read(f"{program} --seed 1").framework == framework


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "python train_dpo.py --beta 0.1 --max_completion_length 100"),
        ("run.yaml", "beta: 0.1\nsync_ref_model: true\nmax_completion_length: 100\nuse_vllm: true"),
        ("run.py", "args = DPOConfig(beta=0.1)"),
    ],
)
def test_settings_that_other_trainers_have_too_do_not_tell_trl(name, text, read):
    with pytest.raises(RunFileError, match="none of their settings that no other trainer has"):
        read(text, name)
    assert read(text, name, "trl").settings["beta"] == 0.1


def test_a_file_of_another_framework_is_refused(read):
    with pytest.raises(RunFileError, match=r"a configuration of verl; received .*, which looks like TRL's"):
        read_run(FILES / "grpo.yaml", "verl")
    with pytest.raises(RunFileError, match="which looks like OpenRLHF's"):
        read_run(FILES / "openrlhf.sh", "trl")
    with pytest.raises(RunFileError, match="none of their settings"):
        read({"learning_rate": 1}, framework="trl")


def test_settings_beside_the_file(tmp_path):
    shown = advised("--config", FILES / "rloo.yaml", "--set", "beta=0", "--json", tmp_path / "out.json")
    assert "This run has no KL to a reference." in shown
    settings = json.loads((tmp_path / "out.json").read_text())["settings"]
    assert settings["beta"] == {"value": 0.0, "from": "set"}
    assert settings["normalize_advantages"]["from"] == "file"
    with pytest.raises(UnknownNameError, match="beta"):
        read_run(FILES / "rloo.yaml", settings={"bta": "1"})
    for arguments in (["--set", "beta=1"], ["--config", str(FILES / "rloo.yaml"), "--set", "beta"]):
        assert isinstance(CliRunner().invoke(app, ["advise", *arguments]).exception, RunFileError)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("run.sh", "trl grpo --beta 0.1 --loss_type grpo", ["--loss_type dr_grpo  # was grpo: "]),
        ("run.py", "GRPOConfig(beta=0.1, loss_type='grpo')", ["loss_type='dr_grpo',  # was grpo: "]),
        ("run.yaml", "beta: 0.1\nloss_type: grpo", ["loss_type: dr_grpo  # was grpo: "]),
        (
            "verl.yaml",
            "actor_rollout_ref: {actor: {use_kl_loss: true}}",
            [
                "actor_rollout_ref:\n  actor:\n    kl_loss_type: low_var_kl+  # was",
                "\n    loss_agg_mode: seq-mean-token-sum",
            ],
        ),
        ("verl.sh", "main_ppo algorithm.adv_estimator=grpo", ["actor_rollout_ref.actor.use_kl_loss=true  # was false"]),
    ],
)
def test_changes_are_written_as_the_file_takes_them(name, text, lines, tmp_path, nothing_installed):
    (tmp_path / name).write_text(text)
    shown = advised("--config", tmp_path / name)
    assert all(f"\n{line.lstrip()}" in shown or line in shown for line in lines), shown


def test_aliases_without_end_are_refused_at_once(read):
    levels = [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghi")]
    for last in ("loss_type: *i", "x: &x {<<: [*x]}"):
        began = time.monotonic()
        with pytest.raises(RunFileError):
            read("\n".join(["a: &a [1, 1]", *levels, last]), "run.yaml", "trl")
        assert time.monotonic() - began < 1
    with pytest.raises(RunFileError, match="beta as one value; received a list"):
        read("a: &a [1]\nbeta: *a", "run.yaml", "trl")


@pytest.mark.parametrize(("rows", "audited"), [(1, "grpo"), (8, "bnpo")])
def test_bnpo_divides_by_the_tokens_of_a_forward_pass(rows, audited, read):
    run = read({"beta": 0.1, "loss_type": "bnpo", "per_device_train_batch_size": rows})
    (change,) = run.changes
    assert (change.name, change.value, change.optional) == ("loss_type", "dr_grpo", False)
    assert f"one forward pass, of per_device_train_batch_size={rows} completions" in change.why
    assert ("the length of each completion" in change.why) == (rows == 1)
    assert f"loss_type={audited}" in run.parts[0].loss
    assert "forward pass" in run.parts[0].caveat


def test_a_coefficient_of_zero_is_no_kl(read, changed):
    for settings in (
        {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": 0.0},
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.0},
        {"trainer.algorithm.kl_loss_coef": 0.0},
    ):
        run = read(settings)
        assert run.parts == []
        assert [part.coefficient for part in changed(run).parts] == [0.001]


OPENRLHF_REWARD = "openrlhf algo.kl in reward estimator=k1 advantage="


@pytest.mark.parametrize(
    ("estimator", "flag", "advantage", "why"),
    [
        ("gae", False, "gae critic=0", "standard deviation"),
        ("gae", True, "gae critic=0 no_std_norm", "mean of the batch"),
        ("reinforce", False, "reinforce", "standard deviation"),
        ("reinforce", True, "reinforce no_std_norm", "mean of the batch"),
        ("reinforce_baseline", True, "reinforce_baseline no_std_norm", "mean of the batch"),
        ("rloo", True, "rloo", None),
        ("group_norm", True, "group_norm", None),
    ],
)
def test_no_std_norm_of_openrlhf_leaves_the_kl_undivided(estimator, flag, advantage, why, nothing_installed, read):
    settings = {"algo.advantage.estimator": estimator, "algo.advantage.no_std_norm": flag}
    run = read(settings)
    (found,) = find(run)
    assert found.part.loss == OPENRLHF_REWARD + advantage
    assert (found.verdict == "") == ("reinforce" in estimator)  # of the whitened ones only GAE is in the records
    assert found.source.startswith("recorded on" if found.verdict else "not audited")
    assert [(why in change.why, change.optional) for change in run.changes] == ([(True, flag)] if why else [])


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"beta": -0.1, "loss_type": "grpo"}, "loss"),
        ({"beta": "-1e-1", "normalize_advantages": False}, "reward"),
        ({f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": -0.1}, "loss"),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": -0.1}, "reward"),
        ({"algo.kl.init_coef": -0.1}, "reward"),
        ({"algo.kl.init_coef": -0.1, "algo.kl.use_loss": True}, "loss"),
        ({"trainer.algorithm.kl_loss_coef": -0.1}, "loss"),
        ({"beta": "nan", "loss_type": "grpo"}, "loss"),
    ],
    ids=str,
)
def test_a_kl_with_a_coefficient_below_0_or_that_is_no_number_is_refused(settings, place, read):
    message = f"at least 0 for the KL in the {place}; received (-0.1|nan); remedy: a negative coefficient rewards"
    with pytest.raises(RunFileError, match=message):
        read(settings)


def test_a_framework_without_a_reader(tmp_path):
    with pytest.raises(UnknownNameError):
        read_run(FILES / "grpo.yaml", "liger")
    with pytest.raises(RunFileError, match="No such file"):
        read_run(tmp_path / "none.yaml")


@pytest.mark.slow
def test_no_field_of_trl_is_taken_for_an_unknown_kl():
    trl = pytest.importorskip("trl")
    for config in (trl.GRPOConfig, trl.RLOOConfig):
        names = [field.name for field in dataclasses.fields(config)]
        assert names_like_a_kl(names, "trl") == []


# What is said about it

TRL_RUNS = [
    {"beta": beta, "loss_type": kind, "importance_sampling_level": level, "use_bias_correction_kl": corrected}
    for beta, kind, level, corrected in product(
        (0.0, 0.1),
        ("dapo", "grpo", "dr_grpo", "luspo", "bnpo", "cispo", "vespo", "sapo"),
        ("token", "sequence"),
        (True, False),
    )
] + [{"beta": 0.1, "loss_type": "dr_grpo", "mask_truncated_completions": True}]
RLOO_RUNS = [
    {"beta": 0.1, "normalize_advantages": by_std, "mask_truncated_completions": masked}
    for by_std, masked in product((True, False), (True, False))
]
VERL_RUNS = [
    {
        f"{ACTOR}use_kl_loss": in_loss,
        "algorithm.use_kl_in_reward": in_reward,
        f"{ACTOR}kl_loss_type": kind,
        "algorithm.kl_penalty": kind,
        "algorithm.adv_estimator": advantage,
    }
    for (in_loss, in_reward), kind, advantage in product(
        ((True, False), (False, True), (False, False)),
        ("kl", "k1", "low_var_kl", "k3", "low_var_kl+", "mse", "abs", "kl+"),
        ("gae", "grpo", "rloo", "reinforce_plus_plus"),
    )
]


@pytest.mark.parametrize("settings", [*TRL_RUNS, *RLOO_RUNS, *VERL_RUNS], ids=str)
def test_the_lines_to_change_lead_to_the_reverse_kl(settings, read, changed):
    run = read(settings)
    better = changed(run)
    assert better.changes == []
    assert better.target == run.target
    known = recorded(run.framework).verdicts
    assert [known[part.loss][0] for part in better.parts] == [run.target]
    if settings in TRL_RUNS:  # those that are not optional are those of large batches
        large = changed(run, optional=False)
        assert [change.name for change in large.changes if not change.optional] == []
        assert large.settings["loss_type"] not in ("grpo", "sapo")


def test_recorded_where_the_framework_is_not_installed(nothing_installed):
    (found,) = find(read_run(FILES / "verl.sh"))
    assert (found.verdict, found.verdict_off_policy) == ("unknown", "unknown")
    assert found.source.startswith("recorded on 2026-")
    shown = advised("--config", FILES / "verl.sh")
    assert "KL in the loss, β = 0.001" in shown
    assert "actor_rollout_ref.actor.kl_loss_type=low_var_kl+  # was low_var_kl: " in shown
    assert "stale here: data.train_batch_size=1024 above actor_rollout_ref.actor.ppo_mini_batch_size=256" in shown
    assert "ppo_epochs           1           default" in shown


def test_settings_that_were_never_audited_are_not_said_to_be_right(tmp_path, read, nothing_installed):
    (found,) = find(read({f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_type": "abs"}))
    assert (found.verdict, found.source) == ("", "not audited: install verl to audit these settings")
    own = {"level": "token", "ratio": "token", "ratio_bound": "truncate:3"}
    assert read({"klgrad": own, f"{ACTOR}loss_agg_mode": "seq-mean-token-sum"}).changes == []
    shown = advised("--config", tmp_path / "run.json")
    assert "Nothing to change" not in shown
    assert "Whether this is the reverse KL, token by token (reverse-kl-token), was not audited here." in shown


def test_a_loss_that_was_never_audited_has_no_caveat_of_an_audit(tmp_path, read, nothing_installed):
    for estimator, audited in (("remax", False), ("gae", True)):
        read({"algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": estimator})
        assert ("Audited with" in advised("--config", tmp_path / "run.json")) == audited


def test_a_run_without_a_kl(tmp_path):
    (tmp_path / "run.yaml").write_text("loss_type: dapo\n")
    shown = advised("--config", tmp_path / "run.yaml", "--json", tmp_path / "run.out")
    assert "This run has no KL to a reference." in shown
    assert "beta: 0.04  # was 0: without it TRL loads no reference and has no KL" in shown
    data = json.loads((tmp_path / "run.out").read_text())
    assert (data["kl"], data["framework"], data["target"]) == ([], "trl", "reverse-kl-token")
    assert data["settings"]["beta"] == {"value": 0.0, "from": "default"}
    assert data["changes"][0] == {
        "name": "beta",
        "value": 0.04,
        "was": 0.0,
        "why": "without it TRL loads no reference and has no KL",
        "optional": False,
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_audited_where_trl_is_installed():
    pytest.importorskip("trl")
    data = json.loads(advised("--config", FILES / "grpo.yaml", "--json", "-"))
    (kl,) = data["kl"]
    assert kl["verdict"] == "forward-kl-token"
    assert (kl["holds"], kl["words"]) == ("always", "forward KL, token by token")
    assert kl["source"].startswith("audited here with trl ")


# Defaults


@pytest.mark.slow
def test_the_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl")
    for kind, config in (("grpo", trl.GRPOConfig), ("rloo", trl.RLOOConfig)):
        known = {field.name: field.default for field in dataclasses.fields(config)}
        assert TRAINERS[kind] == {name: known[name] for name in TRAINERS[kind]}


def test_the_defaults_are_those_of_verl():
    pytest.importorskip("verl.workers")
    yaml = pytest.importorskip("yaml")
    from klgrad.frameworks.harness import path_of

    path = path_of("verl", "verl/trainer/config/_generated_ppo_trainer.yaml")
    assert names_like_a_kl(read_data(path), "verl") == []
    known = yaml.safe_load(path.read_text())
    for name, default in VERL.items():
        value = known
        for key in name.split("."):
            value = value[key]
        assert value == default, name


def test_files_are_read_without_torch_and_without_a_framework():
    lines = f"""
import sys
from pathlib import Path
from klgrad.frameworks.run_file import read_run
for file in ("grpo.yaml", "grpo_arguments.py", "openrlhf.sh", "skyrl.yaml", "verl.sh"):
    read_run(Path({str(FILES)!r}) / file)
print(sorted({{"torch", "trl", "verl", "transformers", "openrlhf", "skyrl"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr

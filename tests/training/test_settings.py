"""Settings of a run: flags, files, presets, recorded ones, and code that they name."""

import json
import shlex

import pytest
from training.small import arguments

from klgrad.errors import MeaningError, RunError, SettingError, UnknownNameError
from klgrad.training.report import formula, objective_lines
from klgrad.training.settings import code_settings, parse, resume_command
from klgrad.trl.config import MeaningWarning

# Flags over a file over a preset over TRL; what cannot be understood is named with its nearest.


CPU = ("--use_cpu",)


def test_flags_win_over_the_file_and_the_file_over_the_preset(yaml):
    file = yaml("quick: true\nlearning_rate: 3e-5\nkl_coef: 0.5\nmodel: smollm2:20\n")
    found = parse("train", [*file, "--kl_coef", "0.25", *CPU])
    assert found.training.kl_coef == 0.25
    assert found.training.learning_rate == 3e-5
    assert found.training.num_generations == 4  # of the preset
    assert found.training.epsilon == 0.2  # of TRL
    assert found.policy.model_name_or_path == "smollm2:20"
    assert parse("train", ["--model", "smollm2:20", *CPU]).policy.model_name_or_path == "smollm2:20"


def test_a_model_of_ones_own_gets_trls_defaults():
    assert parse("train", ["--model", "some/where", *CPU]).training.max_completion_length == 512
    assert parse("train", [*CPU]).training.max_completion_length == 32


def test_epochs_are_not_overruled_by_a_preset():
    assert parse("train", ["--num_train_epochs", "2", *CPU]).training.max_steps == -1
    assert parse("train", [*CPU]).training.max_steps > 0


@pytest.fixture
def own(tmp_path):
    """A file with terms of a user."""
    path = tmp_path / "my.py"
    path.write_text(
        "from klgrad import KLTerm, divergences\n"
        'huber = KLTerm(divergence="huber(1)", level="token")\n'
        'cubic = KLTerm(divergence=divergences.from_slope("cubic", lambda l: l + l**3, "l + l^3"), level="token")\n'
        "number = 1\n"
    )
    return str(path)


@pytest.mark.parametrize("command", ["train", "distill"])
def test_a_term_of_ones_own_takes_the_place_of_the_settings(own, command):
    huber = parse(command, ["--kl", f"{own}:huber", *CPU])
    same = ["--kl_divergence", "huber(1)", "--kl_level", "token", "--kl_estimator", "sampled"]
    assert huber.training.objective == parse(command, [*same, *CPU]).training.objective
    cubic = parse(command, ["--kl", f"{own}:cubic", *CPU])
    assert formula(cubic).startswith("∇ cubic, token level = E_π[ Σ_t (l_t + l_t^3) ∇log π(y_t) ]")
    assert json.loads(cubic.training.to_json_string())["kl_divergence"] == "cubic"


def test_a_term_and_settings_of_another_are_refused(own):
    with pytest.raises(SettingError, match="no setting of the term beside `kl`; received kl_level"):
        parse("train", ["--kl", f"{own}:huber", "--kl_level", "sequence", *CPU])
    with pytest.raises(SettingError, match=r"the name of a KLTerm; received .*number, a int"):
        parse("train", ["--kl", f"{own}:number", *CPU])
    with pytest.raises(UnknownNameError, match="huber"):
        parse("train", ["--kl", f"{own}:hubr", *CPU])


def test_distillation_is_only_the_kl():
    found = parse("distill", [*CPU])
    assert (found.training.teacher, found.training.kl_coef, found.training.objective.exact) == ("smollm2", 1.0, True)
    assert found.policy.model_name_or_path is None


def test_distillation_uses_completions_again_where_that_needs_no_weights():
    found = parse("distill", [*CPU])
    assert (found.training.num_iterations, found.training.lr_scheduler_type) == (8, "cosine")
    assert formula(found).startswith("∇ KL(π‖ref) of the next token, at the prefixes of μ = E_μ[ Σ_t ∇KL_t ]")
    assert formula(found).endswith("; μ is what sampled the completions (num_iterations=8)")
    for same in (["--kl_discount", "0"], ["--kl_level", "token"], ["--kl_coef", "2"], ["--kl_memory", "512"]):
        again = parse("distill", [*same, *CPU]).training
        assert (again.num_iterations, again.learning_rate, again.max_steps) == (8, 6e-4, 320)


@pytest.mark.parametrize("uses", [2, 4])
def test_fewer_uses_of_each_batch_leave_the_number_of_completions(uses):
    found = parse("distill", ["--num_iterations", str(uses), *CPU]).training
    assert (found.num_iterations, found.max_steps) == (uses, 40 * uses)


@pytest.mark.parametrize(
    "other",
    [
        ["--kl_discount", "0.5"],
        ["--kl_estimator", "k1"],
        ["--kl_top_k", "64"],
        ["--kl_baseline", "leave_one_out", "--kl_discount", "0.5"],
        ["--kl_divergence", "forward", "--kl_level", "token"],
        ["--reward", "a:b"],
        ["--num_iterations", "1"],
    ],
)
def test_any_other_distillation_samples_anew(other):
    found = parse("distill", [*other, *CPU])
    assert (found.training.num_iterations, found.training.learning_rate, found.training.max_steps) == (1, 3e-4, 40)
    assert "; on-policy" in formula(found)


@pytest.mark.parametrize("name", ["kl_discount", "num_iterations"])
def test_what_a_preset_looks_at_is_still_checked(name, yaml):
    with pytest.raises(SettingError):
        parse("distill", [*yaml(f"{name}: much\n"), *CPU])


def test_what_changes_the_meaning_is_announced_and_not_warned_of_twice(recwarn):
    found = parse("train", ["--top_p", "0.9", "--num_iterations", "2", *CPU])
    notes = [line for line in objective_lines(found) if line.startswith("note: ")]
    assert ["top_p=0.9" in line or "uncorrected" in line for line in notes] == [True, True]
    assert not [each for each in recwarn if issubclass(each.category, MeaningWarning)]
    assert not [line for line in objective_lines(parse("train", [*CPU])) if line.startswith("note: ")]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (["--kl_coeff", "1"], UnknownNameError, "did you mean 'kl_coef'"),
        (["--kl_level", "tokens"], SettingError, "invalid choice: 'tokens'"),
        (["--kl_coef", "-1"], MeaningError, "`kl_coef` >= 0"),
        (["--num_generations", "1", "--kl_baseline", "leave_one_out"], SettingError, "at least 2 generations"),
        (["--generation_batch_size", "7"], SettingError, "settings that fit together.*generation_batch_size"),
        (["--rollout_lag", "1"], MeaningError, "`kl_ratio` with `rollout_lag`"),
        (["--config"], SettingError, "--config: expected one argument"),
        (["--config", "missing.yaml"], SettingError, "No such file"),
        (["stray"], UnknownNameError, "stray"),
    ],
)
def test_what_cannot_be_used(given, error, said):
    with pytest.raises(error, match=said):
        parse("train", [*given, *CPU])


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("kl_coef: [1", SettingError, "line"),
        ("- a\n- b\n", SettingError, "list"),
        ("kl_coff: 1\n", UnknownNameError, "did you mean 'kl_coef'"),
        ("max_steps: 3.7\n", SettingError, "argument --max_steps/--max-steps: invalid int value: '3.7'"),
    ],
)
def test_a_file_that_cannot_be_used(yaml, text, error, said):
    with pytest.raises(error, match=said):
        parse("train", [*yaml(text), *CPU])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("distill", {"kl_estimator": "k1", "kl_discount": 1.0}),
        ("train", {"quick": True, "learning_rate": 1e-6, "kl_coef": 0.05, "max_steps": -1}),
    ],
)
def test_what_was_given_starts_the_same_run_again(command, said, tmp_path, monkeypatch):
    """Also what is TRL's default and not the preset's; and what the preset said stays when the preset changes."""
    first = parse(command, arguments(**said, output_dir=tmp_path, use_cpu=True))
    assert {**first.given, **said} == first.given
    (tmp_path / "run.json").write_text(json.dumps({"command": command, "settings": first.given}))
    monkeypatch.setattr("klgrad.training.settings.DEFAULTS", {"save_steps": 7, "kl_coef": 7.0, "temperature": 0.5})
    again = parse(command, arguments(output_dir=tmp_path, resume=True))
    before, after = first.training.to_dict(), again.training.to_dict()
    assert {k for k in before if before[k] != after[k]} <= {"logging_dir"}
    assert vars(again.run) == {**vars(first.run), "resume": True}
    assert again.given == first.given
    assert parse(command, arguments(output_dir=tmp_path, resume=True, kl_coef=0.75)).training.kl_coef == 0.75


def test_another_commands_run_is_not_gone_on_with(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"command": "distill", "settings": {}}))
    with pytest.raises(RunError, match=r"a run of klgrad train; received .*, of klgrad distill"):
        parse("train", arguments(output_dir=tmp_path, resume=True))


def test_the_quick_preset_saves_and_evaluates_half_way():
    found = parse("train", ["--quick", *CPU])
    assert (found.training.max_steps, found.training.save_steps, found.run.eval_every) == (10, 5, 5)
    assert found.run.weights_only
    assert not parse("train", ["--quick", "--weights_only", "false", *CPU]).run.weights_only
    assert not parse("train", list(CPU)).run.weights_only


# Values of a file are read as on a command line; ranges of this package's settings are checked before a run.


@pytest.mark.parametrize(("name", "bound"), [("eval_every", 0), ("num_processes", 1)])
def test_a_flag_out_of_its_range(name, bound):
    with pytest.raises(SettingError, match=f"`{name}` >= {bound}; received -1"):
        parse("train", [f"--{name}=-1", *CPU])


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("seed: null", "seed", 42),  # no value: the default
        ("learning_rate: 3e-5", "learning_rate", 3e-5),  # text, by YAML's rules
        ("reward_weights: 0.5\nreward: a:b", "reward_weights", [0.5]),
        ("reward_weights: [1e-1, 2]\nreward: 'a:b,a:c'", "reward_weights", [0.1, 2]),
        ("report_to: [wandb, tensorboard]", "report_to", ["wandb", "tensorboard"]),
        ("model_init_kwargs: {use_cache: false}", "model_init_kwargs", {"use_cache": False}),
        ("task: [addition, subtraction]", "task", "addition,subtraction"),
        ("resume: 'false'", "resume", False),  # its words are understood before anything depends on them
    ],
)
def test_what_is_taken_from_a_file(yaml, text, name, value):
    found = parse("train", [*yaml(f"{text}\n"), *CPU])
    assert {**vars(found.policy), **vars(found.run), **vars(found.training)}[name] == value


# Code that only the `run.json` of a folder names is not executed.


REWARD = """
def one(completions, **_):
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"reward": "a.py:f", "kl_coef": 1}, ["reward"]),
        ({"reward": None, "trust_remote_code": False}, []),
        ({"trust_remote_code": True}, ["trust_remote_code"]),
        ({"model_init_kwargs": {"trust_remote_code": True}}, ["model_init_kwargs"]),
        ({"model_init_kwargs": '{"trust_remote_code": true}'}, ["model_init_kwargs"]),
        ({"model_init_kwargs": '{"trust_remote_code": true'}, ["model_init_kwargs"]),
        ({"model_init_kwargs": {"dtype": "float32"}}, []),
        ({"attn_implementation": "sdpa"}, []),
        ({"attn_implementation": "owner/kernel"}, ["attn_implementation"]),
        ({"model_init_kwargs": {"attn_implementation": {"": "owner/kernel"}}}, ["model_init_kwargs"]),
        ({"model_init_kwargs": {"experts_implementation": "owner/kernel"}}, ["model_init_kwargs"]),
        ({"model_init_kwargs": {"use_kernels": True}}, ["model_init_kwargs"]),
    ],
)
def test_which_settings_execute_code(settings, names):
    assert list(code_settings(settings)) == names


@pytest.fixture
def received(tmp_path):
    """A run folder with settings of somebody else's."""

    def made(**settings):
        folder = tmp_path / "received run"
        folder.mkdir(exist_ok=True)
        content = {"command": "train", "settings": {"use_cpu": True, **settings}}
        (folder / "run.json").write_text(json.dumps(content))
        return folder

    return made


@pytest.mark.parametrize("settings", [{"reward": "evil.py:f"}, {"model_init_kwargs": {"trust_remote_code": True}}])
def test_code_of_a_run_folder_has_to_be_named_again(settings, received):
    folder = received(**settings)
    with pytest.raises(RunError) as refused:
        parse("train", ["--output_dir", str(folder), "--resume"])
    program, command, *given = shlex.split(refused.value.remedy.partition(": ")[2])
    assert (program, command) == ("klgrad", "train")
    parsed = parse(command, given)  # exactly what it says to type
    assert all(parsed.given[name] for name in settings)


def test_a_file_that_is_named_counts(received, tmp_path):
    folder = received(reward="mine.py:f")
    (tmp_path / "settings.yaml").write_text("reward: mine.py:f\n")
    given = ["--output_dir", str(folder), "--resume", "--config", str(tmp_path / "settings.yaml")]
    assert parse("train", given).run.reward == "mine.py:f"


def test_code_can_be_refused(received):
    folder = received(trust_remote_code=True)
    given = ["--output_dir", str(folder), "--resume", "--trust_remote_code", "False"]
    assert not parse("train", given).training.trust_remote_code


def test_what_to_type_is_said_after_a_stop(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    assert "--reward mine.py:one" in resume_command("train", tmp_path, {"reward": "mine.py:one"})

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("klgrad.training.run.Recorder.evaluate_on_schedule", interrupted)
    status, text = run("train", "run", reward="mine.py:one", eval_size=0, max_steps=2)
    assert status == 130
    assert "klgrad train --output_dir run --resume --reward mine.py:one" in " ".join(text.split())

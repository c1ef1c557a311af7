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


def parsed(command, *words, **settings):
    """The settings of a command line on a CPU."""
    return parse(command, [*words, *arguments(**settings), "--use_cpu"])


def test_flags_win_over_the_file_and_the_file_over_the_preset(yaml):
    file = yaml("quick: true\nlearning_rate: 3e-5\nkl_coef: 0.5\nmodel: smollm2:20\n")
    found = parsed("train", *file, kl_coef=0.25)
    assert found.training.kl_coef == 0.25
    assert found.training.learning_rate == 3e-5
    assert found.training.num_generations == 4  # of the preset
    assert found.training.epsilon == 0.2  # of TRL
    assert found.policy.model_name_or_path == "smollm2:20"
    assert parsed("train", model="smollm2:20").policy.model_name_or_path == "smollm2:20"


def test_what_the_presets_are_for():
    """A model of one's own gets TRL's defaults; epochs are not overruled; a quick run saves and evaluates half way."""
    default, quick = parsed("train"), parsed("train", quick=True)
    assert parsed("train", model="some/where").training.max_completion_length == 512
    assert default.training.max_completion_length == 32
    assert parsed("train", num_train_epochs=2).training.max_steps == -1
    assert default.training.max_steps > 0
    assert (quick.training.max_steps, quick.training.save_steps, quick.run.eval_every) == (10, 5, 5)
    no = parsed("train", quick=True, weights_only="false")
    assert [each.run.weights_only for each in (quick, no, default)] == [True, False, False]


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
    huber = parsed(command, kl=f"{own}:huber")
    same = parsed(command, kl_divergence="huber(1)", kl_level="token", kl_estimator="sampled")
    assert huber.training.objective == same.training.objective
    cubic = parsed(command, kl=f"{own}:cubic")
    assert formula(cubic).startswith("∇ cubic, token level = E_π[ Σ_t (l_t + l_t^3) ∇log π(y_t) ]")
    assert json.loads(cubic.training.to_json_string())["kl_divergence"] == "cubic"


@pytest.mark.parametrize(
    ("name", "more", "error", "said"),
    [
        ("huber", {"kl_level": "sequence"}, SettingError, "no setting of the term beside `kl`; received kl_level"),
        ("number", {}, SettingError, r"the name of a KLTerm; received .*number, a int"),
        ("hubr", {}, UnknownNameError, "huber"),
    ],
)
def test_a_term_and_settings_of_another_are_refused(name, more, error, said, own):
    with pytest.raises(error, match=said):
        parsed("train", kl=f"{own}:{name}", **more)


@pytest.mark.parametrize("same", [{}, {"kl_discount": 0}, {"kl_level": "token"}, {"kl_coef": 2}, {"kl_memory": 512}])
def test_distillation_uses_completions_again_where_that_needs_no_weights(same):
    found = parsed("distill", **same)
    training = found.training
    assert (training.teacher, training.kl_coef) == ("smollm2", same.get("kl_coef", 1.0))
    assert training.objective.exact
    assert found.policy.model_name_or_path is None
    assert (training.num_iterations, training.learning_rate, training.max_steps) == (8, 6e-4, 320)
    assert training.lr_scheduler_type == "cosine"
    assert formula(found).startswith("∇ KL(π‖ref) of the next token, at the prefixes of μ = E_μ[ Σ_t ∇KL_t ]")
    assert formula(found).endswith("; μ is what sampled the completions (num_iterations=8)")


@pytest.mark.parametrize("uses", [2, 4])
def test_fewer_uses_of_each_batch_leave_the_number_of_completions(uses):
    found = parsed("distill", num_iterations=uses).training
    assert (found.num_iterations, found.max_steps) == (uses, 40 * uses)


@pytest.mark.parametrize(
    "other",
    [
        {"kl_discount": 0.5},
        {"kl_estimator": "k1"},
        {"kl_top_k": 64},
        {"kl_baseline": "leave_one_out", "kl_discount": 0.5},
        {"kl_divergence": "forward", "kl_level": "token"},
        {"reward": "a:b"},
        {"num_iterations": 1},
    ],
)
def test_any_other_distillation_samples_anew(other):
    found = parsed("distill", **other)
    assert (found.training.num_iterations, found.training.learning_rate, found.training.max_steps) == (1, 3e-4, 40)
    assert "; on-policy" in formula(found)


def test_what_changes_the_meaning_is_announced_and_not_warned_of_twice(recwarn):
    noted = lambda found: [line for line in objective_lines(found) if line.startswith("note: ")]
    notes = noted(parsed("train", top_p=0.9, num_iterations=2))
    assert ["top_p=0.9" in line or "uncorrected" in line for line in notes] == [True, True]
    assert not [each for each in recwarn if issubclass(each.category, MeaningWarning)]
    assert not noted(parsed("train"))


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
        (["--eval_every=-1"], SettingError, "`eval_every` >= 0; received -1"),
        (["--num_processes=-1"], SettingError, "`num_processes` >= 1; received -1"),
    ],
)
def test_what_cannot_be_used(given, error, said):
    with pytest.raises(error, match=said):
        parsed("train", *given)


@pytest.mark.parametrize(
    ("command", "text", "error", "said"),
    [
        ("train", "kl_coef: [1", SettingError, "line"),
        ("train", "- a\n- b\n", SettingError, "list"),
        ("train", "kl_coff: 1\n", UnknownNameError, "did you mean 'kl_coef'"),
        ("train", "max_steps: 3.7\n", SettingError, "argument --max_steps/--max-steps: invalid int value: '3.7'"),
        ("distill", "kl_discount: much\n", SettingError, "much"),  # what a preset looks at is still checked
        ("distill", "num_iterations: much\n", SettingError, "much"),
    ],
)
def test_a_file_that_cannot_be_used(yaml, command, text, error, said):
    with pytest.raises(error, match=said):
        parsed(command, *yaml(text))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("distill", {"kl_estimator": "k1", "kl_discount": 1.0}),
        ("train", {"quick": True, "learning_rate": 1e-6, "kl_coef": 0.05, "max_steps": -1}),
    ],
)
def test_what_was_given_starts_the_same_run_again(command, said, tmp_path, monkeypatch):
    """Also what is TRL's default and not the preset's; and what the preset said stays when the preset changes."""
    first = parsed(command, **said, output_dir=tmp_path)
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


# Values of a file are read as on a command line.


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
    found = parsed("train", *yaml(f"{text}\n"))
    assert {**vars(found.policy), **vars(found.run), **vars(found.training)}[name] == value


# Code that only the `run.json` of a folder names is not executed.


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
    """A run folder with settings of somebody else's, as arguments that resume it."""

    def made(**settings):
        folder = tmp_path / "received run"
        folder.mkdir(exist_ok=True)
        content = {"command": "train", "settings": {"use_cpu": True, **settings}}
        (folder / "run.json").write_text(json.dumps(content))
        return ["--output_dir", str(folder), "--resume"]

    return made


@pytest.mark.parametrize("settings", [{"reward": "evil.py:f"}, {"model_init_kwargs": {"trust_remote_code": True}}])
def test_code_of_a_run_folder_has_to_be_named_again(settings, received):
    with pytest.raises(RunError) as refused:
        parse("train", received(**settings))
    program, command, *given = shlex.split(refused.value.remedy.partition(": ")[2])
    assert (program, command) == ("klgrad", "train")
    parsed = parse(command, given)  # exactly what it says to type
    assert all(parsed.given[name] for name in settings)


def test_a_file_that_names_it_counts_and_code_can_be_refused(received, yaml):
    given = [*received(reward="mine.py:f"), *yaml("reward: mine.py:f\n")]
    assert parse("train", given).run.reward == "mine.py:f"
    given = [*received(trust_remote_code=True), "--trust_remote_code", "False"]
    assert not parse("train", given).training.trust_remote_code


def test_what_to_type_is_said_after_a_stop(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def one(completions, **_): return [1.0] * len(completions)")
    assert "--reward mine.py:one" in resume_command("train", tmp_path, {"reward": "mine.py:one"})

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("klgrad.training.run.Recorder.evaluate_on_schedule", interrupted)
    text = run("train", "run", reward="mine.py:one", eval_size=0, max_steps=2, ends=130)
    assert "klgrad train --output_dir run --resume --reward mine.py:one" in text

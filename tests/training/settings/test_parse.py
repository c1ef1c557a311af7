"""Flags over a file over a preset over TRL; what cannot be understood is named with its nearest."""

import json

import pytest
from training.small import arguments

from klgrad.errors import MeaningError, RunError, SettingError, UnknownNameError
from klgrad.training.report import formula, objective_lines
from klgrad.training.settings import parse
from klgrad.trl.config_checks import MeaningWarning

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


def test_distillation_is_only_the_kl():
    found = parse("distill", [*CPU])
    assert (found.training.teacher, found.training.kl_coef, found.training.objective.exact) == ("smollm2", 1.0, True)
    assert found.policy.model_name_or_path is None


def test_distillation_uses_completions_again_where_that_needs_no_weights():
    """As long as the KL is the preset's: over the vocabulary, of each token."""
    found = parse("distill", [*CPU])
    assert (found.training.num_iterations, found.training.lr_scheduler_type) == (8, "cosine")
    assert formula(found).startswith("∇ KL(π‖ref) of the next token, at the prefixes of μ = E_μ[ Σ_t ∇KL_t ]")
    assert formula(found).endswith("; μ is what sampled the completions (num_iterations=8)")
    for same in (["--kl_discount", "0"], ["--kl_level", "token"], ["--kl_coef", "2"], ["--kl_estimator", "exact"]):
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


def test_dashes_are_underscores():
    assert parse("train", ["--dry-run", "--kl-coef=0.125", *CPU]).run.dry_run


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (["--kl_coeff", "1"], UnknownNameError, "did you mean 'kl_coef'"),
        (["--kl_coeff=1"], UnknownNameError, "did you mean 'kl_coef'"),
        (["--kl_level", "tokens"], SettingError, "invalid choice: 'tokens'"),
        (["--max_steps", "many"], SettingError, "max_steps"),
        (["--kl_coef", "-1"], MeaningError, "`kl_coef` >= 0"),
        (["--beta", "0.1"], MeaningError, "TRL's own KL off"),
        (["--num_generations", "1", "--kl_baseline", "leave_one_out"], SettingError, "at least 2 generations"),
        (["--generation_batch_size", "7"], SettingError, "fit together"),
        (["--rollout_lag", "1"], MeaningError, "`kl_ratio` with `rollout_lag`"),
        (["--config"], SettingError, "names a YAML file"),
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
        ("", SettingError, "NoneType"),
        ("kl_coff: 1\n", UnknownNameError, "did you mean 'kl_coef'"),
        ("modle: x\n", UnknownNameError, "did you mean 'model'"),
        ("kl_coef: -1\n", MeaningError, "`kl_coef` >= 0"),
    ],
)
def test_a_file_that_cannot_be_used(yaml, text, error, said):
    with pytest.raises(error, match=said):
        parse("train", [*yaml(text), *CPU])


def test_a_binary_file_is_no_settings(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match="codec can't decode"):
        parse("train", ["--config", str(path)])


def test_what_was_given_starts_the_same_run_again(tmp_path):
    first = parse("train", arguments(quick=True, kl_coef=0.5, output_dir=tmp_path, use_cpu=True, resume=None))
    (tmp_path / "run.json").write_text(json.dumps({"settings": first.given}))
    again = parse("train", arguments(output_dir=tmp_path, resume=True))
    before, after = first.training.to_dict(), again.training.to_dict()
    assert {k for k in before if before[k] != after[k]} <= {"logging_dir"}
    assert vars(again.run) == {**vars(first.run), "resume": True}
    assert parse("train", arguments(output_dir=tmp_path, resume=True, kl_coef=0.75)).training.kl_coef == 0.75


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("distill", {"kl_estimator": "k1", "kl_discount": 1.0}),
        ("train", {"quick": True, "learning_rate": 1e-6, "kl_coef": 0.05, "max_steps": -1}),
    ],
)
def test_what_was_said_against_a_preset_is_kept(command, said, tmp_path, monkeypatch):
    """Also where it is TRL's default; and what the preset said stays when the preset changes."""
    first = parse(command, arguments(**said, output_dir=tmp_path, use_cpu=True))
    assert {**first.given, **said} == first.given
    (tmp_path / "run.json").write_text(json.dumps({"command": command, "settings": first.given}))
    monkeypatch.setattr("klgrad.training.settings.DEFAULTS", {"save_steps": 7, "kl_coef": 7.0, "temperature": 0.5})
    again = parse(command, arguments(output_dir=tmp_path, resume=True))
    before, after = first.training.to_dict(), again.training.to_dict()
    assert {k for k in before if before[k] != after[k]} <= {"logging_dir"}
    assert again.given == first.given


def test_a_run_that_is_gone_on_with_can_be_given_epochs(tmp_path):
    first = parse("train", arguments(quick=True, output_dir=tmp_path, use_cpu=True))
    (tmp_path / "run.json").write_text(json.dumps({"settings": first.given}))
    again = parse("train", arguments(output_dir=tmp_path, resume=True, num_train_epochs=3))
    assert (again.training.max_steps, again.training.num_train_epochs) == (-1, 3)


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


def test_resuming_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"run\.json"):
        parse("train", arguments(output_dir=tmp_path, resume=True))

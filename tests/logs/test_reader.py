"""What is read of a file, and an error in it, which names its row and a remedy; nothing is written then."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from logs.synthetic import WRITERS, mask_of, sampled, write
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import KlgradError, MissingExtraError
from klgrad.logs import LogError, examine, reader
from klgrad.logs.reader import EXAMPLES, assign, parse_choices
from klgrad.support import GROUP, MASK, ROLES, WHOSE, role_of


def message_of(path):
    """The error message of the command, which must write nothing."""
    out = path.parent / "out" / "report.json"
    result = CliRunner().invoke(app, ["logs", str(path), "--json", str(out)])
    assert isinstance(result.exception, KlgradError), result.output
    assert isinstance(result.exception, LogError), repr(result.exception)
    assert result.stdout == ""
    assert not out.parent.exists()
    assert "remedy: " in str(result.exception)
    return str(result.exception)


def write_rows(path, rows):
    """Lists that may have different lengths."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def place(suffix, row, token):
    return f"line {row + 1}, token {token}" if suffix == ".jsonl" else f"row {row}, token {token}"


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("role", ["logp", "ref_logp", "behavior_logp", "old_logp"])
@pytest.mark.parametrize(
    ("value", "shown", "remedy"),
    [
        (float("nan"), "nan", "find the NaN upstream"),
        (0.5, "0.5", "a positive value is a logit, a probability or a sum over tokens"),
        (float("-inf"), "-inf", "gives the sampled token probability 0"),
    ],
)
def test_an_error_names_place_and_column_of_a_bad_value(suffix, role, value, shown, remedy, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "ROWS", 7)
    data = sampled(rows=30, tokens=6)
    data["old_logp"] = data["logp"].clone()
    data[role][17, 4] = data[role][20, 1] = value
    names = {"logp": "log_prob", "old_logp": "old_log_probs", "behavior_logp": "rollout_log_probs"}
    text = message_of(write(tmp_path / f"log{suffix}", {names.get(name, name): x for name, x in data.items()}))
    assert f"expected `{names.get(role, role)}` finite and <= 0 at every live token; received {shown} at " in text
    assert f"{shown} at {place(suffix, 17, 4)} of {tmp_path}" in text
    assert remedy in text


def test_places_count_masked_tokens_and_masked_values_do_not_matter(tmp_path):
    data = sampled(rows=30, tokens=9)
    data["mask"] = mask_of(data["logp"].shape)
    row = int(data["mask"][:, 5].nonzero()[0])
    data["logp"][~data["mask"]] = float("nan")
    examine(write(tmp_path / "log.npz", data))
    data["logp"][row, 5] = float("nan")
    assert f"nan at row {row}, token 5" in message_of(write(tmp_path / "log.npz", data))


def test_rounding_above_0_is_no_error(tmp_path):
    data = sampled(rows=4, tokens=5)
    data["logp"][0, 0] = 1e-6
    for suffix in WRITERS:
        examine(write(tmp_path / f"log{suffix}", data))
        wide = {name: x.double() if x.is_floating_point() else x for name, x in data.items()}
        examine(write(tmp_path / f"log{suffix}", wide))  # as pandas and datasets store a trainer's float32


@pytest.mark.parametrize(("suffix", "where"), [(".parquet", "row 3"), (".jsonl", "line 4")])
def test_lists_of_different_lengths_are_refused(suffix, where, tmp_path):
    rows = [{"logp": [-1.0, -2.0], "ref_logp": [-1.0, -2.0][: 1 + (i != 3)]} for i in range(5)]
    text = message_of(write_rows(tmp_path / f"log{suffix}", rows))
    assert f"the same number of entries in `ref_logp` and `logp` in every row; received 1 and 2 in {where} of" in text


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused(suffix, share, tmp_path):
    path = write(tmp_path / f"log{suffix}", sampled(rows=30, tokens=6))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "cut off" in message_of(path)


@pytest.mark.parametrize("suffix", WRITERS)
def test_garbage_in_the_middle_is_refused(suffix, tmp_path):
    path = write(tmp_path / f"log{suffix}", sampled(rows=300, tokens=60))
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 8 : len(whole) // 8 + 3000] = b"\xff" * 3000
    path.write_bytes(whole)
    message_of(path)


def test_files_without_rows_or_live_tokens_are_refused(tmp_path):
    for suffix, text in ((".parquet", "0 bytes"), (".npz", "No data left"), (".jsonl", "columns (none)")):
        (tmp_path / f"log{suffix}").write_bytes(b"")
        assert text in message_of(tmp_path / f"log{suffix}")
    path, kind = tmp_path / "log.parquet", pa.list_(pa.float32())
    pq.write_table(pa.table({"logp": pa.array([], kind), "ref_logp": pa.array([], kind)}), path)
    assert "with 0 rows, none of which has a live token" in message_of(path)
    path = tmp_path / "log.npz"
    np.savez(path, logp=-np.ones((0, 4)), ref_logp=-np.ones((0, 4)))
    assert "with 0 rows" in message_of(path)
    np.savez(path, logp=-np.ones((5, 4)), ref_logp=-np.ones((5, 4)), mask=np.zeros((5, 4)))
    assert "with 5 rows, none of which has a live token; remedy: check the mask" in message_of(path)


def test_an_npz_column_by_column_is_read_as_one_row_by_row(tmp_path):
    data = {name: x.numpy() for name, x in sampled(rows=30, tokens=6).items()}
    np.savez(tmp_path / "rows.npz", **data)
    np.savez(tmp_path / "columns.npz", **{name: np.asfortranarray(x) for name, x in data.items()})
    by_row, by_column = (examine(tmp_path / f"{name}.npz").to_dict() for name in ("rows", "columns"))
    assert by_row | {"file": ""} == by_column | {"file": ""}


class Trap:
    """Unpickled, it would leave a mark."""

    def __reduce__(self):
        return exec, ("import sys; sys.klgrad_trap = True",)


def test_a_pickle_is_never_read(tmp_path):
    path = tmp_path / "log.npz"
    ragged = np.array([Trap(), [-1.0]], dtype=object)
    np.savez(path, logp=ragged, ref_logp=ragged, allow_pickle=True)
    assert "has Python objects, which are pickles" in message_of(path)
    for suffix in (".pkl", ".pt", ".bin"):
        path = tmp_path / f"log{suffix}"
        torch.save({"logp": 1}, path)
        assert "no pickle is read" in message_of(path)
    assert not hasattr(sys, "klgrad_trap")


def test_unknown_suffixes_and_missing_files_are_refused(tmp_path):
    (tmp_path / "log.csv").write_text("logp\n")
    (tmp_path / "folder.parquet").mkdir()
    for name, shown in {
        "log.csv": "a file that ends in .parquet, .jsonl, .ndjson, .npz",
        "none.parquet": "an existing file or folder",
        "nosuchfolder": "an existing file or folder",
        "folder.parquet": "folder.parquet without any",
        "run-*.parquet": "run-*.parquet without any",
    }.items():
        assert shown in message_of(tmp_path / name)


def test_json_that_is_not_a_log_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    good = '{"logp": [-1.0], "ref_logp": [-1.0]}\n'
    bad = {
        "[1, 2]\n": "received line 2 of",
        '{"logp": [-1.0]}\n': "null at line 2",
        '{"logp": -1.0, "ref_logp": [-1.0]}\n': "-1.0 at line 2",
        '{"logp": [null], "ref_logp": [-1.0]}\n': "null at line 2, token 0",
        '{"logp": [-1.0], "ref_logp": ["a"]}\n': '"a" at line 2, token 0',
        '{"logp": [[-1.0]], "ref_logp": [-1.0]}\n': "[-1.0] at line 2, token 0",
        '{"logp": [NaN], "ref_logp": [-1.0]}\n': "nan at line 2, token 0",
        '{"logp": [-1' + "0" * 400 + '], "ref_logp": [-1.0]}\n': "at line 2, token 0",
        '{"logp": [-1.0], "ref_logp": [-1.0]} {"logp": [-1.0], "ref_logp": [-1.0]}\n': "line 2",
        "[" * 10_000 + "\n": "line 2",
        "\xff\xfe\n": "line 2",
    }
    for line, shown in bad.items():
        path.write_text(good + line + good, encoding="latin-1")
        assert shown in message_of(path), line


ROWS, ONES = [[-1.0], [-2.0]], np.ones((3, 4))


@pytest.mark.parametrize(
    ("suffix", "columns", "shown"),
    [
        (".parquet", {"logp": [-1.0, -2.0]}, "`logp` with floats per token: a list for each completion"),
        (".parquet", {"logp": [[1], [2]]}, "received a column of list"),
        (".parquet", {"logp": [["a"], ["b"]]}, "received a column of list"),
        (".parquet", {"ref_logp": [[-1.0], None]}, "null in row 1"),
        (".parquet", {"ref_logp": [[-1.0], [None]]}, "nan at row 1, token 0"),
        (".parquet", {"mask": [[1], [2]]}, "a mask of 0 and 1 in `mask`; received 2 at row 1, token 0"),
        (".parquet", {"mask": [[True], [None]]}, "0 and 1 in `mask`; received nan at row 1"),
        (".parquet", {"mask": [["a"], ["b"]]}, "`mask` with 0 and 1 per token"),
        (".parquet", {"group": ["a", None]}, "`group` in every row; received null in row 1"),
        (".npz", {"ref_logp": -np.ones((3, 5))}, "received shape (3, 5) of float64"),
        (".npz", {"logp": -np.ones(3), "ref_logp": -np.ones(3)}, "`logp` with floats per token"),
        (".npz", {"group": np.zeros((3, 4))}, "`group` with one entry per completion"),
        (".npz", {"logp": np.ones((3, 4), int)}, "received shape (3, 4) of int64"),
        (".npz", {"mask": ONES.astype(complex)}, "`mask` with 0 and 1 per token"),
        (".npz", {"mask": ONES.astype("<U3")}, "`mask` with 0 and 1 per token"),
    ],
)
def test_columns_that_are_not_of_a_log_are_refused(suffix, columns, shown, tmp_path):
    path = tmp_path / f"log{suffix}"
    if suffix == ".npz":
        np.savez(path, **{"logp": -ONES, "ref_logp": -ONES, **columns})
    else:
        pq.write_table(pa.table({"logp": ROWS, "ref_logp": ROWS, **columns}), path)
    assert shown in message_of(path)


def test_prompts_of_any_kind_are_distinguished(tmp_path):
    rows = [{"logp": [-1.0 - i], "ref_logp": [-1.0]} for i in range(4)]
    kinds = ([1, 1, 2, 2], ["a", "a", "b", "b"], [[1], [1], [2], [2]], [{"role": "user"}] * 2 + [{"role": "me"}] * 2)
    kinds += (["long" * 50 + "a"] * 2 + ["long" * 50 + "b"] * 2,)
    errors = set()
    for i, prompts in enumerate(kinds):
        for suffix in (".jsonl", ".parquet"):
            table = [row | {"prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
            report = examine(write_rows(tmp_path / f"{i}{suffix}", table))
            errors.add(float(report.kl.estimates["kl/reverse/k1/per_token"].standard_error))
    assert errors == {1.0}  # of two groups with totals -1 and -5 over two tokens each


def test_an_error_names_the_missing_extra(tmp_path, monkeypatch):
    for name in "ab":
        write(tmp_path / f"{name}.parquet", sampled(rows=4, tokens=3))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"received no such package; remedy: pip install 'klgrad\[logs\]'"):
        examine(tmp_path)


# The names of every framework are recognised; an error about a missing column suggests similar names.


FRAMEWORKS = {
    "TRL": "per_token_logps ref_per_token_logps old_per_token_logps sampling_per_token_logps completion_mask",
    "verl": "log_prob ref_log_prob old_log_probs rollout_log_probs response_mask",
    "OpenRLHF": "action_log_probs base_action_log_probs old_action_log_probs rollout_log_probs action_mask",
    "prime-rl": "trainer_logprobs ref_logprobs old_logp inference_logprobs loss_mask",
    "tinker": "training_logprobs base_logprobs old_logp sampling_logprobs mask",
    "torchtune": "pi_logprobs ref_logprobs pi_old_logprobs behavior_logp mask",
    "cleanrl": "newlogprob ref_logp b_logprobs behavior_logp mask",
    "NeMo RL": "curr_logprobs reference_policy_logprobs prev_logprobs generation_logprobs token_mask",
    "slime": "log_probs ref_log_probs old_log_probs rollout_log_probs loss_masks",
    "ROLL": "log_probs ref_log_probs old_log_probs infer_logprobs response_mask",
    "open-instruct": "new_logprobs ref_logprobs old_logprobs vllm_logprobs response_masks",
    "distillation": "student_logps teacher_logps old_logps sampler_logps assistant_masks",
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_frameworks_names_are_recognised(framework):
    names = FRAMEWORKS[framework].split()
    roles = ("logp", "ref_logp", "old_logp", "behavior_logp", "mask")
    assert assign(["reward", *reversed(names)], {}) == dict(zip(roles, names, strict=True))


def test_no_name_has_two_roles():
    words = [word for words in WHOSE.values() for word in words]
    assert len(words) == len(set(words))
    assert {role_of(name) for name in ROLES} == {(role, -1) for role in ROLES}
    for role, names in (*EXAMPLES.items(), ("mask", MASK), ("group", GROUP)):
        assert {found[0] for name in names if (found := role_of(name))} == {role}, role


def test_what_a_name_does_not_say_is_not_guessed():
    for name in ("attention_mask", "logits", "top_logprobs", "sum_logp", "cumulative_logprob", "prompt_ids", "reward"):
        assert role_of(name) is None, name


AREAL = "logprobs prox_logp ref_logp loss_mask"


@pytest.mark.parametrize(
    ("present", "chosen", "roles", "names"),
    [
        # AReaL calls the engine's log-probs plainly logprobs.
        (AREAL, [], "logp ref_logp behavior_logp mask", "prox_logp ref_logp logprobs loss_mask"),
        (AREAL, ["logp=logprobs"], "logp ref_logp old_logp mask", "logprobs ref_logp prox_logp loss_mask"),
        # The plainest name is taken last, and a whole role first.
        ("logprobs ref_logp trainer_logprobs", [], "logp ref_logp", "trainer_logprobs ref_logp"),
        ("teacher_logp logp policy_logp ref_logprobs", [], "logp ref_logp", "logp ref_logprobs"),
        ("prompt uid logp ref_logp", [], "logp ref_logp group", "logp ref_logp uid"),
        # Capitals do not matter; a choice wins, and may leave a column out.
        ("LogP Ref_Logp", [], "logp ref_logp", "LogP Ref_Logp"),
        ("logp mine ref_logp", ["logp=mine"], "logp ref_logp", "mine ref_logp"),
        ("logp ref_logp", ["logp=ref_logp", "ref_logp=logp"], "logp ref_logp", "ref_logp logp"),
        ("logp ref_logp mask uid", ["mask=", "group="], "logp ref_logp", "logp ref_logp"),
    ],
)
def test_the_column_of_each_role(present, chosen, roles, names):
    assert assign(present.split(), parse_choices(chosen)) == dict(zip(roles.split(), names.split(), strict=True))


@pytest.mark.parametrize(
    ("present", "chosen", "message"),
    [
        (["logp", "ref_logpp", "reward"], {}, "did you mean 'ref_logpp'? name it with --column ref_logp=NAME"),
        (["logp", "reward"], {}, "received columns logp, reward; remedy: name it with --column ref_logp=NAME"),
        (["my_logps", "ref_logp"], {}, "did you mean 'my_logps'"),
        ([], {}, "received columns (none)"),
        (["logp", "reference"], {"ref_logp": "referenc"}, "did you mean 'reference'"),
    ],
)
def test_an_error_about_a_missing_column_suggests_a_similar_one(present, chosen, message):
    with pytest.raises(LogError) as error:
        assign(present, chosen)
    assert message in str(error.value)


def test_choices_are_role_and_name():
    assert parse_choices(["ref-logp=a", "mask = b"]) == {"ref_logp": "a", "mask": "b"}
    for bad in ("logp", "nonsense=a", "logp="):
        with pytest.raises(LogError, match="ROLE=NAME"):
            parse_choices([bad])

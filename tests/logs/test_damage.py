"""A file that is damaged anywhere is refused; nothing but a `KlgradError` is raised."""

import datetime
import json
import random
import zipfile
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from logs.synthetic import WRITERS, mask_of, sampled, write

from klgrad.errors import KlgradError
from klgrad.logs import LogError, examine

DAMAGES = 60
"""Of each kind of file. Thousands were tried when this was written: `fuzz(path, whole, random.Random(0), 3000)`."""


def damaged(whole, rng):
    """A copy with bytes flipped, replaced, removed, inserted, or cut off."""
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data))
        # Half of the damage in the last part, where Parquet and NPZ say what is where.
        at = at if rng.random() < 0.5 else max(0, len(data) - 1 - rng.randrange(min(len(data), 2000)))
        kind = rng.choice(["flip", "byte", "take", "put", "cut", "zero"])
        if kind == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            data[at] = rng.choice([0, 1, 127, 128, 255, ord("["), ord("{"), ord('"'), ord("9")])
        elif kind == "take":
            del data[at : at + rng.randrange(1, 9)]
        elif kind == "put":
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == "zero":
            data[at : at + 8] = bytes(8)
        elif rng.random() < 0.2:
            del data[at:]
        data = data or bytearray(b"\0")
    return bytes(data)


def fuzz(path, whole, rng, count):
    """The number of damaged files that were refused."""
    refused = 0
    for i in range(count):
        path.write_bytes(damage := damaged(whole, rng))
        try:
            examine(path)  # in this process: that it is not ended is a part of the test
        except KlgradError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}: damage {i}, {damage!r}") from error
    return refused


def small(kind):
    data = sampled("dropout", 0.2, rows=8, tokens=6)
    data["mask"] = mask_of(data["logp"].shape)
    if kind == "texts":
        del data["group"]
    return data


@pytest.mark.parametrize("kind", ["numbers", "texts"])
@pytest.mark.parametrize("suffix", WRITERS)
def test_damage_anywhere_is_refused_or_read(suffix, kind, tmp_path):
    path = write(tmp_path / f"log{suffix}", small(kind))
    if kind == "texts" and suffix == ".parquet":
        pq.write_table(pq.read_table(path).append_column("prompt", pa.array(["a", "b"] * 4)), path, compression="none")
    whole = path.read_bytes()
    assert fuzz(path, whole, random.Random(len(whole)), DAMAGES) > DAMAGES / 10


@pytest.mark.parametrize(
    "kind",
    [pa.date32(), pa.date64(), pa.timestamp("ms"), pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.duration("ms")],
)
def test_dates_that_python_does_not_have_are_prompts(kind, tmp_path):
    path = tmp_path / "log.parquet"
    raw = pa.array([2**30, 2**30, 2**31 - 1, 2**31 - 1], pa.int32() if kind.bit_width == 32 else pa.int64())
    if kind.bit_width == 64:
        raw = pa.array([x * 86_400_000 for x in raw.to_pylist()], pa.int64())
    lists = pa.array([[-1.0], [-2.0], [-3.0], [-4.0]])
    ref = pa.array([[-1.0]] * 4)
    pq.write_table(pa.table({"logp": lists, "ref_logp": ref, "group": raw.view(kind)}), path)
    assert float(examine(path).kl.estimates["kl/reverse/k1/per_token"].standard_error) == 1.0


def test_nested_dates_that_python_does_not_have_are_refused(tmp_path):
    path = tmp_path / "log.parquet"
    when = pa.StructArray.from_arrays([pa.array([2**31 - 1] * 2, pa.int32()).view(pa.date32())], ["day"])
    pq.write_table(pa.table({"logp": [[-1.0]] * 2, "ref_logp": [[-1.0]] * 2, "group": when}), path)
    with pytest.raises(KlgradError, match="prompts in `group` that Python can represent"):
        examine(path)


def test_dates_of_our_time_are_prompts_too(tmp_path):
    path = tmp_path / "log.parquet"
    days = [datetime.date(2024, 1, day) for day in (1, 1, 2, 2)]
    pq.write_table(pa.table({"logp": [[-1.0]] * 4, "ref_logp": [[-1.0]] * 4, "group": days}), path)
    assert examine(path).rows == 4


def test_a_name_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"logp": [[-1.0]], "ref_logp": [[-1.0]], "remark": [1]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"remark", b"r\xff\xfe\xfdrk"))
    with pytest.raises(KlgradError):
        examine(path)


def test_an_npz_header_that_is_no_python_is_refused(tmp_path):
    path = tmp_path / "log.npz"
    np.savez(path, logp=-np.ones((2, 3)), ref_logp=-np.ones((2, 3)))
    whole = path.read_bytes()
    for text in (b"{'descr': '<f8'((", b"{'descr': ''''''", b"((((((((((((((((", b"{'descr': {},   "):
        path.write_bytes(whole.replace(b"{'descr': '<f8',", text[:16]))
        with pytest.raises(KlgradError):
            examine(path)


def test_an_npz_with_a_long_header_is_refused(tmp_path):
    path = tmp_path / "log.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("logp", "ref_logp"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x02\x00" + (2**28).to_bytes(4, "little") + bytes(1000))
    with pytest.raises(KlgradError):
        examine(path)


@pytest.mark.parametrize("depth", [100, 500, 5000])
def test_deeply_nested_json_is_read_or_refused(depth, tmp_path):
    path = tmp_path / "log.jsonl"
    row = json.dumps({"logp": [-1.0], "ref_logp": [-1.0]})[:-1]
    path.write_text((row + ', "group": ' + "[" * depth + "]" * depth + "}\n") * 2)
    with nullcontext() if depth < 600 else pytest.raises(LogError, match="line 1"):
        assert examine(path).rows == 2

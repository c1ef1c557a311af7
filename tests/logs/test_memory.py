"""The memory for a file is bounded by the documented limits, whatever the file contains."""

import json
import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klgrad.logs import LogError, columns, examine, parquet
from klgrad.logs.parquet import longest_row, row_groups

REFUSED = 400
"""MiB that a file beyond a limit may take before it is refused. A Parquet page is decompressed, a line of JSON is read:
each is below 100 MiB, and pyarrow's own imports and threads take the rest. Decoded, these files take several GiB."""

LONG = columns.LONGEST_ROW + 1

PEAK = """
import re, sys
from pathlib import Path
from klgrad.errors import KlgradError
from klgrad.logs import examine
import numpy, pyarrow.json, pyarrow.parquet
peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])
before = peak()
try:
    examine(Path(sys.argv[1]))
    print('read', end=' ')
except KlgradError as error:
    print(error, end=' ')
print('MiB:', (peak() - before) // 1024)
"""


def taken(path):
    """The message, and the MiB that the command used, in a separate process."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    text, mib = re.fullmatch(r"(.*) MiB: (\d+)\n", done.stdout, re.DOTALL).groups()
    return text, int(mib)


def lists_of(*lengths):
    """A list column of equal values, which needs a few bytes in a file."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(np.full(sum(lengths), -1.0, np.float32)))


def table_of(*lengths, **more):
    return pa.table({"logp": lists_of(*lengths), "ref_logp": lists_of(*lengths), **more})


@pytest.mark.slow
def test_one_parquet_row_of_many_equal_values(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(table_of(20_000_000), path)
    assert path.stat().st_size < 10_000
    text, mib = taken(path)
    assert "completions of up to 4,194,304 tokens; received 20,000,000 entries of `logp` in row 0;" in text
    assert mib < REFUSED


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip"])
def test_a_long_row_among_short_ones(version, codec, tmp_path):
    path = tmp_path / "log.parquet"
    lengths = [3, 0, 1, 70] * 300
    pq.write_table(
        table_of(*lengths, LONG, *lengths), path, compression=codec, data_page_version=version, row_group_size=2000
    )
    with pytest.raises(LogError, match=r"received 4,194,305 entries of `logp` in row 1200;"):
        examine(path)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("seed", range(4))
def test_the_longest_row_is_found_in_the_levels(version, seed, tmp_path):
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(1 / [2, 3, 20, 300][seed], 3000) - 1
    nested = [[[1] * int(rng.integers(0, 3)) for _ in range(n)] for n in lengths[:200]]
    path = tmp_path / "log.parquet"
    for table, entries in (
        (table_of(*lengths.tolist()), lengths),
        (pa.table({"a": nested}), [sum(max(len(x), 1) for x in row) for row in nested]),
    ):
        pq.write_table(table, path, data_page_version=version, data_page_size=1000)
        schema = pq.ParquetFile(path).schema
        with path.open("rb") as handle:
            found = longest_row(handle, row_groups(path)[0].columns[0], schema.column(0).max_repetition_level, pa)
        assert found == (max(1, *entries), int(np.argmax(entries)))


def test_the_footer_is_read_as_pyarrow_reads_it(tmp_path):
    path = tmp_path / "log.parquet"
    more = {"group": ["a", "b"] * 50, "x.y": pa.array([{"a": 1, "b": [True]}] * 100)}
    pq.write_table(table_of(*range(100), **more), path, row_group_size=30, compression={"logp.list.element": "gzip"})
    metadata = pq.ParquetFile(path).metadata
    found = row_groups(path)
    assert [group.rows for group in found] == [30, 30, 30, 10]
    for i, group in enumerate(found):
        assert len(group.columns) == metadata.num_columns
        for j, column in enumerate(group.columns):
            expected = metadata.row_group(i).column(j)
            start = expected.dictionary_page_offset if expected.has_dictionary_page else expected.data_page_offset
            assert (column.path, column.values, column.size, column.start) == (
                *(expected.path_in_schema, expected.num_values, expected.total_uncompressed_size, start),
            )


@pytest.mark.slow
def test_a_batch_of_long_rows_is_cut(tmp_path, monkeypatch):
    """The mean length is not enough to plan a batch: a batch of only the long rows has many times as many entries."""
    monkeypatch.setattr(parquet, "LONGEST_ROW", 5000)
    path = tmp_path / "log.parquet"
    pq.write_table(table_of(*[1] * 2000, *[1000] * 50), path)
    sizes = [size for _, size in parquet.batches(pa, path, pq.ParquetFile(path).schema, {"logp": "logp"}, 2**20)]
    assert sizes == [5]
    assert examine(path).tokens == 52_000


def test_small_row_groups_are_read_together(tmp_path, monkeypatch):
    path = tmp_path / "log.parquet"
    pq.write_table(table_of(*[10] * 1000), path, row_group_size=100)
    schema = pq.ParquetFile(path).schema
    assert [groups for groups, _ in parquet.batches(pa, path, schema, {}, 2**20)] == [list(range(10))]
    monkeypatch.setattr(parquet, "LONGEST_ROW", 2500)
    assert [groups for groups, _ in parquet.batches(pa, path, schema, {}, 2**20)] == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9]
    ]  # fmt: skip
    assert examine(path).tokens == 10_000


@pytest.mark.many
@pytest.mark.slow
def test_a_long_prompt_is_held_once(tmp_path):
    path = tmp_path / "log.parquet"
    prompts = pa.array(["a" * 2_000_000, "b"] * 300)
    pq.write_table(table_of(*[2] * 600, group=prompts.dictionary_encode()), path)
    text, mib = taken(path)
    assert text == "read"
    assert mib < REFUSED


@pytest.mark.slow
def test_parquet_prompts_that_are_too_long(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(table_of(2, group=pa.array(["a" * 100_000_000])), path, compression="zstd")
    text, mib = taken(path)
    assert "prompts of up to 4,194,304 bytes in `group`" in text
    assert mib < REFUSED


def npz_with_group(path, dtype, rows):
    """Zeros, which compress to almost nothing."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, descr, shape in (
            ("logp", "<f4", (rows, 2)),
            ("ref_logp", "<f4", (rows, 2)),
            ("group", dtype, (rows,)),
        ):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(stream, header)
                size = np.dtype(descr).itemsize * int(np.prod(shape))
                for _ in range(size // 2**20):
                    stream.write(bytes(2**20))
                stream.write(bytes(size % 2**20))


@pytest.mark.slow
def test_an_npz_of_long_prompts(tmp_path):
    path = tmp_path / "log.npz"
    npz_with_group(path, "<U50000000", 2)
    text, mib = taken(path)
    assert "prompts of up to 4,194,304 bytes in `group`; received 200,000,000 bytes in every row" in text
    assert mib < REFUSED


@pytest.mark.many
@pytest.mark.slow
def test_an_npz_of_many_prompts_is_read_in_parts(tmp_path):
    path = tmp_path / "log.npz"
    npz_with_group(path, "<U1000000", 150)
    text, mib = taken(path)
    assert text == "read"
    assert mib < REFUSED


def test_an_npz_with_a_long_header(tmp_path):
    path = tmp_path / "log.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("logp", "ref_logp"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x02\x00" + (2**28).to_bytes(4, "little") + bytes(1000))
    with pytest.raises(LogError, match="a header of 268435456 bytes"):
        examine(path)


@pytest.mark.slow
def test_a_long_line_of_json(tmp_path):
    path = tmp_path / "log.jsonl"
    with path.open("w") as out:
        out.write('{"logp": [-1.0], "ref_logp": [-1.0]}\n{"logp": [')
        for _ in range(100):
            out.write("-1.0, " * 200_000)
        out.write("-1.0]}\n")
    text, mib = taken(path)
    assert "lines of up to 67,108,864 bytes; received a longer line 2" in text
    assert mib < REFUSED


@pytest.mark.parametrize("depth", [100, 500, 5000])
def test_deeply_nested_json_is_read_or_refused(depth, tmp_path):
    path = tmp_path / "log.jsonl"
    row = json.dumps({"logp": [-1.0], "ref_logp": [-1.0]})[:-1]
    path.write_text((row + ', "group": ' + "[" * depth + "]" * depth + "}\n") * 2)
    with nullcontext() if depth < 600 else pytest.raises(LogError, match="line 1"):
        assert examine(path).rows == 2


def test_a_row_at_the_limit_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "LONGEST_ROW", 1000)
    path = tmp_path / "log.parquet"
    pq.write_table(table_of(3, 1000, 2, 999), path)
    assert examine(path).tokens == 2004
    pq.write_table(table_of(3, 1001, 2, 999), path)
    with pytest.raises(LogError, match="1,001 entries of `logp` in row 1"):
        examine(path)


@pytest.mark.slow
def test_levels_that_end_too_soon_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "LONGEST_ROW", 100)
    path = tmp_path / "log.parquet"
    pq.write_table(table_of(50, 60), path, compression="none")
    whole = path.read_bytes()
    refused = 0
    for at in range(4, 120):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            examine(path)
        except LogError:
            refused += 1
    assert refused > 20

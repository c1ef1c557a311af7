"""Compare `klgrad logs` with a loop over rows: `python benchmarks/bench_logs.py`.

`klgrad logs` reads ten million tokens. The loop computes `kl_report` and the coefficients of one completion at a time,
as a simple script would, on a fiftieth of the rows; its time is scaled to all rows. Peak memory is measured in a
separate process.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import rows, save, side_by_side

from klgrad import ImportanceWeighting, KLTerm, Rollout, Truncate, kl_report, mismatch_report
from klgrad.logs import examine
from klgrad.logs.coefficients import cell_of, coefficients

TOKENS, MEAN_LENGTH, PART = 10_000_000, 500, 50


def write(path: Path, tokens: int) -> None:
    """Completions with log-normal lengths; the sampler differs from the trainer as with half-precision kernels."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(MEAN_LENGTH) - 0.18, 0.6, tokens // MEAN_LENGTH).astype(np.int64).clip(1, 8192)
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    logp = -rng.exponential(0.5, lengths.sum())
    columns = {"logp": logp}
    for name, noise in (("ref_logp", 0.2), ("behavior_logp", 0.01)):
        columns[name] = np.minimum(logp + rng.normal(0, noise, len(logp)), 0)
    lists = {name: pa.ListArray.from_arrays(offsets, pa.array(x.astype(np.float32))) for name, x in columns.items()}
    pq.write_table(pa.table(lists), path)


def row_by_row(path: Path) -> None:
    cell = cell_of("k3-loss")
    token = KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None))
    sequence = KLTerm(weighting=ImportanceWeighting("prefix", bound=Truncate(2.0)))
    for row in pq.read_table(path).to_pylist():
        logp, ref, behavior = (torch.tensor([row[name]]) for name in ("logp", "ref_logp", "behavior_logp"))
        rollout = Rollout(logp.requires_grad_(), ref, torch.ones_like(ref), behavior_logp=behavior)
        kl_report(rollout).metrics()
        mismatch_report(logp, behavior, torch.ones_like(ref)).metrics()
        coefficients(cell, rollout)
        token(rollout)
        sequence(rollout)


def peak_memory(path: Path) -> float:
    """MiB that `examine` adds to the imports (Linux; `getrusage` would report those of the parent)."""
    code = (
        "import re, sys; from pathlib import Path; from klgrad.logs import examine; import pyarrow.parquet\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "before = peak(); examine(Path(sys.argv[1]), 'k3-loss'); print((peak() - before) / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as the command does
    with tempfile.TemporaryDirectory() as folder:
        whole, part = Path(folder) / "whole.parquet", Path(folder) / "part.parquet"
        write(whole, TOKENS)
        write(part, TOKENS // PART)
        seconds = side_by_side(
            {"row by row": lambda: row_by_row(part), "klgrad logs": lambda: examine(whole, "k3-loss")}, rounds=3
        )
        seconds["row by row"] = [PART * x for x in seconds["row by row"]]
        save(rows(f"{TOKENS} tokens", seconds, "row by row"), "logs.csv")
        size = whole.stat().st_size >> 20
        print(f"peak memory above the imports: {peak_memory(whole):.0f} MiB for a file of {size} MiB")

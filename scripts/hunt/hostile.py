"""Hostile inputs: unexpected command lines, loss files, logs, settings and run folders."""

import io
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = [
    "x[y]z",
    "a[/]b",
    "[bold]",
    "-dash",
    "a b",
    "ü‖π",
    "q'uote\"",
    "back\\slash",
    "pipe|`tick`",
    "new\nline",
    "..",
    "é" * 60,
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3.7,
    1e400,
    -1e-9,
    float("nan"),
    "",
    "x",
    "1e999",
    "nan",
    [],
    [1],
    ["a", None],
    {},
    {"a": 1},
    2**70,
    "../..",
    "\x00",
    "[x]",
    "🙂",
    10**9,
    "0",
    "-1",
    "true",
    "null",
]


@dataclass(frozen=True)
class Case:
    """A command line to run in a folder that was prepared for it."""

    arguments: list[str]
    prepare: Callable[[Path], None] = lambda folder: None
    seconds: float = 60.0
    encoding: str = "utf-8"


def cases(count: int, seed: int, model: Path) -> Iterator[Case]:
    """`count` cases, of all kinds in turn."""
    kinds = [_loss, _output, _log, _setting, _flags, _run_folder, _data, _names]
    for i in range(count):
        yield kinds[i % len(kinds)](random.Random(f"{seed} {i}"), model)  # a separate seed for each case, for `--only`


# Losses to audit

BODIES = [
    "return None",
    "return 1.0",
    "return 'loss'",
    "return logp.sum(), {}",
    "return {'loss': logp.sum()}",
    "return logp.mean(-1)",
    "return logp * float('nan')",
    "return logp.sum() * float('inf')",
    "raise ValueError('no')",
    "raise KeyboardInterrupt",
    "import sys; sys.exit(3)",
    "raise SystemExit",
    "return f(logp, ref_logp, mask)",
    "print('x' * 100000); return logp.sum()",
    "return logp.detach().sum()",
    "return (logp - ref_logp).square().sum() * 1e200",
    "return (logp - ref_logp).square().sum() * 1e-200",
    "logp.zero_(); return logp.sum()",
    "return logp.int()",
    "return (logp - ref_logp).half().sum()",
    "return logp.to('meta').sum()",
    "import torch; return torch.rand(()) * logp.sum()",
    "return logp.new_zeros(0)",
    "return logp[:0].sum()",
    "return logp.sum().item()",
    "import os; os.chdir('/'); return logp.sum()",
    "return (logp/(len(logp) - 2)).sum()",
    "return logp.sum() * (len(logp) % 2 == 0)",
    "return 0.5 * ((logp - ref_logp)**2 * mask).sum(-1).mean()",
    "import warnings; warnings.warn('w'); return logp.sum()",
    "global n; n = globals().get('n', 0) + 1; return logp.sum() * n",
    "return logp.double().pow(1000).sum()",
    "return logp.conj().sum() * 1j",
]
HEADS = [
    "def f(logp, ref_logp, mask):",
    "async def f(logp, ref_logp, mask):",
    "def f(logp, ref_logp, mask, *args, **kwargs):",
    "def f(logp, ref_logp, mask, cfg):",
    "def f(logp, ref_logp, mask, group=None):",
    "def f(*, logp, ref_logp, mask, advantages):",
]


def _loss(rng: random.Random, model: Path) -> Case:
    text = f"{rng.choice(HEADS)}\n    {rng.choice(BODIES)}\n"
    if rng.random() < 0.2:
        text = rng.choice(
            [
                "def f(:",
                "import nothing_here",
                "f = 3",
                "class f: pass",
                "raise SystemExit(0)",
                "f = lambda: 0",
                "1/0",
                "",
            ]
        )
    name = rng.choice(["f", "f", "f", "g", "", "f:f", "os"])
    options = rng.choice(
        [
            [],
            ["--expect", "reverse-kl-token"],
            ["--expect", "nonsense"],
            ["--advantages", "random"],
            ["--lengths", "equal"],
        ]
    )
    return Case(["audit", f"loss.py:{name}", *options], lambda folder: _write(folder / "loss.py", text))


# Output paths


def _output(rng: random.Random, model: Path) -> Case:
    def prepare(folder: Path) -> None:
        (folder / "victim").write_text("precious")
        (folder / "link").symlink_to("target")
        (folder / "loop").symlink_to("loop")
        (folder / "dir").mkdir()
        (folder / "closed").mkdir(mode=0o555)
        _write(folder / "rows.jsonl", _rows(random.Random(0)))

    path = rng.choice(
        [
            "dir",
            "link",
            "loop",
            "victim/x",
            "/dev/full",
            "/dev/null",
            "/dev/stdout",
            "no/such/folder/x",
            "n" * 300,
            "",
            "-",
            "closed/x",
            *NAMES,
        ]
    )
    command = rng.choice([["audit", "k3-loss"], ["logs", "rows.jsonl"]])
    option = rng.choice(["--json", "--markdown", "--html"]) if command[0] == "audit" else "--json"
    return Case([*command, option, path], prepare)


# Logs


def _rows(rng: random.Random, count: int = 12) -> str:
    rows = []
    for i in range(count):
        size = rng.randint(1, 6)
        logp = [-rng.random() * 4 for _ in range(size)]
        rows.append({"logp": logp, "ref_logp": [x - 0.1 for x in logp], "behavior_logp": logp, "group": i // 4})
    return "".join(json.dumps(row) + "\n" for row in rows)


def _log(rng: random.Random, model: Path) -> Case:
    kind = rng.choice(["jsonl", "parquet", "npz"])

    def prepare(folder: Path) -> None:
        data = {"jsonl": _jsonl, "parquet": _parquet, "npz": _npz}[kind](rng)
        (folder / f"log.{kind}").write_bytes(_corrupted(data, rng) if rng.random() < 0.7 else data)

    return Case(["logs", f"log.{kind}"], prepare)


def _jsonl(rng: random.Random) -> bytes:
    rows = [json.loads(line) for line in _rows(rng).splitlines()]
    for _ in range(rng.randint(0, 3)):
        row = rng.choice(rows)
        row[rng.choice([*row, "mask", "extra"])] = rng.choice(VALUES)
    return "\n".join(json.dumps(row, default=str) for row in rows).encode("utf-8", "surrogatepass")


def _parquet(rng: random.Random) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        name: [json.loads(line)[name] for line in _rows(rng).splitlines()] for name in ("logp", "ref_logp", "group")
    }
    if rng.random() < 0.4:
        columns[rng.choice(list(columns))] = [rng.choice(["x", None, "1"]) for _ in columns["group"]]
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def _npz(rng: random.Random) -> bytes:
    import numpy as np

    shape = rng.choice([(4, 3), (0, 3), (4,), (2, 2, 2), (1, 1)])
    arrays = {
        "logp": -np.ones(shape),
        "ref_logp": -np.ones(shape),
        "mask": np.ones(shape, dtype=rng.choice(["?", "<i8", "<U3"])),
    }
    if rng.random() < 0.3:
        arrays["logp"] = rng.choice(
            [np.array("x"), np.full(shape, np.nan), np.ones(shape, dtype=complex), np.ones((9, 9))]
        )
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _corrupted(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        if not found:
            break
        at = rng.randrange(len(found))
        action = rng.choice(["flip", "cut", "insert", "number"])
        if action == "flip":
            found[at] ^= 1 << rng.randrange(8)
        elif action == "cut":
            del found[at : at + rng.randint(1, 64)]
        elif action == "insert":
            found[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 16)))
        else:
            found[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 2**31, 2**32 - 1]))
    return bytes(found)


# Settings of a run

SMALL = {
    "use_cpu": True,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 4,
    "max_steps": 1,
    "gradient_checkpointing": False,
    "save_steps": 1,
    "train_size": 16,
    "eval_size": 2,
    "output_dir": "out",
}


def _fields() -> list[str]:
    from dataclasses import fields

    from klgrad.training.settings import PolicyConfig, RunConfig
    from klgrad.trl import KLConfig

    dangerous = (
        "hub",
        "push",
        "deepspeed",
        "fsdp",
        "vllm",
        "num_processes",
        "accelerate",
        "output_dir",
        "logging_dir",
        "local_rank",
    )
    names = [f.name for kind in (RunConfig, KLConfig, PolicyConfig) for f in fields(kind) if f.init]
    return [name for name in names if not any(word in name for word in dangerous)]


def _setting(rng: random.Random, model: Path) -> Case:
    """A YAML file with one or two settings of any type."""

    def prepare(folder: Path) -> None:
        chosen = {rng.choice(_fields()): rng.choice(VALUES) for _ in range(rng.randint(1, 2))}
        given = {"model": str(model), **SMALL, **chosen}
        if rng.random() < 0.1:
            given = {5: 1, **given}
        import yaml

        _write(folder / "run.yaml", yaml.safe_dump(given, allow_unicode=True))

    dry = ["--dry_run"] if rng.random() < 0.5 else []
    return Case([rng.choice(["train", "distill"]), "--config", "run.yaml", *dry], prepare, 120)


def _flags(rng: random.Random, model: Path) -> Case:
    given = {"model": str(model), **SMALL}
    given |= {rng.choice(_fields()): str(rng.choice(VALUES)).replace("\x00", "") for _ in range(rng.randint(1, 2))}
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return Case([rng.choice(["train", "distill"]), *flags, *(["--dry_run"] if rng.random() < 0.5 else [])], seconds=120)


def _run_folder(rng: random.Random, model: Path) -> Case:
    """`--resume` and `compare` on folders that only look like runs."""

    def prepare(folder: Path) -> None:
        run = folder / "out"
        run.mkdir()
        for name in ("run.json", "history.jsonl", "summary.json", "checkpoint-1", "model"):
            if rng.random() < 0.6:
                _damaged(run / name, rng)

    command = rng.choice(
        [
            ["train", "--output_dir", "out", "--resume"],
            ["compare", "out"],
            ["compare", "out", "out"],
            ["train", "--model", str(model), *(str(x) for item in SMALL.items() for x in (f"--{item[0]}", item[1]))],
        ]
    )
    return Case(command, prepare, 120)


def _damaged(path: Path, rng: random.Random) -> None:
    if path.suffix in ("", ".bin"):
        path.mkdir()
        for name in ("klgrad_manifest.json", "trainer_state.json", "klgrad_state_0.pt", "model.safetensors"):
            if rng.random() < 0.7:
                _write(path / name, json.dumps(rng.choice([{"files": [1]}, {"files": {}}, {"files": None}, [], {}, 3])))
        return
    rows = [
        {"command": "train", "settings": rng.choice([None, {}, [], {"model": 3}, {"max_steps": "x"}, {"nonsense": 1}])},
        {"step": rng.choice([0, 1, -1, "x", None])},
        {"step": 1, "reward": 0.5},
    ]
    text = rng.choice([json.dumps(rng.choice(rows)), "\n".join(map(json.dumps, rows)), "", "{", "\udcff\udcfe"])
    path.write_bytes(text.encode("utf-8", "surrogateescape"))


def _data(rng: random.Random, model: Path) -> Case:
    """A dataset of prompts and a reward function."""
    columns = {
        "prompt": ["1 + 1", "2 + 3", "4 - 1"] * 8,
        rng.choice(["answer", "completion_ids", "prompts", "completions", "trainer_state"]): [
            rng.choice(VALUES) for _ in range(24)
        ],
    }
    if rng.random() < 0.4:
        columns["prompt"] = [
            rng.choice(["1 + 1", "", None, 3, [], [{"role": "user", "content": "1 + 1"}], [{}]]) for _ in range(24)
        ]
    body = rng.choice(
        [
            "return [1.0] * len(completions)",
            "return []",
            "return None",
            "return ['a'] * len(completions)",
            "raise ValueError('x')",
            "return [float('nan')] * len(completions)",
            "return 1.0",
            "return [None] * len(completions)",
        ]
    )
    name = rng.choice(["p.jsonl", "[x]p.jsonl", "p q.jsonl", "p.json", "p.parquet", "missing.jsonl"])

    def prepare(folder: Path) -> None:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        _write(folder / "reward.py", f"def reward(completions, **_):\n    {body}\n")
        if name != "missing.jsonl":
            _write(folder / name, "\n".join(json.dumps(row, default=str) for row in rows))

    given = {"model": model, **SMALL, "task": name, "reward": "reward.py:reward"}
    return Case(["train", *(str(x) for item in given.items() for x in (f"--{item[0]}", item[1]))], prepare, 120)


def _names(rng: random.Random, model: Path) -> Case:
    """Names that do not exist, on every command."""
    name = rng.choice([*NAMES, "k3", "trl grpo", "nemo-rl", "", "💥"])
    encoding = rng.choice(["ascii", "latin-1", "cp1252", "utf-8"])
    command = rng.choice(
        [
            ["audit", name],
            ["advise", name],
            ["reproduce", name],
            ["logs", name],
            ["compare", name],
            ["train", name],
            ["audit", "k1-loss", "--html", name + ".html"],
            ["--" + name],
            [name],
        ]
    )

    return Case(command, encoding=encoding)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")

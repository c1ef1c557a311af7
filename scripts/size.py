"""The size and shape of the package: `python scripts/size.py [--no-walks]` prints one figure a line.

A walk is a use of the package. Its figure is the number of files of the package in which a function runs after the
imports. The walk of a training step needs TRL; that of a log needs `klgrad[logs]`.
"""

import ast
import io
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "klgrad"
TESTS = ROOT / "tests"
SHORT = 60
LOSS = "def loss(logp, ref_logp, mask):\n    return ((logp - ref_logp) * mask).sum(-1).mean()\n"
WALKS = (
    "audit my.py:loss",
    "KLTerm()(rollout).loss",
    "a step of KLTrainer",
    "reproduce tang-munos/fig2",
    "logs run.parquet",
    "advise --config",
)


def figures() -> dict[str, object]:
    """The figures that need no run."""
    files = sorted(SOURCE.rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    rooms = {path: n for path, n in lines.items() if path.name != "__init__.py"}
    classes = Counter(
        node.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    names = Counter(path.name for path in rooms)
    word = re.compile(r"\bAny\b")
    texts = [path.read_text(encoding="utf-8") for path in files]
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        "median lines of a file": median(lines.values()),
        "median lines without __init__": median(rooms.values()),
        f"files under {SHORT} lines, without __init__": sum(n < SHORT for n in rooms.values()),
        "their names": sorted(path.relative_to(SOURCE).as_posix() for path, n in rooms.items() if n < SHORT),
        "class names that stand twice": sorted(name for name, n in classes.items() if n > 1),
        "file names that stand twice": sorted(name for name, n in names.items() if n > 1),
        "lines with Any": sum(bool(word.search(line)) for text in texts for line in text.splitlines()),
        "assignments to `found`": sum(len(re.findall(r"\bfound\b[^=\n]* = ", text)) for text in texts),
        "files of tests": len(list(TESTS.rglob("*.py"))),
        "lines of tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in TESTS.rglob("*.py")),
    }


def walk(name: str) -> int:
    """The number of files of a walk, traced in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--walk", name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return len(json.loads(done.stdout.splitlines()[-1]))


class Trace:
    """The files of the package in which a function runs within the `with` block."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __enter__(self) -> "Trace":
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _see(self, frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_name not in ("<module>", "<lambda>"):
            path = frame.f_code.co_filename
            # The body of a class runs while its module is imported; so do decorators and `__init_subclass__`.
            if path.startswith(str(SOURCE)) and not _importing(frame):
                self.files.add(path.removeprefix(f"{SOURCE}/"))


def _importing(frame) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(SOURCE)):
            return "__main__" not in frame.f_code.co_filename
        frame = frame.f_back
    return False


def trace(name: str) -> list[str]:
    """The files of a walk."""
    import contextlib
    import os
    import tempfile

    sys.path.append(str(TESTS))
    os.environ.update(HF_HUB_OFFLINE="1", COLUMNS="120", NO_COLOR="1")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        return sorted(_trace(name))


def _trace(name: str) -> set[str]:
    if name == "audit my.py:loss":
        Path("my.py").write_text(LOSS, encoding="utf-8")
        return _command("audit", "my.py:loss")
    if name == "reproduce tang-munos/fig2":
        return _command("reproduce", "--quick", "--jobs", "1", "tang-munos/fig2")
    if name == "logs run.parquet":
        from logs.synthetic import sampled, write

        write(Path("run.parquet"), sampled(rows=64, tokens=10))
        return _command("logs", "run.parquet")
    if name == "advise --config":
        return _command("advise", "--config", str(TESTS / "frameworks" / "run_files" / "verl.yaml"))
    if name == "KLTerm()(rollout).loss":
        import torch

        from klgrad import KLTerm, Rollout

        logp, ref_logp = torch.randn(2, 4, 5, requires_grad=True).neg().exp().neg()
        with Trace() as seen:
            _ = KLTerm()(Rollout(logp, ref_logp.detach(), torch.ones(4, 5))).loss
        return seen.files
    return _training_step()


def _command(*arguments: str) -> set[str]:
    from klgrad.cli import app

    with Trace() as seen:
        app(list(arguments), standalone_mode=False, prog_name="klgrad")
    return seen.files


def _training_step() -> set[str]:
    import tiny
    from transformers import TrainerCallback

    from klgrad.trl import KLConfig, KLTrainer

    seen = Trace()

    class Step(TrainerCallback):
        """Traces what runs between the beginning and the end of one step."""

        def on_step_begin(self, *_: object, **__: object) -> None:
            seen.__enter__()

        def on_step_end(self, *_: object, **__: object) -> None:
            seen.__exit__()

    trainer = tiny.trainer(KLTrainer, KLConfig, "run", max_steps=1, kl_coef=0.1)
    trainer.add_callback(Step())
    trainer.train()
    return seen.files


if __name__ == "__main__":
    if "--walk" in sys.argv:
        traced = trace(sys.argv[sys.argv.index("--walk") + 1])
        print(json.dumps(traced))
    else:
        table = figures()
        if "--no-walks" not in sys.argv:
            table |= {f"files of the walk: {name}": walk(name) for name in WALKS}
        for label, value in table.items():
            print(f"{label}: {', '.join(map(str, value)) if isinstance(value, list) else value}")

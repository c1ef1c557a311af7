"""Search for commands that lose data or end in a traceback, and for false statements of the audit.

    python scripts/hunt [inputs|kills|pairs|losses] [--count N] [--seed N] [--jobs N]

inputs: hostile command lines, files and settings. A command must end in time, with a documented exit status and without
    a traceback, and must not change files other than its outputs.
kills: a tiny training run is killed (SIGKILL) at random moments and resumed until it is finished. Its weights must be
    those of a run that was never killed, to the last bit.
pairs: two runs are started at once on one output folder. One must train, the other must refuse.
losses: randomly composed KL losses are audited, and every verdict is checked on other problems by an enumeration that
    shares no code with the audit. Verdicts that are missing are printed too; only false ones are problems.

Failures are printed with the number of the case; `--only N` runs only that case and shows its output.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import composed_losses
import forked
import hostile
from training.small import SMALL, arguments, write_model

PRECIOUS = ("victim", "loss.py", "rows.jsonl", "reward.py")
"""Files of a case that no command may change."""


def hunt_inputs(count: int, seed: int, root: Path, only: int | None) -> list[str]:
    """Run hostile cases, and return a message for each that failed."""
    model, problems = write_model(root / "model"), []
    for i, case in enumerate(hostile.cases(count, seed, model)):
        if only is not None and i != only:
            continue
        folder = root / f"case-{i}"
        folder.mkdir()
        case.prepare(folder)
        before = _precious(folder)
        found = forked.run(case.arguments, folder, root / f"case-{i}.log", case.seconds, case.encoding)
        shown = " ".join(case.arguments).replace("\n", "\\n")
        if only is not None:
            print(shown, found.status, found.output, sep="\n")
        if not found.is_clean:
            problems.append(f"case {i}: status {found.status}: klgrad {shown}\n{_last(found.output)}")
        elif before != _precious(folder):
            problems.append(f"case {i}: changed a file that is not an output: klgrad {shown}")
        shutil.rmtree(folder, ignore_errors=True)
        if i % 50 == 49:
            print(f"{i + 1} of {count} cases, {len(problems)} problems", flush=True)
    return problems


def _precious(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in PRECIOUS if (folder / name).is_file()}


def _last(output: str) -> str:
    return "\n".join("    " + line for line in output.splitlines()[-8:])


RUN = {
    **SMALL,
    "max_steps": 6,
    "save_steps": 2,
    "eval_every": 3,
    "num_iterations": 2,
    "kl_target": 0.5,
    "kl_ratio": "prefix",
}


def hunt_kills(count: int, seed: int, root: Path) -> list[str]:
    """Kill runs at random moments until `count` kills have hit, and resume each run to its end."""
    from safetensors.torch import load_file

    rng, model, problems = random.Random(seed), write_model(root / "model"), []
    new = ["train", *arguments(model=model, **RUN)]
    whole, began = root / "whole", time.monotonic()
    if forked.run([*new, "--output_dir", str(whole)], root, root / "whole.log", 300).status != 0:
        return [f"a run that is not killed fails\n{_last((root / 'whole.log').read_text())}"]
    took, kills, runs = time.monotonic() - began, 0, 0
    expected = load_file(next((whole / "model").glob("*.safetensors")))
    while kills < count:
        folder, log, runs = root / f"run-{runs}", root / f"run-{runs}.log", runs + 1
        arguments_now, status = [*new, "--output_dir", str(folder)], None
        for attempt in range(40):
            child = forked.start(arguments_now, root, log)
            status = _killed_after(child, rng.uniform(0, took) if attempt < 6 and kills < count else 300)
            if status is None:
                kills += 1
                arguments_now = ["train", "--output_dir", str(folder), "--resume"]
                continue
            if status == 2 and "run.json" in log.read_text(errors="replace") and not (folder / "run.json").exists():
                arguments_now = [*new, "--output_dir", str(folder)]  # killed before anything was written
                continue
            if status == 2 and "--resume --overwrite" in log.read_text(errors="replace"):
                # Killed after an update and before a checkpoint: the run restarts only with --overwrite.
                arguments_now = ["train", "--output_dir", str(folder), "--resume", "--overwrite"]
                continue
            break
        made = list((folder / "model").glob("*.safetensors"))
        if status != 0 or not made:
            problems.append(f"run {runs - 1}: status {status} after kills\n{_last(log.read_text(errors='replace'))}")
        elif any(not x.equal(load_file(made[0])[name]) for name, x in expected.items()):
            problems.append(f"run {runs - 1}: other weights than those of a run that was not killed")
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{kills} kills over {runs} runs; a whole run takes {took:.1f} s")
    return problems


def _killed_after(child: int, seconds: float) -> int | None:
    """Exit status, or None if the process still ran and was killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, raw = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(raw)
        time.sleep(0.005)
    forked.kill(child)
    return None


def hunt_pairs(count: int, seed: int, root: Path) -> list[str]:
    """Start two runs on one folder, a moment apart."""
    rng, model, problems = random.Random(seed), write_model(root / "model"), []
    for i in range(count):
        folder = root / f"pair-{i}"
        # Long enough that the first run is always still running when the second one starts.
        new = ["train", *arguments(model=model, **{**RUN, "max_steps": 60}), "--output_dir", str(folder)]
        second = rng.choice([new, [*new, "--overwrite"], ["train", "--output_dir", str(folder), "--resume"]])
        children = [forked.start(new, root, root / f"pair-{i}-0.log")]
        time.sleep(rng.choice([0.0, 0.05, 0.5, 1.0]))
        children.append(forked.start(second, root, root / f"pair-{i}-1.log"))
        status = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        logs = [(root / f"pair-{i}-{k}.log").read_text(errors="replace") for k in (0, 1)]
        if sorted(status) != [0, 2] or any("Traceback" in log for log in logs):
            problems.append(f"pair {i}: statuses {status}\n{_last(logs[0])}\n    --\n{_last(logs[1])}")
        elif len(list((folder / "model").glob("*.safetensors"))) != 1:
            problems.append(f"pair {i}: no model")
        shutil.rmtree(folder, ignore_errors=True)
    return problems


def main() -> None:
    """Run the chosen searches; the exit status is 1 if a problem was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "inputs", "kills", "pairs", "losses"], default="all")
    parser.add_argument("--count", type=int, help="default: 500 inputs, 100 kills, 10 pairs, 500 losses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run only this case of `inputs` or `losses`, and show its output")
    parser.add_argument("--jobs", type=int, default=1, help="processes for `losses`; default: 1")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = Path(tempfile.mkdtemp(prefix="klgrad-hunt-"))
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    if given.what != "losses":
        forked.preload()
    problems = []
    if given.what in ("all", "inputs"):
        problems += hunt_inputs(given.count or 500, given.seed, root, given.only)
    if given.what in ("all", "kills"):
        problems += hunt_kills(given.count or 100, given.seed, root)
    if given.what in ("all", "pairs"):
        problems += hunt_pairs(given.count or 10, given.seed, root)
    if given.what in ("all", "losses"):
        problems += composed_losses.hunt(given.count or 500, given.seed, given.jobs, given.only)
    shutil.rmtree(root, ignore_errors=True)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

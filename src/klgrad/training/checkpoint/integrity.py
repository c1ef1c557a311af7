"""Which checkpoints of a run are complete, by a manifest that is written last and compared before use.

transformers' `get_last_checkpoint` and `rotate_checkpoints` go by step numbers alone: they would resume from a
checkpoint that was not finished, and count it among those to keep.
"""

import json
import re
import shutil
import zlib
from pathlib import Path

from ...support.atomic_files import write_whole

MANIFEST, STATE = "klgrad_manifest.json", "trainer_state.json"
END = 1 << 20
"""Bytes compared at the start and at the end of a file, so that large files need not be read in full."""
NAME = re.compile(r"checkpoint-(\d+)$")
DAMAGED = "damaged-"


def seal(folder: Path) -> None:
    """Write the manifest: the size and checksums of every file. A checkpoint without one was never finished."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    entries = {str(p.relative_to(folder)): _fingerprint(p) for p in files}
    write_whole(folder / MANIFEST, json.dumps({"files": entries}, indent=1))


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if it is complete."""
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return "it was not finished"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    if not isinstance(entries, dict) or STATE not in entries:
        return f"{MANIFEST} does not list the files of a checkpoint"
    for name, expected in entries.items():
        try:
            found = _fingerprint(folder / name)
        except OSError:
            return f"{name} is missing or cannot be read"
        if found != expected:
            size = expected.get("bytes") if isinstance(expected, dict) else None
            if found["bytes"] != size:
                return f"{name} has {found['bytes']} bytes, not {size}"
            return f"{name} has changed since it was written"
    return None if planned(folder) is not None else f"{STATE} has no number of updates"


def checkpoints(output: Path) -> list[Path]:
    """Checkpoint folders of a run, the newest first."""
    found = [(int(match[1]), path) for path in output.glob("checkpoint-*") if (match := NAME.match(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def last_sound(output: Path) -> tuple[Path | None, list[str]]:
    """Find the checkpoint to resume from.

    Returns:
        The newest complete checkpoint, or None; and a sentence for each damaged one that is newer.
    """
    passed = []
    for path in checkpoints(output):
        wrong = fault(path)
        if wrong is None:
            return path, passed
        passed.append(f"{path.name} is damaged ({wrong})")
    return None, passed


def step_of(checkpoint: Path) -> int:
    """The number of updates after which it was written."""
    match = NAME.match(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def is_over(checkpoint: Path, max_steps: int, num_train_epochs: float) -> bool:
    """Whether a run with these settings has no update left after this checkpoint.

    For `max_steps` <= 0 the epochs decide. A run that was planned by `max_steps` before is not over by that plan.
    """
    step = step_of(checkpoint)
    if max_steps > 0:
        return step >= max_steps
    wanted, epoch = planned(checkpoint), _in_state(checkpoint, "epoch")
    if wanted is None or epoch is None or step < wanted:
        return False
    return epoch + epoch / max(step, 1) > num_train_epochs  # less than one update is left


def planned(checkpoint: Path) -> int | None:
    """The number of updates planned when the checkpoint was written; None if it cannot be read."""
    found = _in_state(checkpoint, "max_steps")
    return None if found is None else int(found)


def _in_state(checkpoint: Path, name: str) -> float | None:
    try:
        found = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int | float) else None


def rotate(output: Path, keep: int | None) -> None:
    """Delete checkpoints older than the newest `keep` complete ones. Call it after the newest has been sealed."""
    if keep is None or keep <= 0:
        return
    sound = 0
    for path in checkpoints(output):
        if sound == keep:
            shutil.rmtree(path, ignore_errors=True)
        elif fault(path) is None:
            sound += 1


def remove_all(output: Path) -> None:
    """Delete every checkpoint, as after a finished run that is not to be made longer."""
    for path in (*checkpoints(output), *damaged(output)):
        shutil.rmtree(path, ignore_errors=True)


def rename_damaged(output: Path, after: Path) -> None:
    """Rename the checkpoints of later steps, which are damaged, so that none of them is taken for the newest."""
    for path in checkpoints(output):
        if step_of(path) > step_of(after):
            target = path.with_name(f"{DAMAGED}{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)


def damaged(output: Path) -> list[Path]:
    """The checkpoints that `rename_damaged` has renamed."""
    return sorted(output.glob(f"{DAMAGED}checkpoint-*"))


def _fingerprint(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        head = zlib.crc32(file.read(END))
        size = file.seek(0, 2)
        file.seek(max(0, size - END))
        return {"bytes": size, "head": head, "tail": zlib.crc32(file.read(END))}

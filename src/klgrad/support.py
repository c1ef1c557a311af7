"""Files that are written whole or not at all, tables for the terminal, and names of tensors."""

import glob
import math
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import OutputError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Json = dict[str, Any]
"""An object of JSON: values of any type by name."""

Model = Any
"""A model of transformers, perhaps wrapped by PEFT, DDP, FSDP or DeepSpeed, which add and hide attributes."""

# Write files completely or not at all, and make data valid JSON.

STDOUT_PATHS = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def ensure_folder(path: Path) -> None:
    """Create a folder, or raise an `OutputError`. Call it before long work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("a folder that can be written", f"{path}: {error.strerror}", "give another path") from error


def is_stdout(path: Path | None) -> bool:
    """Whether a path given by a user is standard output: `-`, or `/dev/stdout` and its equivalents.

    Example:
        >>> is_stdout(Path("-")), is_stdout(Path("report.json"))
        (True, False)
    """
    return path is not None and (str(path) == "-" or os.path.abspath(path) in STDOUT_PATHS)


def write_output(path: Path, content: str | bytes) -> None:
    """Write text (as UTF-8) or bytes to a path given by a user; `-` is standard output."""
    if not is_stdout(path):
        write_whole(path, content)
        return
    sys.stdout.flush()  # keep the order with what was printed before
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(_encoded(content))
    else:  # for example in a notebook, which accepts text only
        sys.stdout.write(_encoded(content).decode("utf-8", "backslashreplace"))
    sys.stdout.flush()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a temporary file and rename it, so that neither a reader nor an interruption sees an incomplete file.

    A symbolic link is kept: the file that it points to is replaced, with its permissions. A pipe or a device cannot be
    replaced and is written to directly.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("ab") as file:
                file.write(_encoded(content))
        else:
            _replace(Path(os.path.realpath(path)), _encoded(content))
    except OSError as error:
        raise OutputError("a file that can be written", f"{path}: {error.strerror}", "give another path") from error


def _replace(target: Path, content: bytes) -> None:
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(None, "Permission denied")  # renaming would succeed without this permission
    target.parent.mkdir(parents=True, exist_ok=True)
    # Nobody can foresee the name, and put a link there.
    partial = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(8)}.partial")
    with partial.open("xb") as file:  # x follows no link
        try:
            if target.exists():
                shutil.copymode(target, partial)
            file.write(content)
            file.close()  # what is still in memory is written here, or fails
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def partials_of(path: Path, processes: Iterable[int]) -> list[Path]:
    """Temporary files that killed processes have left for a path."""
    target = Path(os.path.realpath(path))
    name = glob.escape(target.name)
    return [partial for process in processes for partial in target.parent.glob(f".{name}.{process}.*.partial")]


def _encoded(content: str | bytes) -> bytes:
    # What UTF-8 cannot encode, such as undecodable bytes of a file name, is escaped as in JSON.
    return content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content


def finite(data: object) -> object:
    """A copy of nested data without NaN and infinities, which JSON does not have, and with lists for tuples.

    Example:
        >>> finite({"mean": 1.5, "error": float("nan")})
        {'mean': 1.5, 'error': None}
    """
    if isinstance(data, dict):
        return {k: finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


# Tables for the terminal.


def text_table(
    rows: "Iterable[Sequence[str | Text]]",
    heads: Sequence[str] = (),
    *,
    columns: int = 2,
    numbers: int | None = None,
    fold: bool = False,
) -> "Table":
    """A table without lines, in which nothing is markup.

    Without titles (`heads`) it has `columns` columns. From column `numbers` on cells are aligned on the right. `fold`
    breaks the first column too, if it is too wide.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(heads), pad_edge=False, padding=(0, 2, 0, 0))
    for i, head in enumerate(heads or [""] * columns):
        side = "right" if numbers is not None and i >= numbers else "left"
        table.add_column(head, justify=side, no_wrap=i == 0 and not fold, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


# The names that frameworks give to log-probs, masks and groups, in columns of logs and in arguments of losses.

WHOSE: dict[str, tuple[str, ...]] = {
    "logp": (
        *("policy", "pi", "trainer", "training", "train", "new", "curr", "current", "cur", "student"),
        *("actor", "learner", "model", "local", ""),
    ),
    "ref_logp": (
        *("ref", "reference", "ref_policy", "reference_policy", "ref_model", "base", "base_model"),
        *("anchor", "initial", "init", "frozen", "sft", "teacher"),
    ),
    "old_logp": ("old", "pi_old", "old_policy", "prev", "previous", "b", "prox", "proximal"),
    "behavior_logp": (
        *("behavior", "behaviour", "behavior_policy", "rollout", "inference", "infer", "sampling"),
        *("sampler", "generation", "generator", "gen", "vllm", "sglang", "engine", "mu"),
    ),
}
"""The words beside `logp`, `log_probs`, ... in a name, by role and in order of preference.

They cover TRL, verl, OpenRLHF, SkyRL, prime-rl, NeMo RL, slime, AReaL, ROLL, tinker, torchtune, open-instruct and
cleanrl.
"""

STEM = r"log_?p(?:rob|i)?s?"
BEFORE = re.compile(rf"(?P<whose>.*?)_?{STEM}$")
AFTER = re.compile(rf"{STEM}_(?P<whose>.+)$")
"""`ref_log_probs` and `log_probs_ref`; `log_pi` too."""

FILLER = re.compile(r"(^|_)(per_token|action|token)(?=_|$)")
"""Words that do not change the role: `ref_per_token_logps`, `base_action_log_probs`."""

# Without `attention_mask`, which is 1 at prompts too.
MASK = ("completion_mask", "response_mask", "action_mask", "loss_mask", "token_mask", "assistant_mask")

GROUP = (
    *("group", "group_id", "group_index", "uid", "prompt_id", "prompt_uid", "prompt_index", "prompt_idx"),
    *("problem_id", "question_id", "example_id", "task_id", "prompt"),
)

ROLES = (*WHOSE, "mask", "group")


def role_of(name: str) -> tuple[str, int] | None:
    """The role that a name of a column or of an argument stands for, and its priority, where a lower one wins; or None.

    Example:
        >>> from klgrad.support import role_of
        >>> role_of("ref_per_token_logps")
        ('ref_logp', 0)
        >>> role_of("reward") is None
        True
    """
    name = plain(name)
    if name in ROLES:
        return name, -1
    if name.removesuffix("s") in MASK:
        return "mask", MASK.index(name.removesuffix("s"))
    if name in GROUP:
        return "group", GROUP.index(name)
    stem = BEFORE.match(name) or AFTER.match(name)
    return None if stem is None else owner(stem["whose"])


ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(WHOSE, ()),
    "mask": ("attention_mask", "masks", "eos_mask", "valid_mask", "seq_mask", "sequence_mask"),
    "advantages": ("advantage", "adv", "advs"),
    "rewards": ("reward",),
    "group": (),
    "lengths": ("completion_lengths", "response_lengths", "response_length", "seq_lens", "seq_lengths"),
    "tokens": (
        *("token_ids", "input_ids", "completion_ids", "response_ids", "responses", "output_ids", "ids"),
        *("action_ids", "actions", "sequences", "generated_ids", "sampled_ids", "sampled_tokens"),
    ),
    "labels": ("label", "shift_labels", "targets", "target", "target_ids"),
    "logits": (),
    "ref_logits": (),
    "behavior_logits": (),
    "token_reverse_kl": (),
    "token_forward_kl": (),
    "batch": (
        *("inputs", "data", "model_inputs", "micro_batch", "minibatch", "mini_batch", "mb", "sample", "samples"),
        *("experience", "experiences", "rollouts", "example", "examples", "input_data", "tensors", "trajectory"),
    ),
    "rollout": (),
}
"""What an argument of a loss may receive in an audit, by role, with names that `role_of` does not know.

There is no prompt, so `attention_mask` is the mask. `batch` is a dictionary of all tensors, and `rollout` a `Rollout`.
"""

LOGITS = {"logp": "logits", "ref_logp": "ref_logits", "behavior_logp": "behavior_logits"}
"""By the role of a policy's log-probs, that of its logits: `teacher_logits` are of the policy of `teacher_logp`."""


def argument_role(name: str) -> str | None:
    """The role of an argument of a loss by its name, or None."""
    if (column := role_of(name)) is not None:
        return column[0]
    name = plain(name)
    if name.endswith("logits"):
        policy = owner(name.removesuffix("logits").removeprefix("shift_"))
        return LOGITS.get(policy[0]) if policy else None
    return next((role for role, names in ARGUMENTS.items() if name == role or name in names), None)


def owner(words: str) -> tuple[str, int] | None:
    """The role of the policy that these words name, and their priority."""
    whose = FILLER.sub("", words).strip("_")
    return next(((role, known.index(whose)) for role, known in WHOSE.items() if whose in known), None)


def plain(name: str) -> str:
    """A name in lower case, with `_` for every other sign."""
    return re.sub(r"\W+", "_", name.lower()).strip("_")

"""Tasks of reasoning-gym by name, each scored by its own verifier."""

import importlib
import importlib.util
from typing import Any

from ...errors import MissingExtraError, UnknownNameError
from .eval_sets import EvaluationSet, Made
from .held_out import split
from .rewards import text_of

GYM = "reasoning-gym:"


def from_gym(settings: Any, names: list[str], evaluated: list[str] | None, seed: int) -> Made:
    """Generate questions to train on; evaluate on held-out ones of the same tasks, or on the tasks in `evaluated`."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingExtraError("reasoning-gym", "no such package", "pip install 'klgrad[gym]'")
    gym: Any = importlib.import_module("reasoning_gym")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    scorers: dict[str, Any] = {}

    def entries(name: str, size: int) -> list[dict[str, Any]]:
        if name not in known:
            raise UnknownNameError("task of reasoning-gym", name, known)
        scorers[name] = gym.create_dataset(name, seed=seed, size=size)
        return [
            {"prompt": e["question"], "answer": str(e["answer"]), "task": name, "entry": i}
            for i, e in enumerate(scorers[name])
        ]

    rows: list[dict[str, Any]] = []
    held_out: dict[str, list[dict[str, Any]]] = {}
    trained = [name.removeprefix(GYM) for name in dict.fromkeys(names)]
    for name in trained:
        more, held_out[name] = split(
            entries(name, settings.train_size + settings.eval_size), settings.eval_size, part=2
        )
        rows += more
    wanted = trained if evaluated is None else [name.removeprefix(GYM) for name in evaluated]
    others = {name: entries(name, settings.eval_size) for name in wanted if name not in trained}
    sets = [EvaluationSet(n, "out" if n in others else "in", {**held_out, **others}[n]) for n in wanted]

    def solved(completions: list[Any], task: list[str], entry: list[int], **_: Any) -> list[float]:
        """Score the text between answer tags, or all of it, with the task's verifier."""
        answers = [_tagged(text_of(completion)) for completion in completions]
        found = zip(answers, task, entry, strict=True)
        return [float(scorers[t].score_answer(answer, scorers[t][i])) for answer, t, i in found]

    return rows, sets, [solved]


def _tagged(text: str) -> str:
    _, opened, rest = text.rpartition("<answer>")
    return (rest.partition("</answer>")[0] if opened else text).strip()

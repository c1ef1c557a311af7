"""Names in a configuration file that look like mistyped names of settings."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

LIKENESS = 0.75
"""Of two short words: one letter is missing or two are exchanged in a word of four."""

DIFFERENT = 2
"""Letters without a counterpart in long words, both together: `generations` is no mistyped `iterations`."""


def mistyped(given: Iterable[str], known: Iterable[str]) -> list[str]:
    """A note for each given name that is close to a known one; other unknown names are settings of other things."""
    names = tuple(known)
    unknown = [name for name in given if name not in names]
    near = {name: [other for other in names if _close(name, other)] for name in unknown}
    return [
        f"`{name}` is not read; did you mean {' or '.join(f'`{x}`' for x in found)}?"
        for name, found in near.items()
        if found
    ]


def _close(name: str, other: str) -> bool:
    """Whether each word is close: `per_device_eval_batch_size` as a whole is like `per_device_train_batch_size`."""
    if _letters(name) == _letters(other):
        return True
    words, others = _words(name), _words(other)
    return len(words) == len(others) and all(map(_alike, words, others))


def _alike(word: str, other: str) -> bool:
    same = sum(block.size for block in SequenceMatcher(None, word, other).get_matching_blocks())
    letters = len(word) + len(other)
    return letters - 2 * same <= DIFFERENT and 2 * same >= LIKENESS * letters


def _words(name: str) -> list[str]:
    return re.split(r"[-._]", name.lower())


def _letters(name: str) -> str:
    return "".join(_words(name))

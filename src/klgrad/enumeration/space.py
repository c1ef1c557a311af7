"""Every completion over a small vocabulary, and every prefix at which a policy chooses a token."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ProblemError

END = 0
"""The end token, if there is one. It ends a completion and is part of it."""

MAX_COMPLETIONS = 100_000
"""Largest space that is built; beyond it exact sums take minutes."""


@dataclass(frozen=True, eq=False)
class CompletionSpace:
    """All completions of at most `length` tokens; with `ends`, token 0 ends a completion early, so that lengths vary.

    Args:
        vocab: number of tokens, at least 2.
        length: most tokens in a completion.
        ends: whether token 0 ends a completion.

    Attributes:
        tokens: (N, T) token ids, 0 where masked.
        mask: (N, T) live tokens.
        prefix: (N, T) index of the prefix before each token, in 0..prefixes-1; 0 where masked.
        prefixes: number of distinct prefixes.

    Example:
        >>> from klgrad.enumeration import CompletionSpace
        >>> space = CompletionSpace(vocab=2, length=2, ends=True)
        >>> len(space), space.prefixes
        (3, 2)
        >>> space.mask.sum(-1).tolist()
        [1, 2, 2]
    """

    vocab: int
    length: int
    ends: bool
    tokens: Tensor = field(init=False)
    mask: Tensor = field(init=False)
    prefix: Tensor = field(init=False)
    prefixes: int = field(init=False)

    def __post_init__(self) -> None:
        _check_size(self.vocab, self.length)
        done: list[tuple[int, ...]] = []
        index: dict[tuple[int, ...], int] = {}
        open_prefixes: list[tuple[int, ...]] = [()]
        for step in range(self.length):
            grown = []
            for prefix in open_prefixes:
                index[prefix] = len(index)
                for token in range(self.vocab):
                    over = step == self.length - 1 or (self.ends and token == END)
                    (done if over else grown).append((*prefix, token))
            open_prefixes = grown
        shape = (len(done), self.length)
        tokens, prefix_index = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.bool)
        for n, completion in enumerate(done):
            for t, token in enumerate(completion):
                tokens[n, t], prefix_index[n, t], mask[n, t] = token, index[completion[:t]], True
        for name, x in {"tokens": tokens, "mask": mask, "prefix": prefix_index, "prefixes": len(index)}.items():
            object.__setattr__(self, name, x)

    def __len__(self) -> int:
        return len(self.tokens)


def _check_size(vocab: int, length: int) -> None:
    if vocab < 2 or length < 1:
        raise ProblemError(
            "vocab >= 2 and length >= 1",
            f"vocab={vocab}, length={length}",
            "use a larger vocabulary or longer completions",
        )
    if vocab**length > MAX_COMPLETIONS:
        raise ProblemError(
            f"at most {MAX_COMPLETIONS} completions",
            f"{vocab} tokens ^ length {length} = {vocab**length}",
            "use shorter completions: the number of terms grows exponentially with the length",
        )

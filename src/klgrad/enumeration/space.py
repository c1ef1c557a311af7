"""Every completion over a small vocabulary, and every prefix at which a policy must choose a token."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ProblemError

END = 0
"""The end token, where there is one: completing with it stops the completion, and it is part of it."""

MAX_COMPLETIONS = 100_000


@dataclass(frozen=True, eq=False)
class CompletionSpace:
    """All completions of at most `length` tokens; with `ends`, token 0 ends one early, so lengths vary.

    Attributes:
        tokens: (N, T) token ids, 0 where masked.
        mask: (N, T) live tokens.
        prefix: (N, T) index of the prefix before each token, in 0..prefixes-1; 0 where masked.
        prefixes: number of distinct prefixes.
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
        raise ProblemError("vocab >= 2 and length >= 1", f"vocab={vocab}, length={length}", "enlarge the problem")
    if vocab**length > MAX_COMPLETIONS:
        raise ProblemError(
            f"at most {MAX_COMPLETIONS} completions",
            f"{vocab} tokens ^ length {length} = {vocab**length}",
            "shorten the completions: exact sums grow exponentially",
        )

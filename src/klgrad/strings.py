r"""Divergences between texts, for a student and a teacher with different tokens.

Two tokenizers write one text in different ways, and each may write it in several. A model's probability of a text s is
the sum over its own token sequences, P(s) = Σ_{y writes s} P(y). The reverse KL between texts is then

    KL_text = Σ_s P(s) log P(s)/Q(s).

`TokenSpace` has every sequence of a small vocabulary, so that this is an exact sum. For real models the other sequences
of a text are unknown; `text_log_ratio` uses the sampled one of the student and the tokenizer's own one of the teacher.
Its expected gradient is that of

    KL_text - H(Y | S) + E[-log Q(z(S) | S)],

Y the student's tokens of the text S and z(S) the teacher's tokens of it by its tokenizer. Both additions are 0 where a
model writes every text in one way, which trained models nearly do; the first rewards a student for writing a text in
many ways, the second is a cost of texts that the teacher would rather write in another way than its tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .errors import ProblemError

END = 0
"""The token that ends a text."""


@dataclass(frozen=True)
class TokenSpace:
    """All sequences of tokens that write a text of at most `length` characters.

    Args:
        pieces: what each token writes; the first ends the text, and its piece is empty.
        length: most characters of a text; where it is reached the end is certain.

    Example:
        >>> from klgrad.strings import TokenSpace
        >>> space = TokenSpace(("", "a", "b", "ab"), length=2)
        >>> len(space.sequences), len(space.texts)
        (8, 7)
    """

    pieces: tuple[str, ...]
    length: int

    def __post_init__(self) -> None:
        if len(self.pieces) < 2 or self.pieces[END] or not all(self.pieces[1:]):
            raise ProblemError(
                "pieces of which the first is empty and the others are not",
                repr(self.pieces),
                "write ('', 'a', 'b', 'ab'), for example: token 0 ends the text",
            )

    @cached_property
    def sequences(self) -> list[tuple[int, ...]]:
        """Every sequence, with its end."""
        whole: list[tuple[int, ...]] = []
        prefixes: list[tuple[int, ...]] = [()]
        while prefixes:
            start = prefixes.pop()
            for token in self._allowed(start):
                (whole if token == END else prefixes).append((*start, token))
        return sorted(whole)

    @cached_property
    def prefixes(self) -> list[tuple[int, ...]]:
        """Every sequence of tokens after which another follows."""
        return sorted({sequence[:t] for sequence in self.sequences for t in range(len(sequence))})

    @cached_property
    def texts(self) -> list[str]:
        """The texts that can be written."""
        return sorted({self.written(sequence) for sequence in self.sequences})

    @cached_property
    def allowed(self) -> Tensor:
        """(P, V) whether a token still fits after a prefix."""
        fits = torch.zeros(len(self.prefixes), len(self.pieces), dtype=torch.bool)
        for row, prefix in enumerate(self.prefixes):
            fits[row, self._allowed(prefix)] = True
        return fits

    def written(self, sequence: Sequence[int]) -> str:
        """The text of some tokens."""
        return "".join(self.pieces[token] for token in sequence)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The tokenizer's own sequence: from the left, always the longest piece that fits."""
        tokens: list[int] = []
        while text:
            fits = (i for i, piece in enumerate(self.pieces) if piece and text.startswith(piece))
            tokens.append(max(fits, key=lambda i: len(self.pieces[i])))
            text = text[len(self.pieces[tokens[-1]]) :]
        return (*tokens, END)

    def next_log_probs(self, logits: Tensor) -> Tensor:
        """(P, V) log-probs of the next token after each prefix, from (P, V) logits; -inf for what does not fit."""
        return logits.masked_fill(~self.allowed, -torch.inf).log_softmax(-1)

    def token_log_probs(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(N, T) log-probs of the tokens of all sequences, 0 where masked, and the mask."""
        log, at = self.next_log_probs(logits), {prefix: row for row, prefix in enumerate(self.prefixes)}
        rows = [torch.tensor([at[y[:t]] for t in range(len(y))]) for y in self.sequences]
        places, tokens = (pad_sequence(x, True) for x in (rows, [torch.tensor(y) for y in self.sequences]))
        mask = pad_sequence([torch.ones(len(y), dtype=torch.bool) for y in self.sequences], True)
        return torch.where(mask, log[places, tokens], 0.0), mask

    def text_log_probs(self, logits: Tensor) -> Tensor:
        """(S,) log-probs of the texts: sums over the sequences that write them."""
        of_sequences = self.token_log_probs(logits)[0].sum(-1)
        number = {text: i for i, text in enumerate(self.texts)}
        index = torch.tensor([number[self.written(sequence)] for sequence in self.sequences])
        return torch.stack([of_sequences[index == i].logsumexp(0) for i in range(len(self.texts))])

    def _allowed(self, prefix: Sequence[int]) -> list[int]:
        room = self.length - len(self.written(prefix))
        return [token for token, piece in enumerate(self.pieces) if len(piece) <= room and (room or token == END)]


def text_kl(student: TokenSpace, logits: Tensor, teacher: TokenSpace, ref_logits: Tensor) -> Tensor:
    """KL(student‖teacher) between texts, summed over all of them, with its gradient towards the student's logits.

    Args:
        student: the student's sequences.
        logits: (P, V) the student's logits after each prefix.
        teacher: the teacher's sequences, which can write the same texts.
        ref_logits: (P', V') the teacher's.

    Example:
        >>> import torch
        >>> from klgrad.strings import TokenSpace, text_kl
        >>> one, other = TokenSpace(("", "a", "ab", "b"), 2), TokenSpace(("", "a", "b"), 2)
        >>> at = [torch.zeros(len(space.prefixes), len(space.pieces)) for space in (one, other)]
        >>> text_kl(one, at[0], other, at[1])
        tensor(0.1744)
    """
    if student.texts != teacher.texts:
        only = sorted(set(student.texts) ^ set(teacher.texts))
        raise ProblemError("two vocabularies that write the same texts", f"{only[0]!r} in one alone", "add its pieces")
    log_p, log_q = student.text_log_probs(logits), teacher.text_log_probs(ref_logits).detach()
    return (log_p.exp() * (log_p - log_q)).sum()


def text_log_ratio(logp: Tensor, mask: Tensor, ref_logp: Tensor, ref_mask: Tensor) -> Tensor:
    """(B, T) the loss of each token: the log-ratio of the whole text on the score of each of the student's tokens.

    Estimates:
        KL(student‖teacher) between texts, by its value summed over a completion; see this module for its bias.
    Gradient:
        E[ log P(y)/Q(z(y)) Σ_t ∇log P(y_t) ], that of KL_text - H(Y | S) + E[-log Q(z(S) | S)].
    Requires:
        completions that the student sampled; the teacher's log-probs of its own tokens of the same texts.

    Args:
        logp: (B, T) the student's log-probs of its tokens; has the gradient.
        mask: (B, T) 1 where a token is live.
        ref_logp: (B, T') the teacher's log-probs of its tokens.
        ref_mask: (B, T') 1 where a token is live.

    Returns:
        (B, T) to be summed over the tokens and averaged over completions; 0 where masked.

    Example:
        >>> import torch
        >>> from klgrad.strings import text_log_ratio
        >>> logp, ones = torch.tensor([[-1.0, -0.5]], requires_grad=True), torch.ones
        >>> loss = text_log_ratio(logp, ones(1, 2), torch.tensor([[-0.2, -0.3, -0.5]]), ones(1, 3))
        >>> loss.sum().backward()
        >>> logp.grad
        tensor([[-0.5000, -0.5000]])
    """
    mask = mask.bool()
    live = torch.where(mask, logp, 0.0)
    total = torch.where(ref_mask.bool(), ref_logp.detach(), 0.0).sum(-1, keepdim=True)
    ratio = live.detach().sum(-1, keepdim=True) - total
    share = mask.to(logp.dtype) / mask.sum(-1, keepdim=True).clamp(min=1)
    return ratio * (share + live - live.detach())

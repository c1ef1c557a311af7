"""Distillation between vocabularies: what each method descends, by the sum over every token sequence of the student."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from oracle import gradient
from tolerances import EXACT

from klgrad.errors import ProblemError
from klgrad.strings import END, TokenSpace, text_kl, text_log_ratio

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of TRL's experimental part
    from trl.experimental.gold.gold_trainer import ULDLoss

STUDENT, TEACHER = TokenSpace(("", "a", "b", "ab"), 3), TokenSpace(("", "a", "b", "ba"), 3)
NEVER = -40.0
SEEDS = pytest.mark.parametrize("seed", range(4))


def random_logits(space, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(space.prefixes), len(space.pieces), generator=generator, dtype=torch.float64)


def given(seed):
    return random_logits(STUDENT, seed).requires_grad_(), random_logits(TEACHER, 100 + seed)


def writing_one_way(space, texts):
    """Logits of a model with these probabilities of texts, which writes each as its tokenizer does."""
    logits = torch.full((len(space.prefixes), len(space.pieces)), NEVER, dtype=torch.float64)
    for row, prefix in enumerate(space.prefixes):
        for token in range(len(space.pieces)):
            start = (*prefix, token)
            chance = sum(p for text, p in texts.items() if space.tokenize(text)[: len(start)] == start)
            if chance:
                logits[row, token] = math.log(chance)
    return logits


def agreeing(seed=7):
    """A student and a teacher with the same probabilities of texts, and other tokens."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.randn(len(STUDENT.texts), generator=generator, dtype=torch.float64).softmax(0).tolist()
    texts = dict(zip(STUDENT.texts, chances, strict=True))
    return writing_one_way(STUDENT, texts).requires_grad_(), writing_one_way(TEACHER, texts)


def entropy_of_writing(space, logits):
    """H(Y | S): of the sequence, given the text."""
    of_sequences, of_texts = space.token_log_probs(logits)[0].sum(-1), space.text_log_probs(logits)
    number = {text: i for i, text in enumerate(space.texts)}
    index = torch.tensor([number[space.written(y)] for y in space.sequences])
    return -(of_sequences.exp() * (of_sequences - of_texts[index])).sum()


def own_way(space, logits):
    """(S,) log-probs of each text's sequence by the tokenizer."""
    of_sequences = space.token_log_probs(logits)[0].sum(-1)
    return torch.stack([of_sequences[space.sequences.index(space.tokenize(text))] for text in space.texts])


def expected(loss, logits):
    """The mean of a loss of each sequence over what the student writes."""
    chance = STUDENT.token_log_probs(logits)[0].sum(-1).exp().detach()
    return sum(p * loss(y, logits) for p, y in zip(chance, STUDENT.sequences, strict=True))


# A sound one.


def test_the_texts_are_all_there():
    logits, ref_logits = given(0)
    for space, at in ((STUDENT, logits), (TEACHER, ref_logits)):
        EXACT.check(space.text_log_probs(at).exp().sum(), 1.0)
        assert len(space.texts) == 1 + 2 + 4 + 8
    assert STUDENT.tokenize("aab") == (1, 3, END)
    with pytest.raises(ProblemError, match="the same texts; received 'aab' in one alone"):
        text_kl(TokenSpace(("", "a"), 3), torch.zeros(4, 2), TEACHER, ref_logits)


def test_the_kl_of_texts_is_0_only_where_they_are_alike():
    logits, ref_logits = agreeing()
    EXACT.check(text_kl(STUDENT, logits, TEACHER, ref_logits), 0.0)
    assert text_kl(STUDENT, random_logits(STUDENT, 1), TEACHER, ref_logits) > 0.1


def mean_log_ratio(student, logits, teacher, ref_logits):
    """The mean of `text_log_ratio` over what the student writes."""
    logp, mask = student.token_log_probs(logits)
    ref, ref_mask = teacher.token_log_probs(ref_logits)
    rows = torch.tensor([teacher.sequences.index(teacher.tokenize(student.written(y))) for y in student.sequences])
    return (logp.sum(-1).exp().detach()[:, None] * text_log_ratio(logp, mask, ref[rows], ref_mask[rows])).sum()


@SEEDS
def test_the_log_ratio_of_the_text_descends_the_kl_of_texts_and_its_bias(seed):
    logits, ref_logits = given(seed)
    found = mean_log_ratio(STUDENT, logits, TEACHER, ref_logits)
    texts = STUDENT.text_log_probs(logits).exp()
    other_ways = own_way(TEACHER, ref_logits) - TEACHER.text_log_probs(ref_logits)
    bias = -entropy_of_writing(STUDENT, logits) - (texts * other_ways).sum()
    declared = text_kl(STUDENT, logits, TEACHER, ref_logits) + bias
    EXACT.check(found, declared)
    EXACT.check_vector(gradient(found, logits), gradient(declared, logits))
    assert gradient(bias, logits).norm() > 0.01


def test_without_a_second_way_of_writing_it_has_no_bias():
    student, teacher = TokenSpace(("", "a", "b"), 3), TokenSpace(("", "b", "a"), 3)
    logits, ref_logits = random_logits(student, 1).requires_grad_(), random_logits(teacher, 2)
    found = mean_log_ratio(student, logits, teacher, ref_logits)
    EXACT.check_vector(gradient(found, logits), gradient(text_kl(student, logits, teacher, ref_logits), logits))


# Methods in use: sorted probabilities (ULD), merged groups (GOLD), chunks.


def positions(space, logits, sequence):
    """(T, V) the distributions from which the tokens of a sequence, without its end, were drawn."""
    log = space.next_log_probs(logits)
    return log[[space.prefixes.index(sequence[:t]) for t in range(len(sequence) - 1)]].exp()


def offsets(space, sequence):
    ends = [len(space.written(sequence[: t + 1])) for t in range(len(sequence) - 1)]
    return list(zip([0, *ends], ends, strict=False))


def uld(y, logits, ref_logits):
    """The distance of sorted probabilities, position by position."""
    z = TEACHER.tokenize(STUDENT.written(y))
    own, other = positions(STUDENT, logits, y), positions(TEACHER, ref_logits, z)
    length = min(len(own), len(other))
    if not length:
        return logits.sum() * 0
    ranked = [x[:length].sort(-1, descending=True).values for x in (own, other)]
    return (ranked[0] - ranked[1]).abs().sum() / length


def gold(y, logits, ref_logits, beta=1.0):
    """TRL's own merging and its hybrid loss, with its alignment by offsets."""
    settings = SimpleNamespace(
        uld_crossentropy_weight=0.0, uld_distillation_weight=1.0, uld_student_temperature=1.0,
        uld_teacher_temperature=1.0, uld_skip_student_eos=True, uld_skip_teacher_eos=True, use_extended_uld=True,
        uld_token_merge_strategy="bayesian", uld_use_hybrid_loss=True, uld_hybrid_matched_weight=None,
        uld_hybrid_unmatched_weight=None, beta=beta,
    )  # fmt: skip
    loss = ULDLoss(settings)
    loss._teacher_matched_ids, loss.mapping_tensor = {0, 1, 2}, torch.arange(4)
    z = TEACHER.tokenize(STUDENT.written(y))
    groups = loss._align_by_byte_offsets(offsets(STUDENT, y), offsets(TEACHER, z))
    if not groups[0]:
        return logits.sum() * 0
    sides = ((STUDENT, logits, y), (TEACHER, ref_logits, z))
    merged = [
        loss._merge_probabilities_with_alignment_groups(positions(space, at, tokens), group, tokens)
        for group, (space, at, tokens) in zip(groups, sides, strict=True)
    ]
    return loss._compute_hybrid_uld_loss(*merged)


def chunks(y, logits, ref_logits):
    """The log-ratio of each aligned chunk on the scores of its own tokens; the end is a chunk."""
    z = TEACHER.tokenize(STUDENT.written(y))
    groups = ULDLoss._align_by_byte_offsets(offsets(STUDENT, y), offsets(TEACHER, z))
    groups = [[*own, [len(tokens) - 1]] for own, tokens in zip(groups, (y, z), strict=True)]
    total = logits.sum() * 0
    logs = [space.next_log_probs(at) for space, at in ((STUDENT, logits), (TEACHER, ref_logits))]
    of = lambda side, space, tokens, t: logs[side][space.prefixes.index(tokens[:t]), tokens[t]]
    for own, other in zip(*groups, strict=True):
        mine = torch.stack([of(0, STUDENT, y, t) for t in own]).sum()
        total = total + (mine - sum(of(1, TEACHER, z, t) for t in other)).detach() * mine
    return total


def whole_text(y, logits, ref_logits):
    """`text_log_ratio`, of one sequence."""
    z = TEACHER.tokenize(STUDENT.written(y))
    rows = [(STUDENT, logits, y), (TEACHER, ref_logits, z)]
    own, other = (space.token_log_probs(at)[0][space.sequences.index(tokens)] for space, at, tokens in rows)
    return (own.sum() - other.sum()).detach() * own.sum()


METHODS = {"ULD": uld, "GOLD": gold, "chunks": chunks, "the whole text": whole_text}


@pytest.mark.parametrize("name", METHODS)
def test_where_the_texts_are_alike_all_but_the_log_ratio_of_the_text_still_pull(name):
    """So their optimum is another student: nothing is left to learn, and the gradient is not 0."""
    logits, ref_logits = agreeing()
    pull = gradient(expected(lambda y, at: METHODS[name](y, at, ref_logits), logits), logits).norm()
    assert pull < 1e-9 if name == "the whole text" else pull > 0.1


def test_sorted_probabilities_cannot_tell_a_student_from_its_permutation():
    """It has every probability of the teacher on the wrong token, and neither loss nor gradient."""
    space = TokenSpace(("", "a", "b"), 1)
    teacher = torch.zeros(3, 3, dtype=torch.float64)  # after one character the end is certain
    teacher[0] = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64).log()
    student = teacher[:, [0, 2, 1]].clone().requires_grad_()
    ranked = [x[0].softmax(-1).sort(descending=True).values for x in (student, teacher)]
    loss = (ranked[0] - ranked[1]).abs().sum()
    EXACT.check(loss, 0.0)
    assert text_kl(space, student, space, teacher) > 1
    assert gradient(loss, student).norm() < 1e-12


COSINES = {
    "ULD": (-0.729, -0.057, -0.325, 0.276),
    "GOLD": (0.697, 0.493, -0.415, 0.497),
    "chunks": (0.596, 0.771, 0.667, 0.913),
    "the whole text": (0.893, 0.970, 0.908, 0.995),
}
"""Between a method's expected gradient and that of the KL of texts, on four problems; docs/distil.md has them."""


@pytest.mark.parametrize("name", COSINES)
@SEEDS
def test_directions(name, seed):
    logits, ref_logits = given(seed)
    a = gradient(expected(lambda y, at: METHODS[name](y, at, ref_logits), logits), logits)
    b = gradient(text_kl(STUDENT, logits, TEACHER, ref_logits), logits)
    assert float((a * b).sum() / (a.norm() * b.norm())) == pytest.approx(COSINES[name][seed], abs=6e-4)

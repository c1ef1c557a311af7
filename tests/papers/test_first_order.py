"""First-order policies: sums over steps against sums over completions, and samples against both."""

import pytest
import torch
from tolerances import EXACT

from klgrad.enumeration import CompletionSpace, Problem, target_gradients
from klgrad.papers.tang_munos import fig8_sequences as study
from klgrad.papers.tang_munos.fig8_sequences import METHODS, UNBIASED, Problems, draw_problems

VOCAB, LENGTH, CLASSES = 3, 4, 2


def small(ends: bool, problems: int = 2) -> Problems:
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(problems, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    start = torch.randn(problems, CLASSES, VOCAB, generator=generator, dtype=torch.float64)
    return Problems(torch.log_softmax(ref, -1), start, ends, LENGTH)


def last_tokens(space: CompletionSpace, prompt: int) -> torch.Tensor:
    """The token before each prefix's next one; the prompt before the first."""
    before = torch.full((space.prefixes,), prompt)
    later = space.mask[:, 1:]
    before[space.prefix[:, 1:][later]] = space.tokens[:, :-1][later]
    return before


def listed(problems: Problems, i: int, prompt: int) -> tuple[Problem, torch.Tensor]:
    """Problem i after one prompt, with a row of logits for every prefix, and the rows' previous tokens."""
    space = CompletionSpace(VOCAB, LENGTH, problems.ends)
    before = last_tokens(space, prompt)
    logits, ref = problems.log_probs(problems.start)[i, before], problems.ref[i, before]
    return Problem(space, logits, ref, logits), before


@pytest.mark.parametrize("ends", [True, False])
def test_divergences_and_length_are_those_over_all_completions(ends):
    problems = small(ends)
    logp = problems.log_probs(problems.start)
    kl, forward, length = torch.zeros(3, 2, dtype=torch.float64)
    for i in range(2):
        for prompt in range(VOCAB):
            problem, _ = listed(problems, i, prompt)
            student, teacher = problem.logp.sum(-1), problem.ref_logp.sum(-1)
            kl[i] += (student.exp() * (student - teacher)).sum() / VOCAB
            forward[i] += (teacher.exp() * (teacher - student)).sum() / VOCAB
            length[i] += (student.exp() * problem.space.mask.sum(-1)).sum() / VOCAB
    EXACT.check(problems.kl(logp, problems.ref), kl)
    EXACT.check(problems.kl(problems.ref, logp), forward)
    EXACT.check(problems.visits(logp).sum(-1), length)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_exact_gradient_is_that_over_all_completions(level, ends):
    problems = small(ends)
    found = study.exact_gradient(problems, level)
    for i in range(2):
        expected = torch.zeros(CLASSES, VOCAB, dtype=torch.float64)
        for prompt in range(VOCAB):
            problem, before = listed(problems, i, prompt)
            by_prefix = target_gradients(problem)[f"reverse-kl-{level}"].view(-1, VOCAB)
            expected.index_add_(0, before % CLASSES, by_prefix / VOCAB)
        EXACT.check(found[i], expected.flatten())


def test_samples_follow_the_policy_and_stop_at_the_end_token():
    problems, n = small(ends=True, problems=1), 20_000
    logp = problems.log_probs(problems.start)
    uniform = torch.rand(1, VOCAB * n, LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before, token, mask = (x[0] for x in problems.sample(logp, uniform))
    assert torch.equal(before[:, 1:], token[:, :-1])
    assert torch.equal(mask[:, 1:], mask[:, :-1] & (token[:, :-1] != 0))
    assert bool(mask[:, 0].all())
    for prompt in range(VOCAB):
        problem, _ = listed(problems, 0, prompt)
        mine = slice(prompt * n, (prompt + 1) * n)
        assert before[mine, 0].eq(prompt).all()
        same = (torch.where(mask, token, 0)[mine, None] == problem.space.tokens).all(-1)
        same &= (mask[mine, None] == problem.space.mask).all(-1)
        error = (problem.probability * (1 - problem.probability) / n).sqrt()
        assert float(((same.double().mean(0) - problem.probability) / error).abs().max()) < 5


@pytest.mark.parametrize(("name", "level"), [("token", "token"), *((name, "sequence") for name in UNBIASED)])
def test_a_step_descends_the_exact_gradient_in_the_mean(name, level):
    problems, draws = draw_problems(1, ends=True, generator=torch.Generator().manual_seed(2)), 400
    many = problems.repeated(draws)
    logits = many.start.clone().requires_grad_()
    uniform = torch.rand(draws, 64, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss = study.total_loss(METHODS[name], many, many.log_probs(logits), uniform)
    gradient = torch.autograd.grad(loss, logits)[0].flatten(1)
    error = gradient.std(0) / draws**0.5
    z = (gradient.mean(0) - study.exact_gradient(problems, level)[0]) / error
    assert float(z.abs().max()) < 5
    other = study.exact_gradient(problems, "token" if level == "sequence" else "sequence")[0]
    assert float(((gradient.mean(0) - other) / error).abs().max()) > 5


@pytest.mark.parametrize("name", METHODS)
def test_problems_do_not_influence_each_other(name):
    problems = draw_problems(2, ends=True, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(2, 64, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradient(rows: slice) -> torch.Tensor:
        some = Problems(problems.ref[rows], problems.start[rows], ends=True)
        logits = some.start.clone().requires_grad_()
        loss = study.total_loss(METHODS[name], some, some.log_probs(logits), uniform[rows])
        return torch.autograd.grad(loss, logits)[0]

    EXACT.check(gradient(slice(0, 2)), torch.cat([gradient(slice(0, 1)), gradient(slice(1, 2))]))


def test_a_problem_does_not_choose_its_own_rate():
    # After one point: rate 0 is better for the even problems, rate 1 for the odd ones.
    kl = torch.tensor([[[1.0, 9.0, 1.0, 9.0], [4.0, 4.0, 4.0, 4.0]]])
    found, best = study.at_best_rate({"kl": kl, "length": -kl})
    assert best.tolist() == [[1, 0]]
    assert found["kl"].tolist() == [[4.0, 9.0, 4.0, 9.0]]
    assert found["length"].tolist() == [[-4.0, -9.0, -4.0, -9.0]]

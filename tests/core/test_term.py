"""What may be declared, and the errors for what may not."""

import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
from tolerances import EXACT

from klgrad import Clip, ImportanceWeighting, KLTerm, Mask, Rollout, Truncate, divergences
from klgrad.core import families
from klgrad.core.term import as_code
from klgrad.errors import MeaningError

TOKEN, PREFIX, SEQUENCE = (ImportanceWeighting(ratio, bound=None) for ratio in ("token", "prefix", "sequence"))
RATIOS = {"none": None, "token": TOKEN, "prefix": PREFIX, "sequence": SEQUENCE}

UNSOUND = [
    ({"estimator": "k3"}, "gradient of the forward KL; remedy: write estimator='k1_k3'"),
    ({"level": "token", "estimator": "k1_k3"}, "no future to put k3 on"),
    ({"discount": 0, "estimator": "k1_k3"}, "\\(discount=0\\), which has no future.*with a discount above 0"),
    ({"discount": 0, "estimator": "exact", "baseline": "leave_one_out"}, "no sampled score to centre"),
    (
        {"weighting": TOKEN},
        "leaves the sampler's prefixes in the expectation; received ratio='token'; remedy: write "
        "ImportanceWeighting\\('prefix'",
    ),
    ({"divergence": "forward"}, "remedy: write estimator='k3'"),
    ({"divergence": "forward", "level": "future", "estimator": "k3", "weighting": TOKEN}, "Weighting\\('prefix'"),
    ({"divergence": "forward", "estimator": "k3", "weighting": PREFIX}, "ImportanceWeighting\\('sequence'"),
    ({"divergence": "forward", "estimator": "exact"}, "write estimator='k3' .* or level='token'"),
    ({"divergence": "forward", "estimator": "k3", "discount": 0.5}, "write level='future' with the discount"),
    ({"level": "token", "discount": 0.5}, "write level='future' with the discount"),
    ({"level": "token", "estimator": "exact", "baseline": "leave_one_out"}, "no sampled score to centre"),
    ({"estimator": "exact", "influence_bound": 1.0}, "no influence bound for estimator='exact'"),
    ({"discount": 1.5}, "a discount in \\[0, 1\\]; received 1.5"),
    ({"influence_bound": 0.0}, "a positive, finite influence bound"),
    ({"divergence": "backward"}, "divergence in \\(reverse, forward, .*, huber.*NUMBER NAME\\), or a `D.*'backward'"),
    ({"divergence": "jensen-shannon(2)"}, "beta strictly between 0 and 1; received 2"),
    ({"divergence": "hellinger(2)"}, "received 'hellinger\\(2\\)'"),
    ({"divergence": "alpha(x)"}, "received 'alpha\\(x\\)'"),
    ({"divergence": "hellinger", "estimator": "k3"}, "of the forward KL; remedy: write estimator='sampled'"),
    ({"divergence": "hellinger", "estimator": "exact"}, "or level='token' or 'future'"),
    ({"divergence": "hellinger", "discount": 0.5}, "write level='future' with the discount"),
    ({"divergence": 2}, "or a `Divergence`; received '2'"),
    ({"estimator": "k2"}, "estimator in"),
    ({"level": "token", "estimator": "exact", "weighting": TOKEN}, "target on the sampler's prefixes; received ratio="),
    ({"weighting": "prefix"}, "write weighting=ImportanceWeighting\\('prefix', bound=None\\)"),
    ({"reduction": "mean"}, "reduction in \\('sequence', 'token'\\)"),
]


@pytest.mark.parametrize(("choices", "text"), UNSOUND, ids=lambda x: str(x)[:60])
def test_an_unsound_combination_names_the_sound_one(choices, text):
    with pytest.raises(MeaningError, match=text):
        KLTerm(**choices)


@pytest.mark.parametrize("bound", [lambda: Truncate(0.5), lambda: Clip(1.1, 2.0), lambda: Mask(0.5, float("inf"))])
def test_a_bound_must_leave_the_on_policy_ratio_alone(bound):
    with pytest.raises(MeaningError, match="a finite band around 1"):
        bound()


@pytest.mark.parametrize(("arguments", "text"), [(("prefixes", None), "ratio in"), (("prefix", 2.0), "Truncate")])
def test_an_unknown_ratio_or_bound_is_refused(arguments, text):
    with pytest.raises(MeaningError, match=text):
        ImportanceWeighting(*arguments)


def test_the_bound_of_a_ratio_has_no_default():
    with pytest.raises(TypeError, match="bound"):
        ImportanceWeighting("prefix")  # type: ignore[call-arg]


def test_a_term_is_frozen_and_equal_by_meaning():
    assert KLTerm() == KLTerm(divergence="reverse")
    assert len({KLTerm(), KLTerm(), KLTerm(level="token")}) == 2
    with pytest.raises(AttributeError):
        KLTerm().level = "token"  # type: ignore[misc]


OPTIONS = {
    "divergence": ("reverse", "forward", "hellinger"),
    "estimator": ("sampled", "k1", "k1_k3", "k3", "exact"),
    "baseline": ("none", "leave_one_out"),
    "weighting": (None, TOKEN, PREFIX, SEQUENCE),
    "influence_bound": (None, 1.0),
    "reduction": ("sequence", "token"),
}


def declared(**options):
    """The term, or the message of the refusal."""
    try:
        return KLTerm(**options)
    except MeaningError as error:
        return str(error)


@pytest.mark.parametrize("values", list(product(*OPTIONS.values())), ids=str)
def test_the_token_level_and_discount_0_are_one_declaration(values):
    options = dict(zip(OPTIONS, values, strict=True))
    a, b = declared(level="token", **options), declared(discount=0, **options)
    assert a == b == declared(level="token", discount=0.0, **options)
    if isinstance(a, KLTerm) and isinstance(b, KLTerm):
        assert (hash(a), a.name, str(a)) == (hash(b), b.name, str(b))
        assert (a.level, a.discount) == (b.level, b.discount) == ("token", 0.0)


def table():
    """The rows of the table in the docstring of the families."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (families.__doc__ or "").splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 5}


KINDS = {
    # family, and the names of its sampled estimators
    ("reverse", "token"): ("token", ("k1",)),
    ("reverse", "sequence"): ("future", ("k1", "k1_k3")),
    ("forward", "token"): ("token", ("k3",)),
    ("forward", "future"): ("future", ("k3",)),
    ("forward", "sequence"): ("between completions", ("k3",)),
    ("hellinger", "token"): ("token", ("sampled",)),
    ("hellinger", "future"): ("future", ("sampled",)),
    ("hellinger", "sequence"): ("between completions", ("sampled",)),
}


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_table_of_the_families_says_what_may_be_declared(kind):
    family, sampled_estimators = KINDS[kind]
    forms, discounts, baseline, ratios = table()[family]
    for estimator, ratio, discount in product(("k1", "k1_k3", "k3", "sampled", "exact"), RATIOS, (0.0, 0.5, 1.0)):
        sampled = estimator != "exact"
        if estimator == "sampled" and kind[0] in ("reverse", "forward"):
            continue  # there it is k1, the default
        allowed = (
            (estimator in sampled_estimators if sampled else forms == "both")
            and {"(0, 1]": discount > 0, "0": discount == 0, "1": discount == 1}[discounts]
            and (ratio in ratios.split(", ") or (sampled and f"{ratio} (sampled only)" in ratios.split(", ")))
        )
        options = {"divergence": kind[0], "level": kind[1], "estimator": estimator, "weighting": RATIOS[ratio]}
        if discount == (1 if kind[1] == "token" else 0):
            continue  # 1 is the default and means 0; 0 is the token family
        for further, also in (
            ({}, True),
            ({"baseline": "leave_one_out"}, sampled or baseline == "yes"),
            ({"influence_bound": 1.0}, sampled),
        ):
            found = declared(discount=discount, **further, **options)
            assert isinstance(found, KLTerm) == (allowed and also), (options, discount, further)


SAME = [
    ({"divergence": divergences.REVERSE_KL}, {}),
    ({"divergence": "reverse-kl", "level": "future"}, {}),
    ({"divergence": "alpha(1)", "level": "token"}, {"level": "token"}),
    ({"divergence": "alpha(.5)"}, {"divergence": divergences.HELLINGER}),
    ({"divergence": divergences.alpha(1 / 3)}, {"divergence": f"alpha({1 / 3!r})"}),
    ({"divergence": "huber(2e0)"}, {"divergence": divergences.huber(2)}),
    ({"divergence": "jensen-shannon(0.5)", "estimator": "sampled"}, {"divergence": "jensen-shannon"}),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=str)
def test_a_divergence_has_one_form(one, other):
    a, b = KLTerm(**one), KLTerm(**other)
    assert (a, hash(a), a.name, str(a)) == (b, hash(b), b.name, str(b))
    assert isinstance(a.divergence, str)
    assert pickle.loads(pickle.dumps(a)) == b
    assert eval(as_code(a), {"KLTerm": KLTerm}) == a


def test_a_divergence_of_ones_own_is_held_as_it_is():
    mine = divergences.from_slope("hellinger", torch.tanh, "tanh(l)")  # another one's name, not another one's formula
    term = KLTerm(divergence=mine, level="token")
    assert (term.divergence, term.name) == (mine, "hellinger-token-sampled")
    assert term != KLTerm(divergence="hellinger", level="token")
    rollout = Rollout(-torch.ones(1, 2), -2 * torch.ones(1, 2), torch.ones(1, 2))
    EXACT.check(term(rollout).coefficient, torch.tanh(torch.ones(1, 2)))


ELSEWHERE = " on the sampler's prefixes"
WORDS = {
    # on-policy, and what is added off-policy
    KLTerm(divergence="alpha(0.3)", level="token", weighting=TOKEN): ("alpha(0.3), token level", ELSEWHERE),
    KLTerm(divergence="hellinger", level="token", estimator="exact"): ("hellinger, token level", ELSEWHERE),
    KLTerm(divergence="forward", level="future", estimator="k3", discount=0.5, weighting=PREFIX): (
        "forward-kl, token level and its future, discount 0.5", ""),
    KLTerm(divergence="chi-square", weighting=SEQUENCE): ("chi-square, sequence level", ""),
    KLTerm(divergence="chi-square", influence_bound=1.0): ("unknown", ""),
    KLTerm(divergence="forward", level="token", estimator="k3", weighting=TOKEN): ("forward-kl-token", "-sampler"),
}  # fmt: skip


@pytest.mark.parametrize("term", WORDS, ids=lambda t: t.name)
def test_what_a_term_descends_in_words(term):
    words, added = WORDS[term]
    assert term.descends == (words, words + added)


def test_a_sampled_term_of_another_divergence_descends_nothing_known_on_stale_samples():
    assert KLTerm(divergence="hellinger", level="token").descends == ("hellinger, token level", "unknown")


FORMULAS = {
    KLTerm(): "∇ KL(π‖ref), sequence level = E_π[ Σ_t (l_t + Σ_{s>t} l_s) ∇log π(y_t) ]; "
    "summed over the sequence; on-policy",
    KLTerm(level="token", weighting=TOKEN, reduction="token"): "∇ KL(π‖ref), token level = "
    "E_μ[ Σ_t (r_t l_t) ∇log π(y_t) ]; averaged over the batch's tokens; off-policy by the token ratio; "
    "ratio unbounded",
    KLTerm(estimator="exact", discount=0.9, weighting=PREFIX): "∇ KL(π‖ref), sequence level = "
    "E_μ[ Σ_t w_{t-1} ∇KL_t + Σ_{s>t} 0.9^(s-t) w_{s-1} KL_s ∇log π(y_t) ]; summed over the sequence; "
    "off-policy by the prefix ratio; ratio unbounded",
    KLTerm(divergence="forward", estimator="k3", weighting=SEQUENCE): "∇ KL(ref‖π), sequence level = "
    "E_μ[ Σ_t w_T (1 - exp(-Σ_s l_s)) ∇log π(y_t) ]; summed over the sequence; off-policy by the sequence ratio; "
    "ratio unbounded",
    KLTerm(divergence="jensen-shannon(0.25)", level="future", weighting=PREFIX): "∇ jensen-shannon(0.25), token level "
    "and its future = E_μ[ Σ_t (w_t (-0.75 log(0.25 exp(-l_t) + 0.75)) + Σ_{s>t} w_s f(u_s)/u_s) ∇log π(y_t) ]; "
    "summed over the sequence; off-policy by the prefix ratio; ratio unbounded",
    KLTerm(divergence="huber(2)", level="future", estimator="exact", discount=0.9): "∇ huber(2), token level and its "
    "future = E_π[ Σ_t ∇D_t + Σ_{s>t} 0.9^(s-t) D_s ∇log π(y_t) ]; summed over the sequence; on-policy",
    KLTerm(divergence="hellinger"): "∇ hellinger, sequence level = E_π[ Σ_t ((1 - exp(-0.5 Σ_s l_s)) / 0.5) "
    "∇log π(y_t) ]; summed over the sequence; on-policy",
}


@pytest.mark.parametrize("term", FORMULAS, ids=lambda t: t.name)
def test_the_formula_of_a_term(term):
    assert str(term) == FORMULAS[term]


def test_the_reductions_divide_by_sequences_or_by_tokens():
    logp = torch.tensor([[-1.0, -2.0, -1.0], [-3.0, 0.0, 0.0]]).double()
    rollout = Rollout(logp, logp - 1, torch.tensor([[1, 1, 1], [1, 0, 0]]))
    EXACT.check(KLTerm()(rollout).value.mean, 2.0)
    EXACT.check(KLTerm(reduction="token")(rollout).value.mean, 1.0)


def test_a_loss_that_was_logged_still_has_its_gradient():
    """It is computed when it is first asked for, which may be where no gradient is wanted."""
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    given = {"token_reverse_kl": logp.square(), "group": torch.tensor([0, 0])}
    rollout = Rollout(logp, torch.full((2, 3), -2.0), torch.ones(2, 3), **given)
    for term in (KLTerm(), KLTerm(estimator="exact")):
        unseen, logged = term(rollout), term(rollout)
        with torch.no_grad():
            assert (logged.loss.item(), logged.pathwise.item()) == (unseen.loss.item(), unseen.pathwise.item())
        EXACT.check(*(torch.autograd.grad(each.loss, logp, retain_graph=True)[0] for each in (logged, unseen)))
        assert logged.pathwise.requires_grad == (term.estimator == "exact")


def test_loss_and_advantage_give_one_update():
    """Subtracting β c_t from the advantages, or adding β loss to the loss: the same gradient."""
    torch.manual_seed(0)
    logp = (-torch.rand(4, 6)).double().requires_grad_()
    rollout = Rollout(logp, -torch.rand(4, 6).double(), torch.ones(4, 6), group=torch.tensor([0, 0, 1, 1]))
    advantages, beta = torch.randn(4, 1).double(), 0.3
    result = KLTerm(baseline="leave_one_out")(rollout)
    assert not any(x.requires_grad for x in (result.coefficient, *result.value))
    policy_loss = lambda a: -(a * logp).sum(-1).mean()
    added = torch.autograd.grad(policy_loss(advantages) + beta * result.loss, logp)[0]
    subtracted = torch.autograd.grad(policy_loss(advantages - beta * result.coefficient), logp)[0]
    EXACT.check(added, subtracted)


@pytest.mark.parametrize("term", [KLTerm(), KLTerm(level="token"), KLTerm(estimator="exact")], ids=lambda t: t.name)
def test_micro_batches_by_per_token_and_the_tokens_of_the_batch_are_a_token_mean(term):
    """Unequal lengths: the mean of the micro-batches' own token means is another gradient."""
    logp, ref_logp, kl = -torch.rand(3, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 4, 1, 1, 0, 2])[:, None]
    whole = replace(term, reduction="token")

    def rollout(logp, rows):
        return Rollout(logp[rows], ref_logp[rows], mask[rows], token_reverse_kl=logp[rows] * kl[rows])

    def accumulated(loss):
        leaf = logp.clone().requires_grad_()
        for rows in (slice(0, 2), slice(2, 5), slice(5, 6)):
            loss(rollout(leaf, rows)).backward()
        return leaf.grad

    leaf = logp.clone().requires_grad_()
    whole(rollout(leaf, slice(0, 6))).loss.backward()
    EXACT.check(accumulated(lambda r: term(r).per_token.sum() / mask.sum()), leaf.grad)
    of_means = accumulated(lambda r: whole(r).loss / 3)
    assert float((of_means - leaf.grad).norm() / leaf.grad.norm()) > 0.1

"""Advice is data: the same remedies appear in the sentence, in JSON and on the page."""

from html import escape

import pytest
import torch

from klgrad import Clip, ImportanceWeighting, KLTerm, Mask, Truncate, zoo
from klgrad.audit import audit
from klgrad.audit.advice import EITHER, IF_STALE, NOISY, STALE, Advice
from klgrad.audit.page import to_html
from klgrad.audit.subject import as_subject, every_term
from klgrad.core.term import Remedy, as_code
from klgrad.zoo import AFTER_DIVISION

NAMES = {x.__name__: x for x in (KLTerm, ImportanceWeighting, Truncate, Clip, Mask)}


def test_the_code_of_a_term_gives_the_term():
    terms = {*every_term(), KLTerm(level="token", weighting=ImportanceWeighting("token", bound=Clip(0.5, 2.0)))}
    assert len(terms) > 20
    for term in terms:
        assert eval(as_code(term), dict(NAMES)) == term


def test_sentences():
    assert str(Remedy(use=("k2-loss", KLTerm()), why="a reason")) == "Use k2-loss or KLTerm() instead (a reason)."
    assert str(Remedy("detach the ratio", ("k2-loss",))) == "Detach the ratio: use k2-loss instead."
    assert str(Remedy("for the reverse KL", (KLTerm(),))) == "For the reverse KL, use KLTerm() instead."
    assert str(Remedy("return the KL")) == "Return the KL."
    advice = Advice("descends KL", ("overflows",), (Remedy("do this"), Remedy("do that")))
    assert str(advice) == "Descends KL; overflows. Do this. Do that."
    assert str(Advice()) == ""
    pieces = Remedy("do", ("k2-loss", KLTerm())).pieces
    assert [piece.text for piece in pieces if piece.is_code] == ["k2-loss", "KLTerm()"]


def test_every_cell_that_descends_no_target_has_a_remedy():
    lacking = {c.name for c in zoo.CELLS.values() if c.descends.on_policy in ("nothing", "unknown") and not c.instead}
    assert lacking == set(), lacking
    assert zoo.get("k2-loss").instead is None


OF_CELLS = [cell.instead for cell in zoo.CELLS.values() if cell.instead is not None]
REPLACEMENTS = {as_code(x): x for remedy in (*OF_CELLS, EITHER) for x in remedy.use}


@pytest.mark.parametrize("code", REPLACEMENTS)
def test_a_replacement_is_declared_to_descend_a_reverse_kl(code):
    replacement = REPLACEMENTS[code]
    loss = zoo.get(replacement) if isinstance(replacement, str) else replacement
    if isinstance(loss, KLTerm) and (loss.influence_bound is not None or 0 < loss.discount < 1):
        assert loss.descends.on_policy == "unknown"  # it declares a compromise
    else:
        assert loss.descends.on_policy.startswith("reverse-kl")


def shown(loss, name=None):
    subject = as_subject(loss, name)
    result = audit(subject)
    return result, to_html([result])


@pytest.mark.slow
def test_a_remedy_is_the_same_in_every_form():
    result, page = shown(zoo.get("k3-loss"))
    instead, off_policy = result.advice.remedies
    assert instead == zoo.get("k3-loss").instead
    assert off_policy == Remedy(IF_STALE, (STALE["reverse-kl-token"],), NOISY)
    assert result.to_dict()["remedies"] == [instead.to_dict(), off_policy.to_dict()]
    for remedy in (instead, off_policy):
        assert str(remedy) in str(result.advice)
        assert f"<dd>{escape(str(remedy), quote=False)}</dd>".replace("'", "&#39;") in page


def test_a_loss_that_is_weighted_already_needs_no_other_weights():
    weighted, _ = shown(zoo.get("stale-k1-reward"))
    assert [remedy.do for remedy in weighted.advice.remedies] == [IF_STALE]


def test_a_sound_term_needs_no_remedy():
    assert audit(KLTerm(weighting=ImportanceWeighting("prefix", bound=None))).advice.remedies == ()


def whitened_reward(logp, ref_logp, mask, group):
    kl = ((logp - ref_logp).detach() * mask).sum(-1).view(-1, int((group == group[0]).sum()))
    whitened = (kl - kl.mean(1, keepdim=True)) / (kl.std(1, keepdim=True) + 1e-4)
    return (whitened.view(-1, 1) * logp * mask).sum() / len(logp)


def test_a_whitened_reward_gets_the_sentence_of_the_cell():
    remedies = audit(whitened_reward).advice.remedies
    assert remedies[0] == zoo.get("k1-reward-group-std").instead == AFTER_DIVISION


@pytest.mark.parametrize("of_tokens", [True, False])
def test_a_term_in_the_place_of_a_mean_over_tokens_has_another_beta(of_tokens):
    def loss(logp, ref_logp, mask):
        x = torch.where(mask, ref_logp - logp, 0.0)
        total = (torch.expm1(x) - x).sum()
        return total / mask.sum() if of_tokens else total / len(mask)

    remedies = audit(loss).advice.remedies
    assert len(remedies) == 2
    assert all(("divide β by the mean length" in remedy.why) == of_tokens for remedy in remedies)

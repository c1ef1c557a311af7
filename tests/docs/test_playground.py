"""The playground in a real browser: its numbers are the library's, its words the audit's, and the page can be used."""

import itertools
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import playground
import pytest
import torch
from docs.browser import BrowserPage, find_browser
from docs.choices import CELLS, CHOICES, DEFAULTS, compared, loss_of
from some import first

import klgrad
from klgrad import Rollout, divergences, zoo
from klgrad.audit import audit
from klgrad.core.divergences import NAMED

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "assets" / "playground"
SAME = 1e-9

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_browser() is None, reason="there is no Chromium")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A browser with the scripts of the page, without the page."""
    folder = tmp_path_factory.mktemp("page")
    path, data = folder / "scripts.html", folder / "data.js"
    data.write_text(playground.data_script(), encoding="utf-8")
    files = (data, FOLDER / "mathematics.js", FOLDER / "sentences.js")
    scripts = "".join(f'<script src="{file.as_uri()}"></script>' for file in files)
    path.write_text(f"<!doctype html><meta charset=utf-8>{scripts}", encoding="utf-8")
    browser = BrowserPage()
    browser.open(path.as_uri())
    yield browser
    assert browser.errors == []
    browser.close()


def called(page, function, *arguments):
    """The result of a function of the page's scripts."""
    return page.run(f"{function}(...{json.dumps(arguments)})")


def parts_of(page, choice):
    return called(page, "Mathematics.takeApart", choice)


def settings_for(page, choice):
    take = "Mathematics.takeApart"
    code = f"(choice, defaults) => Sentences.settings({take}(choice), choice, {take}, defaults)"
    return called(page, f"({code})", choice, DEFAULTS)


@cache
def audited(name):
    """The parts of a choice, by the audit."""
    loss = zoo.get(name) if name in CELLS else loss_of(CHOICES[name])
    return audit(loss).anatomy.to_dict()


def close(found, expected):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), expected, rtol=SAME, atol=SAME)


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# Numbers.


@pytest.mark.parametrize("name", CHOICES)
def test_the_coefficient_of_a_token(name, page):
    """One token, at log-ratios from -8 to 8 and ratios from 0.2 to 5, against autograd."""
    choice = DEFAULTS | CHOICES[name] | {"baseline": "none"}
    grid = list(itertools.product(torch.linspace(-8, 8, 65).tolist(), (0.2, 1.0, 1.7, 5.0)))
    logp = torch.full((len(grid), 1), -20.0, dtype=torch.float64, requires_grad=True)
    log_ratio, ratio = torch.tensor(grid, dtype=torch.float64).T[:, :, None]
    rollout = Rollout(logp, logp.detach() - log_ratio, torch.ones(len(grid), 1), logp.detach() - ratio.log())
    (loss_of(choice)(rollout) * len(grid)).backward()
    code = "(choice, grid) => { const loss = Mathematics.lossOf(choice); const bound = Mathematics.boundOf(choice);"
    code += "return grid.map(([l, r]) => bound(r) * loss.own(l, r)); }"
    close(called(page, f"({code})", choice, grid), logp.grad[:, 0])


SLOPES = {
    "reverse": "l",
    "forward": "1 - exp(-l)",
    "chi-square": "exp(l) - 1",
    "hellinger": "2 * (1 - exp(-l / 2))",
    "jensen-shannon": "-0.5 * log(0.5 * exp(-l) + 0.5)",
    "total-variation": "sign(l)",
}


@pytest.mark.parametrize("name", [*SLOPES, "cubic"])
def test_the_generator(name, page):
    log_ratio = torch.linspace(-4, 1.2, 79).double()
    formula = SLOPES.get(name, "l + l^3")
    known = NAMED.get(name) or divergences.from_slope("cubic", lambda l: l + l**3)
    code = "(loss, logs) => Mathematics.generator(Mathematics.lossOf({loss, place: 'reward'}).slope, logs)"
    close(called(page, f"({code})", formula, log_ratio.tolist()), log_ratio.exp() * known.excess(log_ratio))


REF = [0.5, 0.3, 0.2]
REWARDS = ([1.0, 0.3, 0.0], [-0.2, 0.9, 0.85], [0.0, 0.0, 0.0])
OPTIMUM = "((choice, ...rest) => Mathematics.optimum(Mathematics.lossOf(choice).slope, ...rest))"


CANCEL = ("k2-loss", "ratio-k3-loss", "stopped-ratio-k2-loss", "k3-both", "k3-both-half")
"""`r * k3(l)` and k3 in both places are l in exact arithmetic; far below ref their rounding is larger than l."""


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("name", [*CANCEL, *(name for name in SLOPES if name != "total-variation")])
def test_the_optimum(name, reward, page):
    choice = CHOICES[name] if name in CANCEL else {"loss": SLOPES[name], "place": "reward"}
    divergence, scale = "reverse" if name in CANCEL else name, 0.5 if name == "k3-both-half" else 1.0
    for beta in (0.05, 0.4, 2.0) if name in CANCEL else (0.25, 0.4, 1.0, 2.0):
        expected = klgrad.optimum(divergence, tensor(REF).log(), tensor(reward), scale * beta).exp()
        close(called(page, OPTIMUM, choice, REF, reward, beta), expected)


@pytest.mark.parametrize("reward", REWARDS)
def test_the_optimum_where_the_slope_jumps(reward, page):
    """Twice the total variation: a probability moves to the best token where that is worth more than 2 beta."""
    best = max(reward)
    for beta in (0.06, 0.3, 0.45, 1.0):
        expected = [0.0 if best - x > 2 * beta else p for x, p in zip(reward, REF, strict=True)]
        expected[reward.index(best)] += 1 - sum(expected)
        close(called(page, OPTIMUM, {"loss": "sign(l)", "place": "reward"}, REF, reward, beta), expected)


@pytest.mark.parametrize("loss", ["clamp(k3(l), -10, 10)", "k3(l)"])
def test_where_the_gradient_leads_it_is_zero(loss, page):
    choice, reward, beta = DEFAULTS | {"loss": loss}, REWARDS[0], 0.4
    found = tensor(called(page, OPTIMUM.replace("optimum", "follow"), choice, REF, reward, beta))
    logits = found.log().requires_grad_()
    logp = logits.log_softmax(-1)
    rows = Rollout(logp[:, None], tensor(REF).log()[:, None], torch.ones(3, 1))
    each = torch.autograd.grad(3 * loss_of(choice)(rows), logp, retain_graph=True)[0]
    pull = (found * (tensor(reward) - beta * each)).detach()
    (logp * pull).sum().backward()
    assert float(logits.grad.abs().max()) < 1e-8
    close(found.sum().item(), 1.0)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("is_stale", [False, True], ids=["fresh", "stale"])
def test_the_expected_gradient_of_a_cell(name, is_stale, page):
    """Against the cell itself, summed over every group of four tokens."""
    policy, ref = [0.62, 0.3, 0.08], REF
    sampler = [0.4, 0.35, 0.25] if is_stale else policy
    logits = tensor(policy).log().requires_grad_()
    groups = torch.tensor(list(itertools.product(range(3), repeat=4)))
    tokens = groups.flatten()
    column = lambda p: tensor(p).log()[tokens][:, None]
    logp, group = logits.log_softmax(-1)[tokens][:, None], torch.arange(len(groups)).repeat_interleave(4)
    rollout = Rollout(logp, column(ref), torch.ones(len(tokens), 1), behavior_logp=column(sampler), group=group)
    chance = tensor(sampler)[groups].prod(-1).repeat_interleave(4)
    cell = zoo.get(name)
    losses = cell.per_token(rollout)[:, 0] if cell.per_token else loss_rows(cell, rollout)
    (chance * (losses + 0 * rollout.logp[:, 0]) / 4).sum().backward()  # one cell has no gradient
    close(called(page, "Mathematics.gradient", CHOICES[name], policy, ref, sampler), logits.grad)


def loss_rows(cell, rollout):
    """The loss of each completion of one token, for a cell whose reduction is a part of it."""
    columns = (rollout.logp, rollout.ref_logp, rollout.mask, rollout.behavior_logp)
    rows = zip(*(x.split(1) for x in columns), strict=True)
    return torch.stack([cell(Rollout(*row, behavior_logp=sampler)) for *row, sampler in rows])


# Words.


@pytest.mark.parametrize("name", first(CHOICES, 8))
def test_the_parts_are_those_of_the_audit(name, page):
    assert compared(parts_of(page, CHOICES[name])) == compared(audited(name))


@pytest.mark.parametrize("name", first(CHOICES, 8))
def test_the_code_is_a_term_with_the_same_parts(name, page):
    parts = parts_of(page, CHOICES[name])
    declared = called(page, "Sentences.term", parts)
    if declared["code"] is None:
        assert declared["why"]
        return
    found = compared(audit(eval(declared["code"], vars(klgrad))).anatomy.to_dict())
    expected = compared(parts) | {"past": False}  # a term has no credit from earlier tokens
    if parts["baseline"] == "group-mean":
        expected["baseline"] = ("leave-one-out", False)
    if parts["divergence"]["weight"] != 1:
        expected["scale"] = 1.0
    assert found == expected


def test_most_choices_have_a_term(page):
    """So that the test above is not empty."""
    declared = [called(page, "Sentences.term", parts_of(page, choice))["code"] for choice in CHOICES.values()]
    assert sum(code is not None for code in declared) >= 20


@pytest.mark.parametrize("entry", playground.settings(), ids=lambda entry: entry["subject"])
def test_a_setting_is_found_by_its_choice(entry, page):
    choice = DEFAULTS | entry["choice"]
    (found,) = [x for x in settings_for(page, choice) if x["framework"] == entry["framework"]]
    assert found["differs"] == []
    assert DEFAULTS | found["choice"] == choice
    assert "place" in entry["choice"] or compared(found["parts"]) == compared(parts_of(page, choice))


def test_the_nearest_setting_says_what_differs(page):
    choice = DEFAULTS | {"loss": "k3(l)", "unit": "completion-mean"}
    found = {x["framework"]: x["differs"] for x in settings_for(page, choice)}
    assert found["TRL"] == []
    assert found["verl"] == ["where it is flat", "unit"]


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("k4(l)", 'expected l, r, a number or one of exp, .*; received "k4"'),
        ("l +", "received the end"),
        ("(l", 'expected "\\)"; received the end'),
        ("l l", 'expected an operator; received "l"'),
        ("clamp(l, 2)", "expected 3 arguments of clamp; received 2"),
        ("constructor(l)", "received"),
        ("l;alert(1)", 'expected an operator; received ";"'),
    ],
)
def test_what_is_no_formula(formula, message, page):
    code = "(text) => { try { Mathematics.parse(text); return null; } catch (e) { return e.message; } }"
    found = called(page, f"({code})", formula)
    assert found is not None
    assert re.search(message, found)


# The page.


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A browser, and the address of the page in a site that is built."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    browser = BrowserPage()
    yield browser, (folder / "playground.html").as_uri()
    # The theme's own search needs a server.
    assert [error for error in browser.errors if "search_index.js" not in error] == []
    browser.close()


def words(browser):
    return browser.run("document.getElementById('parts').innerText")


def test_a_link_carries_the_choice(site):
    browser, address = site
    browser.open(f"{address}#loss=l&place=reward&horizon=discount&discount=0.5&rewardA=-0.5")
    assert "reverse KL" in words(browser)
    assert "discounted by 0.5 a token, by k1" in words(browser)
    code = browser.run("document.getElementById('code').innerText")
    assert "KLTerm(discount=0.5)" in code
    before, link = words(browser), browser.run("location.href")
    assert "rewardA=-0.5" in link
    browser.open(link)
    assert words(browser) == before


def test_a_formula_is_typed_and_a_mistake_is_told(site):
    browser, address = site
    browser.open(address)
    browser.run("document.querySelector('[name=loss]').select()")
    browser.write("abs(l)")
    assert "twice the total variation" in words(browser)
    assert "loss=abs" in browser.run("location.hash")
    browser.write(" +")
    assert "received the end" in browser.run("document.getElementById('error').textContent")
    browser.write(" k2(l)")
    assert browser.run("document.getElementById('error').textContent") == ""
    assert "one of its own" in words(browser)


def test_it_is_used_by_the_keyboard(site):
    browser, address = site
    browser.open(address)
    browser.run("document.getElementById('estimator').focus()")
    seen = []
    for _ in range(12):
        seen.append(browser.run("document.activeElement.name || document.activeElement.id"))
        browser.press("Tab", 9)
    reachable = ["estimator", "loss", "place", "ratio", "unit"]
    assert [name for name in seen if name in reachable] == reachable
    assert {"rewardA", "rewardB", "rewardC", "beta"} <= set(seen)
    assert "horizon" not in seen  # which has no effect in a loss
    ends = "[...document.querySelectorAll('#ends td.play-bar')].map(x => x.textContent)"
    before = browser.run(ends)
    browser.run("document.querySelector('[name=rewardC]').focus()")
    for _ in range(3):
        browser.press("ArrowRight", 39)
    assert "rewardC=0.15" in browser.run("location.hash")
    assert browser.run(ends) != before


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400], ids=["phone", "desktop"])
def test_it_fits_the_screen_and_follows_the_colours(width, dark, site):
    browser, address = site
    browser.resize(width, 900, dark=dark)
    browser.open(address)
    browser.run("localStorage.clear()")
    browser.open(f"{address}#loss=l&place=reward&horizon=whole&baseline=leave-one-out")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('.play canvas').length") == 2
    text = "getComputedStyle(document.querySelector('.play')).getPropertyValue('--play-text')"
    assert browser.run(text).strip() == ("#bbb" if dark else "#555")

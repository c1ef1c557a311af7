"""Results as a page, as a table in a terminal: well-formed, self-contained, true, and nothing is cut off."""

import json
import math
import re
import shutil
import struct
import subprocess
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from importlib.resources import files
from io import StringIO
from itertools import pairwise

import pytest
import torch
from markupsafe import Markup
from rich.console import Console
from typer.testing import CliRunner

from klgrad import KLTerm, zoo
from klgrad.audit import audit, catalogue
from klgrad.audit.advice import Advice, rows
from klgrad.audit.page import (
    BETA,
    COEFFICIENT,
    GENERATOR,
    REF,
    REWARD,
    coefficient_of,
    generator_of,
    optimum_of,
    slope_of,
    to_html,
    why_no_optimum,
)
from klgrad.audit.terminal import overview, shown_of
from klgrad.cli import app

# The page of `klgrad audit --html`.


NAMES = ("k1-loss", "k3-loss", "k3-loss-clamped", "reverse-sequence-k1", "k1-reward")
VOID = {"meta", "br", "link", "img", "input", "hr", "wbr"}
EVIL = """<script>alert("1")</script> & 'co' <b>"""


class Checker(HTMLParser):
    """Fails on unbalanced tags; keeps what tests ask about."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def count(self, tag):
        return sum(t == tag for t, _ in self.tags)


@pytest.fixture(scope="module")
def audited():
    return [audit(catalogue()[name]) for name in NAMES]


@pytest.fixture(scope="module")
def page(audited):
    return to_html(audited)


@pytest.mark.slow
def test_well_formed_self_contained_and_accessible(audited, page):
    found = Checker(page)
    assert to_html(audited) == page
    assert found.count("h1") == 1
    assert len(found.ids) == len(set(found.ids))
    assert {link[1:] for link in found.links} <= set(found.ids)
    assert not re.search(r"https?:|//\w", page)
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|@font-face", page)
    assert all(link.startswith("#") for link in found.links)
    assert found.count("article") == len(NAMES)
    levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch("h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in pairwise(levels)), "a heading level is skipped"
    pictures = [attrs for tag, attrs in found.tags if tag == "svg"]
    assert all(a.get("aria-hidden") == "true" or (a.get("role") == "img" and a.get("aria-label")) for a in pictures)
    assert all("scope" in attrs for tag, attrs in found.tags if tag == "th")
    assert dict(found.tags)["html"] == {"lang": "en"}


def test_the_curve_is_the_coefficient_per_unit_of_the_scale():
    def shrunk(logp, ref_logp, mask):
        return 0.04 * ((logp - ref_logp) ** 2 / 2 * mask).sum() / mask.sum()

    k2, k3 = (coefficient_of(audit(loss).anatomy) for loss in (shrunk, catalogue()["k3-loss"]))
    assert all(y == pytest.approx(x, abs=1e-9) for x, y in k2)
    assert all(y == pytest.approx(1 - math.exp(-x), rel=1e-9) for x, y in k3)
    exact = coefficient_of(audit(KLTerm(level="token", estimator="exact")).anatomy)
    assert all(y == pytest.approx(x, abs=1e-9) for x, y in exact)


def swapped(logp, ref_logp):
    return (logp - ref_logp).exp() - 1 - (logp - ref_logp)


DIVERGENCES = {
    catalogue()["k2-loss"]: lambda p, ref: p * (p / ref).log() - p + ref,
    catalogue()["k3-loss"]: lambda p, ref: p - ref - ref * (p / ref).log(),
    swapped: lambda p, ref: (p - ref) ** 2 / (2 * ref),
}
"""By loss, ref f(p/ref) per unit of its scale."""


@pytest.mark.parametrize("loss", DIVERGENCES)
def test_f_is_the_integral_and_the_policy_ends_where_no_logit_gains(loss):
    a, divergence = audit(loss).anatomy, DIVERGENCES[loss]
    for parts in (a, replace(a, own=replace(a.own, shares={}))):  # by its name, and between the points that were read
        tolerance = 1e-4 if parts is a else 0.1  # the points are 1 apart far from ref
        one = torch.ones((), dtype=torch.float64)
        for u, f in generator_of(slope_of(parts.curve)):
            assert f == pytest.approx(float(divergence(u * one, one)), rel=tolerance, abs=tolerance)
    ref, reward = torch.tensor(REF, dtype=torch.float64), torch.tensor(REWARD, dtype=torch.float64)
    logits = torch.tensor(optimum_of(slope_of(a.curve)), dtype=torch.float64).log().requires_grad_()
    p = logits.softmax(-1)
    (gradient,) = torch.autograd.grad((p * reward - BETA * divergence(p, ref)).sum(), logits)
    assert float(gradient.abs().max()) <= 1e-9


def test_the_policy_ends_beside_the_optimum_of_the_true_kl(audited):
    card = to_html([audit(catalogue()["k3-loss"])]).partition('<table class="bars">')[2].partition("</table>")[0]
    weights = [p * math.exp(r / BETA) for p, r in zip(REF, REWARD, strict=True)]
    true = [f"{w / sum(weights):.2f}" for w in weights]
    assert re.findall(r'class="ref"><i style="width:[\d.]+%"></i>([\d.]+)', card) == [f"{p:.2f}" for p in REF]
    assert re.findall(r'class="true"><i style="width:[\d.]+%"></i>([\d.]+)', card) == true
    assert re.findall(r'class="ends"><i style="width:[\d.]+%"></i>([\d.]+)', card) != true
    text = to_html(audited[2:3])
    assert '<table class="bars">' not in text
    assert "No optimum by f alone: f is not convex." in text


def test_why_a_loss_has_no_optimum():
    def tempered(logits, ref_logits, mask):
        p, q = ((z / 2).log_softmax(-1) for z in (logits, ref_logits))
        return ((q.exp() * (q - p)).sum(-1) * mask).sum() / mask.sum()

    def late(logp, ref_logp):
        return (logp - ref_logp.roll(1, -1)) ** 2 / 2

    losses = (tempered, late, catalogue()["k1-reward-group-std"], catalogue()["k2-loss"])
    found = [why_no_optimum(audit(loss).anatomy) for loss in losses]
    assert [why[:12] for why in found] == ["rewards are ", "a token is n", "the pull is ", ""]


@pytest.mark.slow
def test_up_to_six_losses_are_drawn_in_one_figure(audited):
    def lines(results):
        part = to_html(results).partition('id="compare"')[2].partition("</section>")[0]
        return re.findall(r'class="line line-(\d)" d="(M[^"]{20,})"', part)

    drawn = [number for number, _ in lines(audited)]
    assert drawn == ["1", "2", "3", "4"] * 2  # k1-loss has no curve; the coefficients, and f(u)
    assert "No curve" in to_html(audited[:1])
    assert lines(audited[:1]) == lines(audited[:2]) == []
    assert lines([*audited, *audited[1:3]]) == []
    first, _, f, _ = lines(audited[1:3])
    assert first[1] == COEFFICIENT.path(coefficient_of(audited[1].anatomy))
    assert f[1] == GENERATOR.path(generator_of(slope_of(audited[1].anatomy.curve)))


def test_text_is_escaped(audited):
    evil = replace(audited[0], name=EVIL, advice=Advice(f"X{EVIL}"))
    for many in ([evil], [evil, evil]):
        found = Checker(to_html(many, summaries=[EVIL] * len(many), tags={EVIL: EVIL}, not_audited={EVIL: EVIL}))
        assert not {"script", "b"} & {tag for tag, _ in found.tags}
        assert found.text.count(EVIL) >= 2 * len(many)
        assert len(found.ids) == len(set(found.ids))


def test_the_card_has_the_rows_of_the_report(audited, page):
    card = page.split('id="loss-2-k3-loss"')[1].split("</article>")[0]
    for label, sentence in rows(audited[1]):
        assert re.search(f"<dt>{re.escape(label)}</dt><dd>(<code>)?{re.escape(str(Markup.escape(sentence)))}<", card)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none(audited, bad):
    broken = replace(audited[1], variance=bad, variance_near=bad, scale=None, finite=False, advice=Advice())
    text = to_html([broken, audited[0]])
    Checker(text)
    assert not re.search(r"(?<!bound=)\b(nan|inf|None)\b", text.split("</style>")[1])


@pytest.mark.slow
def test_dead_zones_are_shaded_and_what_is_alive_is_not(audited):
    text = to_html(audited[2:3])
    assert text.count('<rect class="dead"') == 2 + 1  # and the key
    assert "a gradient only where -2.61 &lt; log π/ref &lt; 11" in text
    for loss in (KLTerm(), KLTerm(influence_bound=1.0), lambda logp: (logp.detach() * 0).sum()):
        assert '<rect class="dead"' not in to_html([audit(loss, name="mine")])


SETTINGS = [
    f"verl use_kl_loss kl_loss_type={kind} loss_agg_mode={mode} an_option_with_a_very_long_name_indeed={flag}"
    for kind in ("low_var_kl", "low_var_kl+", "kl", "mse", "abs")
    for mode in ("token-mean", "seq-mean-token-sum")
    for flag in ("True", "False")
]


@pytest.fixture(scope="module")
def framework(audited):
    """Twenty settings of one framework."""
    some = [replace(audited[i % 5], name=name, kind="framework", framework="verl") for i, name in enumerate(SETTINGS)]
    tags = {SETTINGS[0]: "default"}
    return to_html(some, tags=tags)


def test_names_may_break_over_lines_and_rows_are_grouped(framework):
    Checker(framework)
    assert framework.count('class="group"') == 1
    assert "kl_<wbr>loss_<wbr>type=<wbr>low_<wbr>var_<wbr>kl" in framework
    assert framework.count('<span class="tag">default</span>') == 1


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_in_light_and_in_dark():
    style = files("klgrad.audit").joinpath("templates", "page.css").read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in style.split(":root")[1:3]]
    for theme in themes:
        for ink in ("ink", "soft", "link", "yes", "no", "unknown"):
            for ground in ("page", "card"):
                low, high = sorted((luminance(theme[ink]), luminance(theme[ground])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)


def test_the_command_writes_it(tmp_path):
    path = tmp_path / "new" / "page.html"
    done = CliRunner().invoke(app, ["audit", "k1-loss", "k3-loss", "--html", str(path)])
    assert done.exit_code == 0, done.output
    text = path.read_text(encoding="utf-8")
    assert "<h1>2 KL losses</h1>" in text
    assert "the KL of GRPO" in text


FRAME = '<iframe style="border:0;width:{width}px;height:2400px" srcdoc="{page}"></iframe>'
MEASURE = """<body style="margin:0">{frames}<script>onload = () => {{
  const found = [...document.querySelectorAll("iframe")].map(frame => {{
    const root = frame.contentDocument;
    const wide = [...root.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > {width} + 0.5);
    const tight = [...root.querySelectorAll("td, th, pre")].filter(e => e.scrollWidth > e.clientWidth + 1);
    return [root.documentElement.scrollWidth - {width}, wide.length, tight.length];
  }});
  document.body.dataset.found = JSON.stringify(found);
}}</script></body>"""


def browse(tmp_path, pages, width, *flags):
    path = tmp_path / "page.html"
    frames = "".join(FRAME.format(width=width, page=escape(page)) for page in pages)
    path.write_text(MEASURE.format(width=width, frames=frames), encoding="utf-8")
    # A window may not be as narrow as a phone; the frame in it is.
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 500)},2400", *flags]
    return subprocess.run([*command, path.as_uri()], capture_output=True, text=True, check=True, timeout=60).stdout


def overflows(tmp_path, pages, width):
    """By how much each page is too wide, and how many of its parts are."""
    dom = browse(tmp_path, pages, width, "--virtual-time-budget=3000", "--dump-dom")
    found = re.search(r'data-found="([^"]+)"', dom)
    assert found, dom[-300:]
    return json.loads(unescape(found[1]))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium on the PATH")
@pytest.mark.parametrize(("width", "scheme"), [(390, "1"), (1280, "0")], ids=["phone, light", "desk, dark"])
def test_in_a_browser(tmp_path, audited, framework, width, scheme):
    long = replace(audited[2], name="my_package.a_module_with_a_long_name:" + "a_long_function_name" * 4)
    page = to_html([*audited, long])
    too_wide = f'<table style="table-layout:fixed"><tr><td><p style="width:{width + 100}px">x</p></td></tr></table>'
    *fits, wide = overflows(tmp_path, [page, framework, page.replace("<main>", f"<main>{too_wide}")], width)
    assert fits == [[0, 0, 0]] * 2
    assert min(wide) > 0  # the checks can fail
    picture = tmp_path / "page.png"
    browse(tmp_path, [framework], width, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}")
    content = picture.read_bytes()
    assert struct.unpack(">II", content[16:24]) == (max(width, 500), 2400)
    assert len(content) > 50_000, "a blank page"


# The overview in a terminal: nothing is cut off, at any width.


SHOWN = ("k1-loss", "k2-loss-token-mean", "k3-loss-clamped", "k3-reward", "k1-reward-leave-one-out")


@pytest.fixture(scope="module")
def shown():
    return [audit(zoo.get(name)) for name in SHOWN]


def printed(report, width):
    file = StringIO()
    Console(width=width, file=file, color_system=None).print(report)
    return file.getvalue()


def words(text):
    return "".join(text.split())


@pytest.mark.parametrize("width", [80, 120, 160])
def test_every_name_verdict_and_note_is_there(shown, width):
    text = printed(overview(shown), width)
    assert max(map(len, text.splitlines())) <= width
    for r in shown:
        alone = words(printed(overview([r]), width))
        for column in shown_of(r):
            # A cell may continue on the next line, beside other cells: so its words are looked for one by one.
            assert all(word in alone for word in column.split()), column
        assert r.name in text


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_setting_is_not_cut(shown, width):
    settings = ["trl", "grpo", "loss_type=dapo", "importance_sampling_level=sequence", "use_bias_correction_kl=True"]
    text = printed(overview([replace(shown[3], name=" ".join(settings)), *shown]), width)
    assert max(map(len, text.splitlines())) <= width
    assert all(setting in text for setting in settings)


def test_a_tag_stands_beside_its_name(shown):
    assert "k1-loss (default)" in printed(overview(shown, tags={"k1-loss": "default"}), 160)

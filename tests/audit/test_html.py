"""The page of `klgrad audit --html`: well-formed, self-contained, true to the results, and readable in a browser."""

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
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from klgrad import KLTerm
from klgrad.audit import audit, catalogue
from klgrad.audit.advice import STALE, nearest
from klgrad.audit.audit_result import Advice
from klgrad.audit.numerics import GRID, coefficient_curve, per_unit
from klgrad.audit.render.page import Fix, to_html
from klgrad.audit.subject import as_subject
from klgrad.cli import app
from klgrad.targets import TARGETS

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
    subjects = [catalogue()[name] for name in NAMES]
    return [audit(s) for s in subjects], [coefficient_curve(s) for s in subjects]


@pytest.fixture(scope="module")
def page(audited):
    return to_html(*audited)


@pytest.mark.slow
def test_well_formed(page):
    found = Checker(page)
    assert found.count("h1") == 1
    assert len(found.ids) == len(set(found.ids))
    assert {link[1:] for link in found.links} <= set(found.ids)
    assert found.count("article") == len(NAMES)
    levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch("h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in pairwise(levels)), "a heading level is skipped"


def test_self_contained(page):
    assert not re.search(r"https?:|//\w", page)
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|@font-face", page)
    assert all(link.startswith("#") for link in Checker(page).links)


@pytest.mark.slow
def test_the_same_results_give_the_same_page(audited, page):
    assert to_html(*audited) == page
    again = [coefficient_curve(catalogue()[name]) for name in NAMES]
    assert again == audited[1]


def test_the_curve_is_drawn_per_unit_of_the_scale_of_the_loss():
    def shrunk(logp, ref_logp, mask):
        return 0.04 * ((logp - ref_logp) ** 2 / 2 * mask).sum() / mask.sum()

    curve = coefficient_curve(as_subject(shrunk))
    assert dict(curve)[1.0] == pytest.approx(0.04 / 3, rel=1e-5)
    for log_ratio, coefficient in per_unit(curve):
        assert coefficient == pytest.approx(log_ratio + dict(per_unit(curve))[0.0], rel=1e-4, abs=1e-4)  # float32
    nothing = coefficient_curve(catalogue()["k1-loss"])
    assert per_unit(nothing) == nothing


def test_accessible(page):
    found = Checker(page)
    pictures = [attrs for tag, attrs in found.tags if tag == "svg"]
    assert all(a.get("aria-hidden") == "true" or (a.get("role") == "img" and a.get("aria-label")) for a in pictures)
    assert all("scope" in attrs for tag, attrs in found.tags if tag == "th")
    assert dict(found.tags)["html"] == {"lang": "en"}


def test_text_is_escaped(audited):
    results, curves = audited
    evil = replace(results[0], name=EVIL, advice=Advice(f"X{EVIL}"))
    for many in ([evil], [evil, evil]):
        found = Checker(to_html(many, [curves[0]] * len(many), summaries=[EVIL] * len(many)))
        assert not {"script", "b"} & {tag for tag, _ in found.tags}
        assert found.text.count(EVIL) >= 2 * len(many)
        labels = [attrs["aria-label"] for tag, attrs in found.tags if tag == "svg" and "aria-label" in attrs]
        assert all(label.startswith(EVIL) for label in labels)
        assert len(found.ids) == len(set(found.ids))


def test_every_verdict_has_words_and_a_shape(audited):
    results, curves = audited
    for verdict, target in TARGETS.items():
        elsewhere = dict.fromkeys(("verdict_standard", "verdict_near", "verdict_near_fixed_lengths"), "unknown")
        changed = replace(results[1], verdict=verdict, verdict_off_policy=verdict, **elsewhere)
        text = to_html([changed], [curves[1]])
        assert text.count(f'href="#mark-{target.role}"') == 2
        assert unescape(text).count(f'<p class="title">{target.title}</p>') == 2


def test_a_verdict_is_told_where_it_belongs(page):
    card = page.split('id="loss-2-k3-loss"')[1].split("</article>")[0]
    on, off = card.split("<h4>Off-policy</h4>")
    assert "Forward KL, token by token" in on
    assert "k3 of each token, averaged over the sampler&#39;s tokens" in off


def test_what_is_amiss_is_told(audited):
    results, curves = audited
    flawed = replace(
        results[1], length_sensitive=True, verdict_fixed_lengths="reverse-kl-token", touches_padding=True,
        float32_wrong_from=-16.0, finite=False, deterministic=False, scale_by_shape={"a": 0.5, "b": 2 / 3},
    )  # fmt: skip
    sound, amiss = ("".join(Checker(to_html([r], [curves[1]])).text) for r in (results[1], flawed))
    for told in (
        "equal ones give: Reverse KL, token by token",
        "gets gradient",
        "wrong where log π/ref is −16 or less",
        "overflows, or 0/0",
        "Deterministic",
        "0.5 to 0.667 × the target",
    ):
        assert told in amiss
        assert told not in sound


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none(audited, bad):
    results, curves = audited
    none = dict.fromkeys(results[0].bias, bad)
    broken = replace(
        results[1], verdict="unknown", verdict_off_policy="unknown", variance=bad, variance_near=bad, scale=None,
        scale_by_shape={}, bias=none, cosine=none, bias_off_policy=none, cosine_off_policy=none, finite=False,
        finite_in_float64=False, advice=Advice(),
    )  # fmt: skip
    gaps = [(x, None if -5 < x < 1 else y) for x, y in curves[1]]
    for curve in (gaps, [(x, None) for x, _ in gaps], []):
        text = to_html([broken, results[0]], [curve, curves[0]])
        Checker(text)
        assert not re.search(r"\b(nan|inf|None)\b", text.split("</style>")[1])
        assert "No verdict" in text


def test_the_curve_is_the_coefficient():
    k2, k3 = (dict(coefficient_curve(catalogue()[name])) for name in ("k2-loss", "k3-loss"))
    assert tuple(k2) == GRID
    assert len(GRID) <= 120
    assert (min(GRID), max(GRID)) == (-30, 12)
    assert all(value == pytest.approx(x, abs=1e-5) for x, value in k2.items())
    assert all(value == pytest.approx(1 - math.exp(-x), rel=1e-4, abs=1e-5) for x, value in k3.items())


def test_dead_zones_are_shaded():
    subject = catalogue()["k3-loss-clamped"]
    text = to_html([audit(subject)], [coefficient_curve(subject)])
    assert text.count('<rect class="dead" x=') == 2
    assert "no gradient below −2.61 or above 11" in text


@pytest.mark.slow
def test_what_is_alive_is_not_shaded():
    for loss in (KLTerm(), KLTerm(influence_bound=1.0), lambda logp: (logp.detach() * 0).sum()):
        subject = as_subject(loss, "mine")
        assert 'class="dead" x=' not in to_html([audit(subject)], [coefficient_curve(subject)])


def test_a_loss_with_a_gradient_off_the_sampled_token_has_no_curve():
    subject = as_subject(KLTerm(estimator="exact"))
    assert coefficient_curve(subject) == []
    assert "No curve" in to_html([audit(subject)], [[]])


def test_a_coefficient_that_is_not_finite_is_a_gap(audited):
    overflows = as_subject(lambda logp, ref_logp: (5 * (ref_logp - logp)).exp(), "overflows")
    curve = dict(coefficient_curve(overflows))
    assert curve[-30.0] is None
    assert curve[0.0] == pytest.approx(-5)
    assert "gaps: not a finite number" in to_html([audited[0][0]], [list(curve.items())])


@pytest.mark.parametrize(("verdict", "term"), STALE.items(), ids=list(STALE))
def test_the_term_for_stale_samples_has_that_target(verdict, term):
    result = audit(term)
    assert (result.verdict, result.verdict_off_policy) == (verdict, verdict)


LONG = "actor_rollout_ref.actor.a_setting_with_a_long_name.and_more=a-value-that-is-long-too_and_goes_on_and_on"
SETTINGS = [
    f"verl use_kl_loss kl_loss_type={kind} loss_agg_mode={mode} an_option_with_a_very_long_name_indeed={flag}"
    for kind in ("low_var_kl", "low_var_kl+", "kl", "mse", "abs")
    for mode in ("token-mean", "seq-mean-token-sum")
    for flag in ("True", "False")
]
FIXES = {
    "verl": [
        Fix(
            "reverse-kl-token",
            f"a.use_kl_loss=True\n{LONG}",
            "reverse-kl-token",
            "unknown",
            SETTINGS[3],
            note="A note.",
        ),
        Fix("reverse-kl-sequence", "--algo.kl x --flag", "unknown", "unknown", SETTINGS[4]),
        Fix("reverse-kl-sequence", "term = KLTerm()", "reverse-kl-sequence", "unknown", place="its loss"),
    ]
}


@pytest.fixture(scope="module")
def framework(audited):
    """Twenty settings of one framework."""
    results, curves = audited
    some = [replace(results[i % 5], name=name, kind="framework", framework="verl") for i, name in enumerate(SETTINGS)]
    tags = {SETTINGS[0]: "default"}
    return to_html(some, [curves[i % 5] for i in range(len(some))], fixes=FIXES, tags=tags)


def card_of(page, number):
    return page.split(f'<article class="card" id="loss-{number}-')[1].split("</article>")[0]


def lines_in(part):
    """What a reader copies from each block of code."""
    blocks = re.findall(r'<pre class="lines"><code>(.*?)</code></pre>', part, re.DOTALL)
    return [unescape(re.sub(r"<[^>]+>", "", block)) for block in blocks]


def test_a_frameworks_page_says_what_to_write_in_its_own_lines(framework):
    Checker(framework)
    section = framework.split("What to write in verl")[1].split("Index")[0]
    assert lines_in(section) == [fix.lines for fix in FIXES["verl"]]
    for told in ("A note.", "Reverse KL, whole completions, nearest setting", "No setting does this; in its loss:"):
        assert told in section
    assert "What 20 settings of verl descend" in framework


def test_every_card_of_a_framework_has_the_lines_for_what_it_comes_nearest_to(framework):
    token, nearest, code = (fix.lines for fix in FIXES["verl"])
    # k1-loss, k3-loss and the clamped k3-loss are of tokens; the other two of completions.
    expected = ([token], [token], [token], [nearest, code], [nearest, code])
    for i in range(len(SETTINGS)):
        own = {3: [token], 4: [code]}  # a setting that is the one to write, and one that is only the nearest
        assert lines_in(card_of(framework, i + 1)) == own.get(i, expected[i % 5]), i
    assert "These are its lines, for the reverse KL, token by token" in card_of(framework, 4)


def test_settings_stand_out_and_rows_are_grouped(framework):
    assert framework.count('class="group"') == 1
    assert "<code>verl use_<wbr>kl_<wbr>loss</code>" in framework
    row = framework.split('href="#loss-3-')[1].split("</tr>")[0]
    assert re.findall(r"<b>(.*?)</b>", row) == ["low_<wbr>var_<wbr>kl", "seq-mean-token-sum", "True"]
    assert framework.count('<span class="tag">default</span>') == 1


def test_what_holds_at_equal_lengths_is_told_so(audited):
    results, curves = audited
    mean = replace(
        results[2],
        name="mean",
        verdict="unknown",
        verdict_standard="unknown",
        verdict_near="unknown",
        verdict_fixed_lengths="reverse-kl-token",
        length_sensitive=True,
    )
    page = to_html([mean, results[0]], [curves[2], curves[0]])
    assert "Reverse KL, token by token, at equal lengths only" in card_of(page, 1)
    row = page.split('href="#loss-1-mean"')[1].split("</tr>")[0]
    assert "reverse KL, token by token, at equal lengths only" in row
    assert "length-sensitive" not in row


def test_fixes_are_escaped(audited):
    results, curves = audited
    evil = replace(results[0], name=f"verl {EVIL}", kind="framework", framework="verl")
    fixes = {"verl": [Fix("reverse-kl-token", EVIL, "unknown", "unknown", place=EVIL, note=EVIL)]}
    page = to_html([evil, evil], [curves[0]] * 2, fixes=fixes, tags={evil.name: EVIL})
    assert not {"script"} & {tag for tag, _ in Checker(page).tags}
    assert set(lines_in(page)) == {EVIL}


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_in_light_and_in_dark():
    style = files("klgrad.audit").joinpath("render", "page.css").read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in style.split(":root")[1:3]]
    for theme in themes:
        for ink in ("ink", "soft", "link", "reverse", "forward", "nothing", "unknown"):
            for ground in ("page", "card"):
                low, high = sorted((luminance(theme[ink]), luminance(theme[ground])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)


def test_the_command_writes_it(tmp_path):
    path = tmp_path / "new" / "page.html"
    done = CliRunner().invoke(app, ["audit", "k1-loss", "k3-loss", "--html", str(path)])
    assert done.exit_code == 0, done.output
    text = path.read_text(encoding="utf-8")
    assert "What 2 KL losses descend" in text
    assert "GRPO as published" in text


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
    results, curves = audited
    long = replace(results[2], name="my_package.a_module_with_a_long_name:" + "a_long_function_name" * 4)
    page = to_html([*results, long], [*curves, curves[2]])
    too_wide = f'<table style="table-layout:fixed"><tr><td><p style="width:{width + 100}px">x</p></td></tr></table>'
    *fits, wide = overflows(tmp_path, [page, framework, page.replace("<main>", f"<main>{too_wide}")], width)
    assert fits == [[0, 0, 0]] * 2
    assert min(wide) > 0  # the checks can fail
    picture = tmp_path / "page.png"
    browse(tmp_path, [framework], width, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}")
    content = picture.read_bytes()
    assert struct.unpack(">II", content[16:24]) == (max(width, 500), 2400)
    assert len(content) > 50_000, "a blank page"


def test_the_index_gives_the_distances_of_the_terminal():
    """They are measured at a scale each, near ref and far from it; at one scale for both they are larger."""
    subject = as_subject(lambda logp, ref_logp, mask: ((logp - ref_logp).abs() * mask).sum(-1).mean(), "absolute")
    result = audit(subject)
    page = to_html([result, audit(KLTerm())], [coefficient_curve(subject), []])
    row = page.split('class="index"')[1].split("</table>")[0]
    assert nearest(result) == "nearest: reverse KL, token by token, 40% off near ref and 40% far from it"
    assert nearest(result) in row
    assert nearest(result, on_policy=False) in row

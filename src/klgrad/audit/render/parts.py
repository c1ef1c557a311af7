"""The words that a verdict is told in, and the small parts that the page is made of."""

import math
import re
from html import escape

WORDS = {
    "reverse-kl-sequence": ("Reverse KL, whole completions", "The gradient of KL(π‖ref) between completions."),
    "reverse-kl-token": (
        "Reverse KL, token by token",
        "The gradient of KL(π‖ref) of each next token; what a token does to later ones is left out.",
    ),
    "reverse-kl-token-sampler": (
        "Reverse KL, token by token, on the sampler’s prefixes",
        "The gradient of KL(π‖ref) of each next token, at the prefixes that the sampler visits.",
    ),
    "forward-kl-token": (
        "Forward KL, token by token",
        "The gradient of KL(ref‖π) of each next token: another optimum than the reverse KL’s.",
    ),
    "forward-kl-sequence": (
        "Forward KL, whole completions",
        "The gradient of KL(ref‖π) between completions: another optimum than the reverse KL’s.",
    ),
    "squared-sequence": (
        "Squared log-ratio of the completion",
        "The gradient of its mean over the sampler’s completions, which has the reverse KL’s optimum.",
    ),
    "nothing": ("Nothing", "Zero in expectation: it regularises nothing."),
    "unknown": ("No known divergence", ""),
}
"""A verdict's title, and a sentence."""

SHORT = {
    "reverse-kl-sequence": "reverse, sequence",
    "reverse-kl-token": "reverse, token",
    "reverse-kl-token-sampler": "reverse, token (sampler)",
    "forward-kl-token": "forward, token",
    "forward-kl-sequence": "forward, sequence",
    "squared-sequence": "squared, sequence",
}
"""A target in a table's cell."""

KINDS = {"reverse": "reverse KL", "forward": "forward KL", "nothing": "nothing", "unknown": "unknown"}
"""The four colours, each with its shape, and what they stand for."""

SEAMS = re.compile(r"(?<=[_=.:])(?=\w)")
"""Where the name of a setting or a function may be broken over lines."""

CODE_SEAMS = re.compile(r"(?<=[=.])(?=\w)")
"""Where a line of configuration may be."""

PHONE = 36
"""Characters of code that fit a phone; only a longer word is broken."""


def kind_of(verdict: str) -> str:
    """Which of `KINDS`; the squared log-ratio shares the reverse KL's optimum, and its colour."""
    if verdict in ("nothing", "unknown"):
        return verdict
    return "forward" if verdict.startswith("forward") else "reverse"


def mark(kind: str) -> str:
    """The kind's shape; the words beside it say what it means."""
    return f'<svg class="mark {kind}" aria-hidden="true" viewBox="0 0 16 16"><use href="#mark-{kind}"/></svg>'


def number(x: float | None, digits: int = 3) -> str:
    """For a reader; a dash for what is not a finite number."""
    if x is None or not math.isfinite(x):
        return '<span title="not a finite number">–</span>'
    return f"{x:.{digits}g}".replace("-", "−")


def spoken(verdict: str) -> str:
    """A verdict's title within a sentence."""
    title = WORDS[verdict][0]
    return title[0].lower() + title[1:]


def breakable(text: str) -> str:
    """Escaped, with seams at which a narrow page may break a name."""
    return "<wbr>".join(escape(part, quote=False) for part in SEAMS.split(text))


def code_block(lines: str) -> str:
    """Lines to copy, as they are; a narrow page breaks them between words, and long words at their seams."""
    code = re.sub(r"[^ \n]+", lambda m: _code_word(m[0]), lines)
    return f'<pre class="lines"><code>{code}</code></pre>'


def _code_word(word: str) -> str:
    parts = CODE_SEAMS.split(word) if len(word) > PHONE else [word]
    return "<wbr>".join(_unbroken(escape(part, quote=False)) for part in parts)


def _unbroken(part: str) -> str:
    """A browser would break `--flag` after its hyphens."""
    return f'<span class="whole">{part}</span>' if "-" in part and len(part) <= PHONE else part


def verdict_line(verdict: str, where: str) -> str:
    """A verdict in a line: its shape, what it is, and where."""
    kind = kind_of(verdict)
    return f'<span class="cell {kind}">{mark(kind)}<span>{SHORT.get(verdict, verdict)} {where}</span></span>'


def bar(share: float) -> str:
    """A share of one as a bar, beside the number that says it."""
    rects = f'<rect class="track" width="100" height="6"/><rect width="{min(share, 1) * 100:.1f}" height="6"/>'
    return f'<svg class="bar" aria-hidden="true" viewBox="0 0 100 6" preserveAspectRatio="none">{rects}</svg>'

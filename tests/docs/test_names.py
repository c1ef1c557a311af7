"""Every name in the README and the docs exists: of the package, of settings and losses, and of files."""

import pkgutil
import re
from functools import cache

import pytest
from docs.pages import PAGES, ROOT, fences, inline, name_of
from docs.test_commands import BY_TRL, FOUND, GROUP, of

import klgrad
from klgrad import Clip, ImportanceWeighting, KLTerm, Mask, Truncate
from klgrad.audit import catalogue
from klgrad.core.divergences import NAMED
from klgrad.frameworks import FRAMEWORKS
from klgrad.policy_losses import POLICY_LOSSES
from klgrad.targets import TARGETS

SOURCES = ("src", "scripts", "benchmarks", "examples", "docs/figures", "tests")
FILES = ("Makefile", "pyproject.toml", "mkdocs.yml", "constraints.txt", ".ci/run", "CITATION.cff")
OWN = ROOT / "tests" / "docs"
"""Left out of the sources: a name that only these tests have would not exist."""


@cache
def spans():
    """Inline code, with its page."""
    return [(span, name_of(path)) for path in PAGES for span in inline(path)]


@pytest.mark.slow
def test_a_dotted_name_exists():
    pattern = re.compile(r"(?<![\w./+])klgrad(?:\.[A-Za-z_]\w*)+\b(?!=)")  # not settings of verl: klgrad.coef=0.1
    named = {name for path in PAGES for name in pattern.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 50
    for name in named:
        pkgutil.resolve_name(name)


def words_of_the_project():
    found = set()
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*") if OWN not in path.parents):
        if path.suffix in (".py", ".json", ".yaml", ".toml", ".css", ".html", ".csv"):
            found |= set(re.findall(r"\w+", f"{path.stem} {path.read_text(encoding='utf-8')}"))
    return found | {word for file in FILES for word in re.findall(r"\w+", (ROOT / file).read_text(encoding="utf-8"))}


ELSEWHERE = {"activate", "durations", "FUNCTION", "CITATION", "additional_dependencies", "parameter_sync_step"}
"""Words of inline code that are not in the sources: options of pytest, pre-commit and verl, a placeholder, files."""


def test_every_word_of_inline_code_is_in_the_sources():
    """Catches a name that was changed in the code and not on a page."""
    known = words_of_the_project() | ELSEWHERE
    words = ((word, page) for span, page in spans() for word in re.findall(r"[A-Za-z_]\w{2,}", span))
    assert {(word, page) for word, page in words if word not in known} == set()


OF_OTHERS = {
    "seq-mean-token-sum", "token-mean", "seq-mean-token-mean", "test-fast", "large-batches", "small-batches",
    "klgrad-audit", "test-verl-runs", "fixed-length", "left-out", "ref-renormalised",
}  # fmt: skip
"""Settings of frameworks, targets of make, a hook of pre-commit, and values of parts."""


def test_a_name_with_hyphens_is_that_of_a_loss_or_a_target():
    known = {*catalogue(), *TARGETS, *POLICY_LOSSES, *FRAMEWORKS, *OF_OTHERS, *NAMED}
    named = [(x, page) for x, page in spans() if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", x)]
    in_tables = "docs/experiments/"  # which have names of arms, from the recorded runs
    assert {(x, page) for x, page in named if x not in known and not page.startswith(in_tables)} == set()


@pytest.mark.slow
def test_an_option_exists():
    from klgrad.training.settings import Parser

    known = {flag for command in GROUP.commands.values() for param in command.params for flag in param.opts}
    parsed = {flag for name in BY_TRL for action in Parser(name)._actions for flag in action.option_strings}
    known |= parsed | {"--help-all", "--name"}  # "--name value" describes scripts
    quoting = ("docs/layout.md", "docs/frameworks/")  # which name options of frameworks
    options = [(span, page) for span, page in spans() if span.startswith("--") and not page.startswith(quoting)]
    named = [(word, page) for span, page in options for word in span.split()]
    named += [(word, FOUND[arguments]) for name in BY_TRL for arguments in of(name) for word in arguments]
    assert [(word, page) for word, page in named if word.startswith("--") and word not in known] == []


def test_a_term_can_be_built():
    names = {x.__name__: x for x in (KLTerm, ImportanceWeighting, Truncate, Clip, Mask)}
    terms = {x for x, _ in spans() if re.match(r"^(KLTerm|ImportanceWeighting)\(.*\)$", x) and "..." not in x}
    assert len(terms) > 20
    for term in terms:
        eval(term, names)


@pytest.mark.slow
def test_a_setting_of_the_trainer_exists():
    """Of the `KLConfig` in inline code and blocks, and of the page on training."""
    from klgrad.trl import KLConfig

    blocks = [fence.code for path in PAGES for fence in fences(path) if fence.language == "python"]
    calls = re.findall(r"KLConfig\(([^)]*)\)", "\n".join([*(span for span, _ in spans()), *blocks]))
    named = {name for call in calls for name in re.findall(r"\b(kl_\w+)=", call)}
    named |= {x for x, page in spans() if page == "docs/train.md" and re.fullmatch(r"kl_[a-z_]+", x)}
    assert len(named) > 10
    assert named <= set(KLConfig.__dataclass_fields__)


def test_a_path_and_a_link_of_the_readme_exist():
    """The links between pages are checked when the site is built."""
    pattern = re.compile(r"^(src/klgrad|docs|tests|scripts|benchmarks|examples)/[\w./-]*$")
    named = {(word, page) for span, page in spans() for word in span.split() if pattern.match(word)}
    for page in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
        named |= {(link, page) for link in links if not link.startswith("http")}
    assert {(word, page) for word, page in named if not (ROOT / word).exists()} == set()


def test_every_public_name_has_its_place_in_the_api_reference():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: (klgrad[\w.]*)$", text, re.MULTILINE))
    with_parents = shown | {name.rpartition(".")[0] for name in shown}
    lacking = [name for name in klgrad.__all__ if f"klgrad.{name}" not in with_parents]
    assert lacking == ["KlgradError"]
    assert "klgrad.errors" in shown, "its module has it"

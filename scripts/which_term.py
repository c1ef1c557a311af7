"""The generated part of docs/which-term.md: what to write in each framework, from the data of `klgrad advise`."""

from klgrad.frameworks import FRAMEWORKS, HOMES, SETTINGS, recorded
from klgrad.frameworks.framework import TARGET_OF, Meaning, expresses
from klgrad.targets import TARGETS

SHOWN: tuple[Meaning, ...] = (("reverse", "sequence"), ("reverse", "token"), ("forward", "token"))
"""The meanings that a framework is shown with; no framework has a setting for the fourth."""


def settings() -> str:
    """A section for each framework: settings where there are some, and code where no setting has the meaning."""
    return "\n".join(_framework(name) for name in SETTINGS)


def _framework(name: str) -> str:
    known = FRAMEWORKS[name]
    head = f"### {name}\n\nChecked with {name} {known.tested}; [all audited settings](frameworks/{name}.md).\n"
    return "\n".join([head, *(_meaning(name, meaning) for meaning in SHOWN)])


def _meaning(name: str, meaning: Meaning) -> str:
    target = TARGETS[TARGET_OF[meaning]]
    divergence, level = meaning
    command = f"klgrad advise {name} --divergence {divergence} --level {level}"
    parts = [f"**{target.title}** (`{command}`)\n"]
    setting, record = SETTINGS[name].get(meaning), recorded(name)
    assert record, f"{name} has no recorded audit: run `make frameworks`"
    exact = setting is not None and expresses(setting, meaning, off_policy=False)
    if setting is not None:
        parts.append(f"{_fenced(setting.lines)}\nIt descends: {record.parts_of(setting.subject)}.\n")
        parts += [f"{note}\n" for note in (setting.note,) if note]
    if not exact:
        why = "No setting has this meaning" if setting is None else "For this meaning on every batch"
        parts.append(f"{why}: in {HOMES[name].place}, write\n\n{_fenced(HOMES[name].lines(meaning, off_policy=False))}")
    return "\n".join(parts)


def _fenced(lines: str) -> str:
    language = "python" if "import " in lines else "text"
    mark = "<!-- not run here: tests/frameworks runs it -->\n" if language == "python" else ""
    return f"{mark}```{language}\n{lines}\n```\n"

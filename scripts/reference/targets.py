"""A page for each target: its objective, and the losses, terms and settings of frameworks that descend it."""

from klgrad.audit.subject import every_term
from klgrad.core.term import as_code
from klgrad.frameworks import FRAMEWORKS, recorded
from klgrad.targets import TARGETS, Target
from klgrad.zoo import CELLS

from .text import GENERATED, link_to_target, table

INDEX = """# Targets

The objectives whose gradient a KL loss may have, and three other verdicts. π is the policy in training, ref the
reference, and the *sampler* the policy that drew the samples; on-policy it is π. A loss that has the gradient of a
target with the sign reversed *climbs* it: the verdict is `climbs` and the name of the target.
`klgrad audit LOSS --expect reverse-kl-token` checks for one.

"""


def pages() -> dict[str, str]:
    """The index and a page for each verdict that is not the reversal of another."""
    shown = [target for target in TARGETS.values() if target.climbed is None]
    rows = [(f"[{t.name}]({t.name}.md)", t.title, t.formula) for t in shown]
    index = f"{INDEX}{table(('name', 'title', 'the gradient of'), rows)}\n{GENERATED}\n"
    return {"targets/index.md": index} | {f"targets/{target.name}.md": _page(target) for target in shown}


def _page(target: Target) -> str:
    parts = [f"# {target.title}\n\n{_facts(target)}"]
    for title, lines in (
        ("Losses of the zoo that have it", _losses(target)),
        ("Terms that have it", _terms(target)),
        ("Settings of frameworks that have it", _settings(target)),
    ):
        parts.append(f"\n## {title}\n\n{lines or 'None.'}\n")
    return "".join([*parts, f"\n{GENERATED}\n"])


def _facts(target: Target) -> str:
    rows = [("name, in `--expect` and JSON", f"`{target.name}`"), ("the gradient of", target.formula)]
    rows += [("level", target.level), ("π is compared with", target.anchor)] if target.level else []
    same = target.same_on_policy
    rows += [("on-policy the same as", link_to_target(same, ""))] if same else []
    same_here = [t for t in TARGETS.values() if t.same_on_policy == target.name]
    rows += [("on-policy also", ", ".join(link_to_target(t.name, "") for t in same_here))] if same_here else []
    return table(("", ""), rows)


def _losses(target: Target) -> str:
    """Losses by the samples on which they descend or climb the target."""
    lines = []
    for which, samples in enumerate(("on-policy", "off-policy")):
        for word, verdict in (("", target.name), ("climb it ", f"climbs {target.name}")):
            names = [name for name, cell in CELLS.items() if cell.descends[which] == verdict]
            links = ", ".join(f"[{name}](../zoo/{name}.md)" for name in names)
            lines += [f"- {word}{samples}: {links}"] if names else []
    return "\n".join(lines)


def _terms(target: Target) -> str:
    terms = [term for term in every_term() if target.name in term.descends]
    lines = []
    for term in terms:
        on, off = (verdict == target.name for verdict in term.descends)
        where = "on-policy and off-policy" if on and off else "on-policy" if on else "off-policy"
        lines.append(f"- `{as_code(term)}`: {where}")
    return "\n".join(lines)


def _settings(target: Target) -> str:
    """How many of the audited settings of each framework have the verdict on-policy, with a link to its page."""
    lines = []
    for name in FRAMEWORKS:
        known = recorded(name)
        found = [setting for setting, verdict in known.verdicts.items() if verdict[0] == target.name] if known else []
        if known and found:
            of = f"{len(found)} of {len(known.verdicts)} settings on-policy, such as `{found[0]}`"
            lines.append(f"- [{name} {known.version}](../frameworks/{name}.md): {of}")
    return "\n".join(lines)

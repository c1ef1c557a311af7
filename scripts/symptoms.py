"""The generated parts of docs/symptoms.md, from the table that `klgrad diagnose` uses."""

from reference.text import table

from klgrad.logs.symptoms import SYMPTOMS, Symptom, link, threads_of, topics


def symptoms() -> str:
    """A section for each symptom."""
    return "\n".join(map(_section, SYMPTOMS.values()))


def _section(symptom: Symptom) -> str:
    mark = "*" if "-" in symptom.name else "`"
    rows = ((str(i), c.what, c.decides, c.cure) for i, c in enumerate(symptom.causes, 1))
    causes = table(("", "likely cause", "what decides", "cure"), rows)
    threads = ", ".join(f"[{thread}]({link(thread)})" for thread in threads_of(symptom.name))
    seen = f"\nSeen in {threads}.\n" if threads else ""
    return f"### {symptom.title}\n\n{mark}{symptom.name}{mark}: {symptom.looks}.\n\n{causes}{seen}"


def threads() -> str:
    """What each group of threads asks, and what answers it."""
    rows = []
    for topic in topics():
        linked = ", ".join(f"[{name}]({link(name)})" for name in topic.names)
        named = ", ".join(SYMPTOMS[name].title for name in topic.symptoms.split())
        rows.append((linked, topic.asks, topic.answer, named))
    none, some = (sum(topic.answer.startswith(x) for topic in topics()) for x in ("Not answered", "In part"))
    counts = f"{len(topics())} questions; {some} are answered in part and {none} not at all, and say so."
    return f"{table(('threads', 'asked or reported', 'answer', 'symptom'), rows)}\n{counts}\n"

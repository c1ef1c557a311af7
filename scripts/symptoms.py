"""The generated parts of docs/symptoms.md, from the table that `klgrad diagnose` uses."""

from klgrad.logs.symptoms import SYMPTOMS, Symptom, link, threads_of, topics


def symptoms() -> str:
    """A section for each symptom."""
    return "\n".join(map(_section, SYMPTOMS.values()))


def _section(symptom: Symptom) -> str:
    rows = [f"| {i} | {c.what} | {c.decides} | {c.cure} |" for i, c in enumerate(symptom.causes, 1)]
    lines = [
        f"### {symptom.title}\n",
        f"`{symptom.name}`: {symptom.looks}.\n" if "-" not in symptom.name else f"*{symptom.name}*: {symptom.looks}.\n",
        "| | likely cause | what decides | cure |",
        "|---|---|---|---|",
        *rows,
    ]
    threads = ", ".join(f"[{thread}]({link(thread)})" for thread in threads_of(symptom.name))
    return "\n".join([*lines, *([f"\nSeen in {threads}."] if threads else []), ""])


def threads() -> str:
    """What each group of threads asks, and what answers it."""
    lines = ["| threads | asked or reported | answer | symptom |", "|---|---|---|---|"]
    for topic in topics():
        linked = ", ".join(f"[{name}]({link(name)})" for name in topic.names)
        named = ", ".join(SYMPTOMS[name].title for name in topic.symptoms.split())
        lines.append(f"| {linked} | {topic.asks} | {topic.answer} | {named} |")
    unanswered, partly = (sum(x.answer.startswith(y) for x in topics()) for y in ("Not answered", "In part"))
    counts = f"{len(topics())} questions; {partly} are answered in part and {unanswered} not at all, and say so."
    return "\n".join([*lines, "", counts, ""])

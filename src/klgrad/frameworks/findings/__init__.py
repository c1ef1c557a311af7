"""What was found in other projects, as texts for their issue trackers: one Markdown file each, FRAMEWORK.FINDING.md.

A text says what is declared, what happens, and why, with the smallest patch. Its first block is a program that needs
the project alone and runs the project's own functions, and its second block what the program prints.
"""

import re
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class FrameworkReport:
    """One text.

    Attributes:
        framework: the project.
        name: of the finding, in one or two words.
        text: the Markdown.
    """

    framework: str
    name: str
    text: str

    @property
    def title(self) -> str:
        """The heading, without its mark."""
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def program(self) -> str:
        """The reproduction."""
        return self._block("python")

    @property
    def printed(self) -> str:
        """What the reproduction prints."""
        return self._block("text")

    def _block(self, language: str) -> str:
        block = re.search(rf"^```{language}\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)
        return block[1] if block else ""


def findings() -> list[FrameworkReport]:
    """All of them, by framework and name."""
    texts = [file for file in files(__name__).iterdir() if file.name.endswith(".md")]
    found = []
    for file in sorted(texts, key=lambda file: file.name):
        framework, name, _ = file.name.split(".")
        found.append(FrameworkReport(framework, name, file.read_text(encoding="utf-8")))
    return found

"""An extension of griffe, which reads the docstrings for the API pages."""

import re
from typing import Any

from griffe import Extension, Object

HEADINGS = re.compile(r"(?<!\n\n)^(?= *(?:Gradient|Requires):)", re.MULTILINE)
"""The start of these sections where no empty line is before them; griffe needs one."""


class Sections(Extension):
    """Rewrite the sections of docstrings that griffe would not recognise."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring before it is parsed: `Example:` is shown as code only if it is spelled `Examples:`."""
        if obj.docstring is not None:
            text = HEADINGS.sub("\n", obj.docstring.value)
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)

"""An extension of griffe, which reads the docstrings for the API pages."""

import re
from typing import Any

from griffe import Extension, Object


class SingularExamples(Extension):
    """Read a section `Example:` as `Examples:`, the only spelling that griffe shows as code."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)

"""Build a package of the kernels for Hugging Face's `kernels` library: `python scripts/kernels_package.py [FOLDER]`.

It has the files of `klgrad.kernels` and what they import, unchanged, as the noarch variants `torch-cpu` and
`torch-cuda`: Python and Triton, so that there is nothing to compile. `kernels.get_local_kernel(FOLDER)` loads it.
"""

import ast
import base64
import hashlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "klgrad"
NAME = "klgrad-kernels"
VERSION = 0
"""By the convention of `kernels`, 0 until the interface is stable."""
LOADED_WITH = "0.17.2"
"""The version of `kernels` that the package was loaded with; earlier ones have other layouts."""
BACKENDS = ("cpu", "cuda")

INIT = '''"""Exact KLs from hidden states, without storing the logits. Documentation: docs/kernels.md of klgrad."""

from .kernels import ({names})

__all__ = [{quoted}]
'''
CARD = """---
library_name: kernels
license: apache-2.0
---
# {name}

Log-probs, entropies and both exact KLs of each token, from the hidden states and output heads of two models, with the
gradient. Not published; load it from this folder:

```python
from kernels import get_local_kernel

exact = get_local_kernel(Path("{folder}"))
exact.token_statistics(hidden, exact.Head(weight), targets, ref_hidden, exact.Head(ref_weight))
```
"""


def files() -> list[Path]:
    """The modules of `klgrad.kernels`, and all modules of this package that they import."""
    found: set[Path] = set()
    left = sorted((SOURCE / "kernels").glob("*.py"))
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += _imported(path)
    return sorted(found)


def _imported(path: Path) -> list[Path]:
    """The files that a module imports, with the `__init__.py` of each folder on the way."""
    folder = path.parent
    found = [parent / "__init__.py" for parent in (folder, *folder.parents) if SOURCE in parent.parents]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder.joinpath(*[".."] * (node.level - 1), *(node.module or "").split(".")).resolve()
            for each in (base, *(base / alias.name for alias in node.names)):
                found += [file for file in (each.with_suffix(".py"), each / "__init__.py") if file.is_file()]
    return [file for file in found if file != SOURCE / "__init__.py"]


def public_names() -> list[str]:
    """The names that `klgrad.kernels` exports."""
    tree = ast.parse((SOURCE / "kernels" / "__init__.py").read_text(encoding="utf-8"))
    return sorted(a.asname for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names if a.asname)


def build(folder: Path) -> None:
    """Write the package into a folder, in place of an earlier one."""
    shutil.rmtree(folder / "build", ignore_errors=True)
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        for path in files():
            copy = variant / path.relative_to(SOURCE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        names = public_names()
        init = INIT.format(names=", ".join(names), quoted=", ".join(f'"{name}"' for name in names))
        (variant / "__init__.py").write_text(init, encoding="utf-8")
        (variant / "metadata.json").write_text(json.dumps(_metadata(variant, backend), indent=2), encoding="utf-8")
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    (folder / "README.md").write_text(CARD.format(name=NAME, folder=folder.name), encoding="utf-8")


def _metadata(variant: Path, backend: str) -> dict[str, object]:
    hashes = {
        path.relative_to(variant).as_posix(): hashlib.sha256(path.read_bytes()).digest()
        for path in sorted(variant.rglob("*.py"))
    }
    whole = hashlib.sha256(b"".join(hashes.values())).hexdigest()
    return {
        "name": NAME,
        "id": f"_{NAME.replace('-', '_')}_{backend}_{whole[:7]}",
        "version": VERSION,
        "kernels-minver": LOADED_WITH,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(digest).decode() for name, digest in hashes.items()},
        },
    }


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / NAME
    build(target)
    print(f"{target}: {len(files())} files, variants {', '.join(f'torch-{backend}' for backend in BACKENDS)}")

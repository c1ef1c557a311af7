"""Private names of other libraries stand in `klgrad.trl.compat` only, or in methods that have to be overridden."""

import ast
from pathlib import Path

import pytest

import klgrad
from klgrad.trl.contract import OVERRIDES

SOURCE = Path(klgrad.__file__).parent
NAMEDTUPLE = {"_replace", "_asdict", "_fields"}
"""Public by the documentation of `collections.namedtuple`."""
INTERNAL_MODULES = ("trl.trainer.utils", "trl.trainer.callbacks", "transformers.trainer_utils")
"""Modules without a private name whose functions are not in the documented interface."""
ALLOWED = {"training/settings.py": {"self._actions"}}  # argparse
"""What is left of `training/`; only ever to become shorter."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in NAMEDTUPLE


def own_names(tree):
    """Private names that a file's functions, classes and `self` define."""
    found = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)} - set(OVERRIDES)
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in (x for each in targets for x in ast.walk(each)):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "cls"):
                found.add(target.attr)
            elif isinstance(target, ast.Name):
                found.add(target.id)
    return found


def private_names(source):
    """Uses of names that the file does not define itself, as text."""
    tree = ast.parse(source)
    own, found = own_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner == "super()" and node.attr in OVERRIDES:
                continue
            if owner not in ("self", "cls") or node.attr not in own:
                found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            names = [x.value for x in node.args[1:2] if isinstance(x, ast.Constant)]
            found |= {f"{ast.unparse(node.args[0])}.{name}" for name in names if is_private(str(name))}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if module in INTERNAL_MODULES:
                found.add(module)
            parts = [*module.split("."), *(x.name for x in node.names)]
            found |= {f"{module}.{name}" for name in parts if is_private(name)}
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("__dict__"):
            found.add(ast.unparse(node.value))
    return found


PATHS = [path for folder in ("trl", "training") for path in sorted((SOURCE / folder).rglob("*.py"))]
FILES = {path.relative_to(SOURCE).as_posix() for path in PATHS} - {"trl/compat.py", "trl/contract.py"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_private_name_outside_the_seam(name):
    """And what is allowed is still there: else shorten `ALLOWED`."""
    assert private_names((SOURCE / name).read_text()) == ALLOWED.get(name, set())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("trainer._step += 1", {"trainer._step"}),
        ("class T(GRPOTrainer):\n    def f(self): return self._metrics", {"self._metrics"}),
        ("class T(GRPOTrainer):\n    def f(self): return self._own\n    def _own(self): ...", set()),
        ("class T(GRPOTrainer):\n    def f(self): self._own = 1; return self._own", set()),
        ("class T(GRPOTrainer):\n    def _generate(self, p): return super()._generate(p)", set()),
        ("class T(GRPOTrainer):\n    def f(self, p): return self._generate(p)", {"self._generate"}),
        ("class T(GRPOTrainer):\n    def f(self): return super()._tokenize_prompts([])", {"super()._tokenize_prompts"}),
        ("getattr(trainer, '_step')", {"trainer._step"}),
        ("trainer.__dict__['_step'] = 1", {"trainer.__dict__"}),
        ("from trl.trainer.utils import pad", {"trl.trainer.utils"}),
        ("from torch._C import x", {"torch._C._C"}),
        ("found._replace(a=1)", set()),
    ],
)
def test_the_search_finds_what_it_is_for(source, found):
    assert private_names(source) == found

"""Read a Python script that starts a run, without running it: the arguments and attributes of its configuration."""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ..errors import RunFileError
from .run_settings import Reading

TRAINERS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo"}
"""TRL's trainers by the class of their settings."""

BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.Match, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

READING = ("get", "items", "keys", "values", "copy", "to_dict", "to_json_string", "to_sanitized_dict")
"""Methods that change neither a dictionary nor a configuration."""

LOOKED_FOR = "written as in args = GRPOConfig(beta=0.04) or, after it, args.beta = 0.04"


def read_python(text: str, path: Path) -> Reading:
    """The settings in a Python script.

    They are the keyword arguments of one call of a name that ends in `Config`, and attributes of the variable that it
    was assigned to. The class that is called tells the trainer of TRL.
    """
    try:
        with warnings.catch_warnings():  # of the script's own syntax
            warnings.simplefilter("ignore")
            script = _PythonScript(list(ast.walk(ast.parse(text))), path)
    except (SyntaxError, ValueError) as error:
        raise RunFileError("a Python script", f"{path}: {error}", "correct it, or give a YAML file") from error
    call = script.configuration()
    if call is None:
        return Reading({})
    written = [*script.arguments(call), *script.attributes(call)]
    values: dict[str, object] = {}
    others: dict[str, str] = {}
    notes: list[str] = []
    for name, node in written:  # the last one holds
        values.pop(name, None)
        try:
            values[name], note = script.value(node, call)
            notes += [f"`{name}` is {note}."] if note else []
        except ValueError:
            others[name] = f"{ast.unparse(node)} in line {node.lineno}"
    values = {name: value for name, value in values.items() if name not in others}
    return Reading(values, TRAINERS.get(_called(call)), others, notes=tuple(notes))


class _PythonScript:
    """The nodes of a script, and what is assigned to its variables."""

    def __init__(self, nodes: list[ast.AST], path: Path) -> None:
        self.nodes, self.path = nodes, path
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in nodes:
            for target, value in _assignments(node):
                self.assigned.setdefault(ast.unparse(target), []).append(value)
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        names = [*stored, *(node.arg for node in nodes if isinstance(node, ast.arg))]
        self.once = {name for name in names if names.count(name) == 1 and len(self.assigned.get(name, [])) == 1}

    def configuration(self) -> ast.Call | None:
        """The call that makes the configuration: of one of TRL's classes, or else of another one."""
        imports = [node for node in self.nodes if isinstance(node, ast.ImportFrom)]
        of_trl = {name.name for node in imports if re.match(r"trl(\.|$)", node.module or "") for name in node.names}
        calls = [node for node in self.nodes if isinstance(node, ast.Call) and _called(node).endswith("Config")]
        if any(_called(call) == "KLConfig" for call in calls):
            remedy = "write its settings as YAML, and use klgrad train --config FILE --dry-run"
            raise RunFileError("TRL's own settings", f"{self.path} with a KLConfig", remedy)
        own = [call for call in calls if _called(call) in TRAINERS]
        made = own or [call for call in calls if _called(call) not in of_trl]
        if len(own) > 1:
            lines = " and ".join(f"{_called(call)} in line {call.lineno}" for call in own)
            expected = f"one call of {' or '.join(TRAINERS)}"
            raise RunFileError(expected, f"{self.path} with {lines}", "give one of them as YAML")
        return made[0] if len(made) == 1 else None

    def arguments(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """The keyword arguments of a call, with those of dictionaries that are written in the script."""
        for word in call.keywords:
            if word.arg:
                yield word.arg, word.value
            else:
                yield from self.entries(word.value)

    def entries(self, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """The entries of `**node`, and what is written into it after it was made."""
        name = node.id if isinstance(node, ast.Name) else ""
        source = self.assigned[name][0] if name in self.once else node
        keys = source.keys if isinstance(source, ast.Dict) else []
        if isinstance(source, ast.Dict) and all(isinstance(key, ast.Constant) for key in keys):
            yield from ((ast.literal_eval(key), x) for key, x in zip(keys, source.values, strict=True) if key)
        elif isinstance(source, ast.Call) and _called(source) == "dict" and not source.args:
            yield from self.arguments(source)
        else:
            written = ast.unparse(node)
            received = f"**{written} in {self.path}, line {node.lineno}: what is in {written} is not read"
            remedy = "write its settings as arguments of the call, or give the run's settings as YAML"
            raise RunFileError("settings that can be read without running the script", received, remedy)
        for use in self.uses(name):
            item = self.parents[use]
            value = self.stored(item)
            if isinstance(item, ast.Subscript) and isinstance(item.slice, ast.Constant) and value is not None:
                yield str(item.slice.value), value
            elif not (isinstance(item, ast.Subscript) and isinstance(item.ctx, ast.Load)):
                self.check_read(use)

    def attributes(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """What is assigned to attributes of the configuration, of its trainer, and of the trainer's `args`.

        Raises:
            RunFileError: for a use of one of them that may change the configuration in another way.
        """
        configurations = [name for name, values in self.assigned.items() if call in values]
        trainers = [name for name, values in self.assigned.items() if any(map(_is_trainer, values))]
        if not isinstance(self.parents[call], ast.Expr) and not configurations:
            self.check_read(call)
        others = [value for name in configurations for value in self.assigned[name] if value.lineno > call.lineno]
        for value in others:
            if not (isinstance(value, ast.Call) and _called(value).endswith("Config")):
                self.refuse(value)
        for name in (*configurations, *trainers, *(f"{name}.args" for name in trainers)):
            for use in self.uses(name):
                attribute = self.parents[use]
                value = self.stored(attribute)
                if isinstance(attribute, ast.Attribute) and value is not None:
                    late = ast.copy_location(ast.Name("a value that the trainer gets"), value)
                    yield attribute.attr, value if name in configurations else late
                elif name not in trainers and use.lineno > call.lineno:
                    self.check_read(use)

    def uses(self, name: str) -> list[ast.expr]:
        """Where a variable, or an attribute of one, stands other than where it is assigned."""
        return [
            node
            for node in self.nodes
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == name and self.stored(node) is None
        ]

    def stored(self, node: ast.AST) -> ast.expr | None:
        """The value that is assigned to a target; None of a node that is none."""
        pairs = _assignments(self.parents.get(node, node))
        return next((value for target, value in pairs if target is node), None)

    def check_read(self, node: ast.expr) -> None:
        """Refuse a use that does more than read: print, give to a trainer, take an attribute."""
        parent = self.parents[node]
        around = self.parents.get(parent)
        if isinstance(parent, ast.Attribute):
            is_called = isinstance(around, ast.Call) and around.func is parent
            is_read = parent.attr in READING if is_called else parent.attr[:2] != "__"
        elif isinstance(parent, ast.keyword):
            is_read = parent.arg in ("args", None) or _is_trainer(around)
        else:
            is_read = _is_trainer(parent) or (isinstance(parent, ast.Call) and _called(parent) == "print")
        if not is_read:
            self.refuse(node)

    def refuse(self, node: ast.expr) -> NoReturn:
        """Refuse the statement of a node, or the part of it that has the node."""
        while not isinstance(around := self.parents[node], ast.stmt):
            node = around  # pyright: ignore[reportAssignmentType]
        whole = around if isinstance(around, ast.Assign | ast.AugAssign | ast.AnnAssign) else node
        raise RunFileError(
            "settings that can be read without running the script",
            f"{ast.unparse(whole)} in {self.path}, line {around.lineno}: whether it changes them is not read",
            "give the run's settings as YAML",
        )

    def value(self, node: ast.expr, call: ast.Call) -> tuple[object, str]:
        """A literal, a variable that is assigned one once, or an argument's default, with a note on the last.

        Raises:
            ValueError: for a value that is known only when the script runs.
        """
        if self.branches(node) - self.branches(call):
            raise ValueError("in a branch")
        if isinstance(node, ast.Name) and node.id in self.once:
            return ast.literal_eval(self.assigned[node.id][0]), ""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            default = self.argument_default(node.attr)
            return default, f"{ast.unparse(node)}: {default!r} is the default of --{node.attr}"
        try:
            return ast.literal_eval(node), ""
        except (TypeError, MemoryError) as error:
            raise ValueError("known only when the script runs") from error

    def branches(self, node: ast.AST) -> set[ast.AST]:
        """The branches and functions that a node is in."""
        around: set[ast.AST] = {node} if isinstance(node, BRANCHES) else set()
        return around | (self.branches(self.parents[node]) if node in self.parents else set())

    def argument_default(self, name: str) -> object:
        """The default of an argument of the command line."""
        flags = f"--{name}", f"--{name.replace('_', '-')}"
        calls = [node for node in self.nodes if isinstance(node, ast.Call) and _called(node) == "add_argument"]
        calls = [call for call in calls if any(isinstance(x, ast.Constant) and x.value in flags for x in call.args)]
        words = {word.arg: word.value for word in calls[0].keywords} if len(calls) == 1 else {}
        if "default" in words:
            default = ast.literal_eval(words["default"])
        else:
            switches = {"store_true": False, "store_false": True}
            default = switches.get(getattr(words.get("action"), "value", ""))
        if default is None:
            raise ValueError("an argument without a default")
        return default


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets and values of an assignment; of `a += b` the value is a + b."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AugAssign):
        yield node.target, ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


def _called(call: ast.Call) -> str:
    """The last part of the name that is called, as `GRPOConfig` in `trl.GRPOConfig()`."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_trainer(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and _called(node).endswith("Trainer")

"""Read a Python script that starts a run, without running it: the arguments and attributes of its configuration."""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

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

    They are keyword arguments of calls of names that end in `Config`, and attributes of the variable that such a call
    was assigned to. The class that is called tells the trainer of TRL.
    """
    try:
        with warnings.catch_warnings():  # of the script's own syntax
            warnings.simplefilter("ignore")
            script = _PythonScript(list(ast.walk(ast.parse(text))), path)
    except (SyntaxError, ValueError) as error:
        raise RunFileError("a Python script", f"{path}: {error}", "correct it, or give a YAML file") from error
    calls = [node for node in script.nodes if isinstance(node, ast.Call) and script.configures(node)]
    trainer = _trainer_call(calls, path)
    # Another class may have a field of the same name: DPOConfig has a beta too.
    chosen = [trainer] if trainer else calls
    script.keep_branches(chosen)
    late = script.check_uses(chosen)
    written = [*(pair for call in chosen for pair in script.arguments(call)), *script.attributes(chosen)]
    # The last one holds, and one that may not run holds as an unknown.
    order = lambda pair: (id(pair[1]) in script.unsure, pair[1].lineno, pair[1].col_offset)
    in_order = dict(sorted(written, key=order))
    values: dict[str, object] = {}
    others: dict[str, str] = {}
    notes: list[str] = []
    for name, node in in_order.items():
        try:
            values[name], note = script.value(node)
        except ValueError:
            where = f" in line {node.lineno}, which may not run" * (id(node) in script.unsure)
            others[name] = f"{ast.unparse(node)}{where}"
        else:
            notes += [f"`{name}` is {note}."] if note else []
    others |= late
    values = {name: value for name, value in values.items() if name not in late}
    return Reading(values, TRAINERS[_called(trainer)] if trainer else None, others, notes=tuple(notes))


class _PythonScript:
    """The nodes of a script, and what is assigned to its variables."""

    def __init__(self, nodes: list[ast.AST], path: Path) -> None:
        self.nodes, self.path = nodes, path
        self.unsure: set[int] = set()
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in nodes:
            for target, value in _assignments(node):
                self.assigned.setdefault(ast.unparse(target), []).append(value)
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        names = [*stored, *(node.arg for node in nodes if isinstance(node, ast.arg))]
        self.once = {name for name in names if names.count(name) == 1 and len(self.assigned.get(name, [])) == 1}

    def configures(self, call: ast.Call) -> bool:
        """Whether a configuration is made, and not that of another trainer of TRL."""
        imports = [node for node in self.nodes if isinstance(node, ast.ImportFrom)]
        of_trl = {name.name for node in imports if re.match(r"trl(\.|$)", node.module or "") for name in node.names}
        return _called(call).endswith("Config") and (_called(call) in TRAINERS or _called(call) not in of_trl)

    def keep_branches(self, calls: list[ast.Call]) -> None:
        """Note what is in branches and functions that these calls are not in."""
        for node in self.nodes:
            if isinstance(node, BRANCHES):
                inside = list(ast.walk(node))
                if not any(call in inside for call in calls):
                    self.unsure |= {id(x) for x in inside}

    def arguments(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """The keyword arguments of a call, with those of dictionaries that are written in the script."""
        for word in call.keywords:
            if word.arg:
                yield word.arg, word.value
            else:
                yield from self._entries(word.value)

    def _entries(self, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """The entries of `**node`."""
        name = node.id if isinstance(node, ast.Name) else ""
        source = self.assigned[name][0] if name in self.once else node
        if isinstance(source, ast.Dict):
            for key, value in zip(source.keys, source.values, strict=True):
                if key is None:
                    yield from self._entries(value)
                elif isinstance(key, ast.Constant):
                    yield str(key.value), value
                else:
                    self._refuse(node)
        elif isinstance(source, ast.Call) and _called(source) == "dict" and not source.args:
            yield from self.arguments(source)
        else:
            self._refuse(node)
        if name:
            yield from self._changes(name)

    def _changes(self, name: str) -> Iterator[tuple[str, ast.expr]]:
        """What is written into a dictionary after it was made."""
        for node in self.nodes:
            if isinstance(node, ast.Name) and node.id == name and not self._is_read(node, ast.Subscript, ast.Dict):
                self._refuse_use(node)
            for target, value in _assignments(node):
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
                    if not isinstance(target.slice, ast.Constant):
                        self._refuse(target.value)
                    yield str(target.slice.value), value  # pyright: ignore[reportAttributeAccessIssue]

    def check_uses(self, calls: list[ast.Call]) -> dict[str, str]:
        """Refuse uses of a configuration that may change it.

        Args:
            calls: those that make it.

        Returns:
            What is assigned to attributes of its trainer, and of the trainer's `args`, by name.
        """
        for call in calls:
            if not (isinstance(self.parents[call], ast.Expr | ast.Return) or self._is_read(call)):
                self._refuse_use(call)
        made = self._made(calls)
        variables = {name for name, values in self.assigned.items() if any(value in made for value in values)}
        trainers = {name for name, values in self.assigned.items() if any(map(_is_trainer, values))}
        variables |= {f"{name}.args" for name in trainers}
        first = min((call.lineno for call in calls), default=0)
        for node in self.nodes:
            if node in made and node not in calls and not self._is_read(node):
                self._refuse_use(node)
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in variables:
                value = getattr(self.parents[node], "value", None)
                is_made = isinstance(value, ast.Call) and (value in made or _called(value).endswith("Config"))
                is_known = node.lineno <= first or is_made  # what is assigned
                if isinstance(node.ctx, ast.Load):
                    is_known = value is not node or not isinstance(self.parents[node], ast.Assign | ast.AnnAssign)
                    is_known = is_known and self._is_read(node, ast.Attribute, ast.Return)
                if not is_known:
                    self._refuse_use(node)
        late = {*trainers, *(f"{name}.args" for name in trainers)}
        return {
            target.attr: f"{ast.unparse(value)} in line {target.lineno}, after the configuration"
            for node in self.nodes
            for target, value in _assignments(node)
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) in late
        }

    def _made(self, calls: list[ast.Call]) -> list[ast.AST]:
        """These calls, and those of the functions that return what they make."""
        functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        makers = {node.name for node in functions if any(call in list(ast.walk(node)) for call in calls)}
        return [*calls, *(node for node in self.nodes if isinstance(node, ast.Call) and _called(node) in makers)]

    def _is_read(self, node: ast.AST, *kinds: type) -> bool:
        """Whether a value is assigned, printed, given to a trainer or to `**`, or used in a node of these kinds."""
        parent = self.parents[node]
        around = self.parents.get(parent)
        if isinstance(parent, ast.Attribute):
            is_called = isinstance(around, ast.Call) and around.func is parent
            return parent.attr in READING if is_called or ast.Attribute not in kinds else parent.attr[:2] != "__"
        if isinstance(parent, ast.keyword):
            return parent.arg in ("args", None) or _is_trainer(around)
        if isinstance(parent, ast.Call):
            return _is_trainer(parent) or _called(parent) == "print"
        if isinstance(parent, ast.Subscript):
            return ast.Subscript in kinds and not isinstance(parent.ctx, ast.Del)
        return isinstance(parent, (ast.Assign, ast.AnnAssign, ast.Expr, *kinds))

    def _refuse_use(self, node: ast.AST) -> None:
        while not isinstance(around := self.parents[node], ast.stmt):
            node = around
        whole = around if isinstance(around, ast.Assign | ast.AugAssign | ast.AnnAssign) else node
        raise RunFileError(
            "settings that can be read without running the script",
            f"{ast.unparse(whole)} in {self.path}, line {around.lineno}: whether it changes them is not read",
            "give the run's settings as YAML",
        )

    def _refuse(self, node: ast.expr) -> None:
        written = ast.unparse(node)
        raise RunFileError(
            "settings that can be read without running the script",
            f"**{written} in {self.path}, line {node.lineno}: what is in {written} is not read",
            "write its settings as arguments of the call, or give the run's settings as YAML",
        )

    def attributes(self, calls: list[ast.Call]) -> Iterator[tuple[str, ast.expr]]:
        """What is assigned to attributes of the variables that these calls were assigned to."""
        made = self._made(calls)
        variables = {name for name, values in self.assigned.items() if any(value in made for value in values)}
        for node in self.nodes:
            for target, value in _assignments(node):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) in variables:
                    yield target.attr, value

    def value(self, node: ast.expr) -> tuple[object, str]:
        """A literal, a variable that is assigned one once, or an argument's default, with a note on the last.

        Raises:
            ValueError: for a value that is known only when the script runs.
        """
        if id(node) in self.unsure:
            raise ValueError("in a branch")
        try:
            return ast.literal_eval(node), ""
        except (ValueError, TypeError):
            pass
        if isinstance(node, ast.Name) and node.id in self.once:
            return ast.literal_eval(self.assigned[node.id][0]), ""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            default = self._argument_default(node.attr)
            return default, f"{ast.unparse(node)}: {default!r} is the default of --{node.attr}"
        raise ValueError("known only when the script runs")

    def _argument_default(self, name: str) -> object:
        flags = f"--{name}", f"--{name.replace('_', '-')}"
        arguments = [
            {word.arg: word.value for word in node.keywords}
            for node in self.nodes
            if isinstance(node, ast.Call)
            and _called(node) == "add_argument"
            and any(isinstance(x, ast.Constant) and x.value in flags for x in node.args)
        ]
        if len(arguments) != 1:
            raise ValueError("no argument, or several")
        (words,) = arguments
        switches = {"store_true": False, "store_false": True}
        action = getattr(words.get("action"), "value", None)
        default = ast.literal_eval(words["default"]) if "default" in words else switches.get(action)  # type: ignore[arg-type]
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


def _trainer_call(calls: list[ast.Call], path: Path) -> ast.Call | None:
    if any(_called(call) == "KLConfig" for call in calls):
        remedy = "write its settings as YAML, and use klgrad train --config FILE --dry-run"
        raise RunFileError("TRL's own settings", f"{path} with a KLConfig", remedy)
    made = [call for call in calls if _called(call) in TRAINERS]
    if len(made) > 1:
        lines = " and ".join(f"{_called(call)} in line {call.lineno}" for call in made)
        raise RunFileError(f"one call of {' or '.join(TRAINERS)}", f"{path} with {lines}", "give one of them as YAML")
    return made[0] if made else None

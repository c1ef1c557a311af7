"""Read the settings of a run from its file, and find what its KL descends."""

import ast
import json
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from ..errors import NotAuditableError, RunFileError, UnknownNameError
from . import FRAMEWORKS, recorded, run_settings
from .run_settings import PREFIX, Change as Change, Part as Part, Run as Run

# Read a Python script that starts a run, without running it: the arguments and the attributes of its configuration.

TRAINERS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo"}
"""TRL's trainers by the class of their settings."""

BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.Match, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

CHANGES = ("update", "setdefault", "pop", "clear")
"""Methods that change a dictionary."""

LOOKED_FOR = "written as in args = GRPOConfig(beta=0.04) or, after it, args.beta = 0.04"


def of_python(text: str, path: Path) -> tuple[dict[str, Any], str | None, dict[str, str], tuple[str, ...]]:
    """The settings in a Python script.

    Args:
        text: the script.
        path: its file, for errors.

    Returns:
        The values by name: keyword arguments of calls of names that end in `Config`, and attributes of the variable
        that such a call was assigned to; the trainer of TRL, by the class that is called; what is in place of the
        values that are not known without running the script, by name; notes on defaults of arguments.
    """
    try:
        with warnings.catch_warnings():  # of the script's own syntax
            warnings.simplefilter("ignore")
            script = _Script(list(ast.walk(ast.parse(text))), path)
    except (SyntaxError, ValueError) as error:
        raise RunFileError("a Python script", f"{path}: {error}", "correct it, or give a YAML file") from error
    calls = [node for node in script.nodes if isinstance(node, ast.Call) and script.configures(node)]
    trainer = _trainer_call(calls, path)
    # Another class may have a field of the same name: DPOConfig has a beta too.
    chosen = [trainer] if trainer else calls
    script.keep_branches(chosen)
    written = [*(pair for call in chosen for pair in script.arguments(call)), *script.attributes(chosen)]
    # The last one holds, and one that may not run holds as an unknown.
    order = lambda pair: (id(pair[1]) in script.unsure, pair[1].lineno, pair[1].col_offset)
    in_order = dict(sorted(written, key=order))
    values: dict[str, Any] = {}
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
    return values, TRAINERS[_called(trainer)] if trainer else None, others, tuple(notes)


class _Script:
    """The nodes of a script, and what is assigned to its variables."""

    def __init__(self, nodes: list[ast.AST], path: Path) -> None:
        self.nodes, self.path = nodes, path
        self.unsure: set[int] = set()
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
        """What is written into a dictionary after it was made; other uses than reading it are not followed."""
        for node in self.nodes:
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in CHANGES and ast.unparse(called.value) == name:
                self._refuse(called.value)
            for target, value in _assignments(node):
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
                    if not isinstance(target.slice, ast.Constant):
                        self._refuse(target.value)
                    yield str(target.slice.value), value  # pyright: ignore[reportAttributeAccessIssue]

    def _refuse(self, node: ast.expr) -> None:
        written = ast.unparse(node)
        raise RunFileError(
            "settings that can be read without running the script",
            f"**{written} in {self.path}, line {node.lineno}: what is in {written} is not read",
            "write its settings as arguments of the call, or give the run's settings as YAML",
        )

    def attributes(self, calls: list[ast.Call]) -> Iterator[tuple[str, ast.expr]]:
        """What is assigned to attributes of the variables that these calls were assigned to."""
        variables = {name for name, values in self.assigned.items() if any(value in calls for value in values)}
        for node in self.nodes:
            for target, value in _assignments(node):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) in variables:
                    yield target.attr, value

    def value(self, node: ast.expr) -> tuple[Any, str]:
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

    def _argument_default(self, name: str) -> Any:
        flags = f"--{name}", f"--{name.replace('_', '-')}"
        found = [
            {word.arg: word.value for word in node.keywords}
            for node in self.nodes
            if isinstance(node, ast.Call)
            and _called(node) == "add_argument"
            and any(isinstance(x, ast.Constant) and x.value in flags for x in node.args)
        ]
        if len(found) != 1:
            raise ValueError("no argument, or several")
        (words,) = found
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


def _trainer_call(calls: list[ast.Call], path: Path) -> ast.Call | None:
    if any(_called(call) == "KLConfig" for call in calls):
        remedy = "write its settings as YAML, and use klgrad train --config FILE --dry-run"
        raise RunFileError("TRL's own settings", f"{path} with a KLConfig", remedy)
    found = [call for call in calls if _called(call) in TRAINERS]
    if len(found) > 1:
        lines = " and ".join(f"{_called(call)} in line {call.lineno}" for call in found)
        raise RunFileError(f"one call of {' or '.join(TRAINERS)}", f"{path} with {lines}", "give one of them as YAML")
    return found[0] if found else None


# Read a shell script without running it: its commands, with the variables of the script in their places.
#
# What cannot be known without a shell (`$(date)`, a variable of the environment, one that a branch changes) stays as it
# is written, with its `$`, so that a reader can tell.

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
BRACED = re.compile(r"([A-Za-z_]\w*|\d+)(?:\[([@*]|\d+)\])?(?:(:?[-=+])(.*))?", re.DOTALL)
"""The inside of `${...}`: a name, an index, and a default or a replacement."""

REDIRECTION = re.compile(r"\d*(?:&>>?|>>|>&|>\||<&|<<<|<>|>|<)")
HEREDOC = re.compile(r"\d*<<(?!<)(-?)[ \t]*(['\"]?)([\w.-]+)\2")
OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", ";", "|", "&", "(", ")", "\n")
DECLARATIONS = ("export", "local", "declare", "typeset", "readonly")
TESTS = ("[", "[[", "test", "((")
SHELLS = ("bash", "sh", "zsh")
LONGEST = 100_000
"""Characters of a variable; a longer one is unknown. `A=$A$A` doubles."""

DEEPEST = 8
"""Scripts in the arguments of `eval` and `bash -c`."""

ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class Word(str):
    """A word of a command.

    Attributes:
        environment: variables whose defaults are in it, as `BETA` in `${BETA:-0.04}`.
    """

    environment: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, environment: tuple[str, ...]) -> "Word":
        """The text, with the variables whose defaults are in it."""
        word = cls(text)
        word.environment = environment
        return word


@dataclass
class _Token:
    """A word in pieces, an array, or an operator.

    Attributes:
        pieces: texts, each with whether it is quoted, and whether it is to be expanded.
        operator: the operator; empty for a word.
        array: the elements of `NAME=(...)`, whose name is in the pieces.
    """

    pieces: list[tuple[str, bool, bool]] = field(default_factory=list)
    operator: str = ""
    array: "list[_Token] | None" = None

    @property
    def plain(self) -> str:
        """The text, if no part of it is quoted or expanded."""
        return "".join(text for text, quoted, expanded in self.pieces if not (quoted or expanded))

    @property
    def is_plain(self) -> bool:
        return not any(quoted or expanded for _, quoted, expanded in self.pieces)


@dataclass
class _Branch:
    """A part of the script that may not run, or may run often.

    Attributes:
        keyword: what began it.
        before: the variables before it.
        changed: those that a part of it changed.
    """

    keyword: str
    before: dict[str, list[Word] | None]
    changed: set[str] = field(default_factory=set)


def commands_of(text: str, path: Path) -> list[list[Word]]:
    """The commands of a script.

    Args:
        text: the script.
        path: its file, for errors.

    Returns:
        The words of each command, in the order of the script; those of all branches and functions.
    """
    try:
        return list(_ShellScriptScript({}).run(text))
    except (ValueError, IndexError, RecursionError) as error:
        reason = str(error) or "it cannot be read"
        raise RunFileError("a shell script", f"{path}: {reason}", "close its quotes, or give a YAML file") from error


class _ShellScriptScript:
    """The variables at one place of a script."""

    def __init__(self, variables: dict[str, list[Word] | None], depth: int = 0, in_function: bool = False) -> None:
        self.variables = variables  # None is unknown; an array has several words
        self.branches: list[_Branch] = []
        self.depth, self.in_function = depth, in_function

    def run(self, text: str) -> Iterator[list[Word]]:
        """The commands of a text."""
        current: list[_Token] = []
        before, test = "", False  # the operator before this command, and whether a test is before that
        tokens = [*_tokens(text), _Token(operator="\n")]
        for i, token in enumerate(tokens):
            if not token.operator:
                current.append(token)
                continue
            if token.operator == "(" and len(current) == 1 and tokens[i + 1].operator == ")":
                self._enter("function")
                current = []
                continue
            if token.operator == "(":
                self._enter("(")
            first = current[0].plain if current else ""
            if not (token.operator == ")" and self._innermost("case")):
                yield from self._command(current, certain=before != "||" and not (before == "&&" and test))
            if token.operator == ")" and not self._innermost("case"):
                self._leave("(")
            if token.operator.startswith(";;"):
                self._alternative()
            before, test, current = token.operator, first in TESTS, []

    def _innermost(self, keyword: str) -> bool:
        return bool(self.branches) and self.branches[-1].keyword == keyword

    def _enter(self, keyword: str) -> None:
        self.branches.append(_Branch(keyword, dict(self.variables)))

    def _alternative(self) -> None:
        """Another branch begins: the variables are those before the first one."""
        if self.branches:
            branch = self.branches[-1]
            branch.changed |= _differences(branch.before, self.variables)
            self.variables = dict(branch.before)

    def _leave(self, *keywords: str) -> None:
        if not self.branches or self.branches[-1].keyword not in keywords:
            return
        branch = self.branches.pop()
        for name in branch.changed | _differences(branch.before, self.variables):
            self.variables[name] = None

    def _command(self, tokens: list[_Token], certain: bool) -> Iterator[list[Word]]:
        """Assign variables, follow keywords, and give the words of a command."""
        while tokens and tokens[0].is_plain and tokens[0].array is None:
            word = tokens[0].plain
            if word in ("if", "while", "until", "{"):
                waits = word == "{" and self._innermost("function")
                if not waits:
                    self._enter(word)
            elif word in ("else", "elif"):
                self._alternative()
            elif word in ("fi", "done", "esac", "}"):
                self._leave("if", "while", "until", "for", "case", "{", "function")
            elif word in ("for", "select", "case"):
                self._enter("case" if word == "case" else "for")
                if word != "case" and len(tokens) > 1 and tokens[1].is_plain:
                    self.variables[tokens[1].plain] = None
                return
            elif word == "function":
                self._enter("function")
                return
            elif word not in ("then", "do", "!", "time"):
                break
            tokens = tokens[1:]
        if self._innermost("case") and tokens and tokens[0].plain == "in":
            return
        yield from self._simple(tokens, certain)

    def _simple(self, tokens: list[_Token], certain: bool) -> Iterator[list[Word]]:
        first = tokens[0].plain if tokens else ""
        declared = first in DECLARATIONS
        rest = tokens[1:] if declared else tokens
        assigned = [token for token in rest if ASSIGNMENT.match(_head(token))]
        if declared or (assigned and len(assigned) == len(tokens)):
            for token in assigned:
                self._assign(token, certain)
            return
        while tokens and ASSIGNMENT.match(_head(tokens[0])):  # for the environment of the command
            tokens = tokens[1:]
        words = [word for token in tokens for word in self.expand(token)]
        if not words:
            return
        if words[0] in ("read", "unset", "mapfile", "readarray", "getopts"):
            for word in words[1:]:
                self.variables[word] = None
        yield words
        if self.depth >= DEEPEST:
            return
        if words[0] == "eval":
            yield from self._inner(" ".join(words[1:]))
        for shell, option, text in zip(words, words[1:], words[2:], strict=False):
            if shell.split("/")[-1] in SHELLS and re.fullmatch(r"-\w*c", option):
                yield from self._inner(text)

    def _inner(self, text: str) -> Iterator[list[Word]]:
        in_function = self.in_function or any(branch.keyword == "function" for branch in self.branches)
        yield from _ShellScriptScript(dict(self.variables), self.depth + 1, in_function).run(text)

    def _assign(self, token: _Token, certain: bool) -> None:
        match = ASSIGNMENT.match(_head(token))
        assert match is not None
        name = match[1]
        if token.array is not None:
            words = [word for element in token.array for word in self.expand(element)]
        else:
            words = [self._text(_without(token, match.end()))]
        if match[2]:
            before = self.variables.get(name)
            if before is None:
                words = []
            elif token.array is not None:
                words = [*before, *words]
            else:
                words = [Word.of(before[0] + words[0], before[0].environment + words[0].environment), *before[1:]]
        unknown = bool(match[2]) and self.variables.get(name) is None
        too_long = sum(map(len, words)) > LONGEST
        value = None if unknown or too_long else words
        known = self.variables.get(name, [])
        self.variables[name] = value if certain or value == known else None

    def _text(self, token: _Token) -> Word:
        """The value of an assignment, which is not split into words."""
        quoted = _Token([(text, True, expanded) for text, _, expanded in token.pieces])
        words = self.expand(quoted)
        return Word.of(" ".join(words), tuple(name for word in words for name in word.environment))

    def expand(self, token: _Token) -> list[Word]:
        """The words of a token, with the variables in their places."""
        made: list[Word] = []
        text, environment, began = "", (), False
        for piece, quoted, expanded in token.pieces:
            if not expanded:
                text, began = text + piece, True
                continue
            values = self._value(piece)
            if values == [piece]:  # unknown, and kept in one piece
                parts = values
            elif quoted and "@" not in piece:
                parts = [Word.of(" ".join(values), _environment(values))]
            else:
                parts = _split(values, quoted)
            if not parts:
                continue
            spaced = not quoted and bool(values) and values[0][:1].isspace()
            for k, part in enumerate(parts):
                if (k > 0 or spaced) and (began or text):
                    made.append(Word.of(text, environment))
                    text, environment, began = "", (), False
                text, environment, began = text + part, environment + part.environment, True
        return [*made, Word.of(text, environment)] if began else made

    def _value(self, text: str) -> list[Word]:
        """The value of `$NAME`, `${...}`, `$((...))` or `$(...)`, or the text itself."""
        raw = [Word(text)]
        if text in ("$(pwd)", "`pwd`", "$PWD", "${PWD}"):
            return [Word(Path.cwd())]
        if text.startswith("$(("):
            number = self._number(text[3:-2])
            return raw if number is None else [Word(number)]
        if text.startswith(("$(", "`")):
            return raw
        in_function = self.in_function or any(branch.keyword == "function" for branch in self.branches)
        if text[1:].lstrip("{")[:1] in ("@", "*"):
            return raw if in_function else []  # the script's own arguments
        match = BRACED.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if match is None:
            return raw
        name, index, rule, word = match.groups()
        value = self.variables.get(name, [])
        if value is None or (name.isdigit() and in_function):
            return raw
        if index and index.isdigit():
            value = value[int(index) : int(index) + 1]
        elif not index:
            value = value[:1]
        if rule is None:
            return value if name in self.variables else raw
        is_set = name in self.variables and (value != [""] or ":" not in rule)
        if rule.endswith("+"):
            chosen = self._default(word) if is_set else [Word("")]
        else:
            chosen = value if is_set else self._default(word)
            if rule.endswith("=") and not is_set:
                self.variables[name] = chosen
        from_outside = () if name in self.variables and not rule.endswith("=") else (name,)
        return [Word.of(part, part.environment + from_outside) for part in chosen]

    def _default(self, text: str) -> list[Word]:
        tokens = [token for token in _tokens(text) if not token.operator]
        return [Word.of(" ".join(words := [w for t in tokens for w in self.expand(t)]), _environment(words))]

    def _number(self, text: str) -> int | None:
        """The value of an arithmetic expression of whole numbers and variables."""
        try:
            return self._evaluated(ast.parse(text.replace("$", "").strip(), mode="eval").body)
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
            return None

    def _evaluated(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int((self.variables.get(node.id) or [""])[0])
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            left, right = self._evaluated(node.left), self._evaluated(node.right)
            if abs(left) + abs(right) < 1 << 62:
                return ARITHMETIC[type(node.op)](left, right)
        raise ValueError("no arithmetic of whole numbers")


def _environment(words: list[Word]) -> tuple[str, ...]:
    return tuple(name for word in words for name in word.environment)


def _split(values: list[Word], quoted: bool) -> list[Word]:
    """The words of values; a command in them, whose output is unknown, is kept in one piece."""
    is_whole = lambda value: quoted or "$(" in value or "`" in value
    parts = [(part, value.environment) for value in values for part in ([value] if is_whole(value) else value.split())]
    return [Word.of(*part) for part in parts]


def _differences(before: dict[str, list[Word] | None], after: dict[str, list[Word] | None]) -> set[str]:
    return {name for name in {*before, *after} if before.get(name, ()) != after.get(name, ())}


def _head(token: _Token) -> str:
    """The text up to the first part that is quoted or expanded."""
    return token.pieces[0][0] if token.pieces and not any(token.pieces[0][1:]) else ""


def _without(token: _Token, length: int) -> _Token:
    text, quoted, expanded = token.pieces[0]
    return _Token([(text[length:], quoted, expanded), *token.pieces[1:]])


def _tokens(text: str) -> Iterator[_Token]:
    """The words and the operators of a script, without comments, redirections and documents in it."""
    i, documents, text = 0, [], text.replace("\r\n", "\n")
    while i < len(text):
        if text[i] in " \t":
            i += 1
        elif text.startswith("\\\n", i):
            i += 2
        elif text[i] == "#":
            i = _end_of_line(text, i)
        elif match := HEREDOC.match(text, i):
            documents.append((match[3], bool(match[1])))
            i = match.end()
        elif (match := REDIRECTION.match(text, i)) and text[match.end() : match.end() + 1] != "(":
            i = match.end()
            while i < len(text) and text[i] in " \t":
                i += 1
            if i < len(text) and not text.startswith(OPERATORS, i):
                _, i = _word(text, i)
        elif text.startswith("((", i):
            end = text.find("))", i)
            i = len(text) if end < 0 else end + 2
            yield _Token([("((", False, False)])
        elif found := next((x for x in OPERATORS if text.startswith(x, i)), None):
            yield _Token(operator=found)
            i += len(found)
            if found == "\n":
                for ending, indented in documents:
                    i = _after_document(text, i, ending, indented)
                documents = []
        else:
            token, i = _word(text, i)
            yield token


def _end_of_line(text: str, i: int) -> int:
    end = text.find("\n", i)
    return len(text) if end < 0 else end


def _after_document(text: str, i: int, ending: str, indented: bool) -> int:
    while i < len(text):
        end = _end_of_line(text, i)
        line = text[i:end]
        i = min(end + 1, len(text))
        if (line.lstrip("\t") if indented else line) == ending:
            break
    return i


def _word(text: str, i: int) -> tuple[_Token, int]:
    """The word that begins at a place, and the place after it."""
    token = _Token()
    plain = ""

    def flush() -> None:
        nonlocal plain
        if plain:
            token.pieces.append((plain, False, False))
        plain = ""

    while i < len(text):
        c = text[i]
        if c == "(" and not token.pieces and ASSIGNMENT.fullmatch(plain):
            flush()
            token.array, i = _array(text, i + 1)
            return token, i
        if c in " \t\n;|&()" or (c in "<>" and text[i + 1 : i + 2] != "("):
            break
        if c in "<>":  # a process substitution
            flush()
            end = _closing(text, i + 1, "(", ")")
            token.pieces.append((f"${text[i:end]}", True, False))
            i = end
        elif c == "\\":
            if text[i + 1 : i + 2] != "\n":
                flush()
                token.pieces.append((text[i + 1 : i + 2], True, False))
            i += 2
        elif c == "'" or text.startswith("$'", i):
            flush()
            begin = i + (1 if c == "'" else 2)
            end = text.find("'", begin)
            if end < 0:
                raise ValueError("No closing quotation")
            token.pieces.append((text[begin:end], True, False))
            i = end + 1
        elif c == '"':
            flush()
            i = _quoted(text, i + 1, token)
        elif c in "$`" and (end := _expansion(text, i)) > i + 1:
            flush()
            token.pieces.append((text[i:end], False, True))
            i = end
        else:
            plain, i = plain + c, i + 1
    flush()
    return token, i


def _quoted(text: str, i: int, token: _Token) -> int:
    """Add what is between double quotes."""
    plain = ""
    while True:
        if i >= len(text):
            raise ValueError("No closing quotation")
        c = text[i]
        if c == '"':
            token.pieces.append((plain, True, False))
            return i + 1
        if c == "\\" and text[i + 1 : i + 2] in ("$", "`", '"', "\\", "\n"):
            plain, i = plain + text[i + 1].strip("\n"), i + 2
        elif c in "$`" and (end := _expansion(text, i)) > i + 1:
            if plain:
                token.pieces.append((plain, True, False))
            token.pieces.append((text[i:end], True, True))
            plain, i = "", end
            if text[i : i + 1] == '"':  # "$@" without arguments is no word at all
                return i + 1
        else:
            plain, i = plain + c, i + 1


def _expansion(text: str, i: int) -> int:
    """The end of the expansion that begins at a place."""
    if text[i] == "`":
        end = text.find("`", i + 1)
        if end < 0:
            raise ValueError("No closing quotation")
        return end + 1
    following = text[i + 1 : i + 2]
    if following == "{":
        return _closing(text, i + 1, "{", "}")
    if following == "(":
        return _closing(text, i + 1, "(", ")")
    if match := NAME.match(text, i + 1):
        return match.end()
    return i + 2 if following and following in "@*#?$!-0123456789" else i + 1


def _closing(text: str, i: int, begins: str, ends: str) -> int:
    """The place after the bracket that closes the one at a place."""
    depth = 0
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 1
        elif c == "'" and begins == "(":
            i = text.find("'", i + 1)
            if i < 0:
                break
        elif c == begins:
            depth += 1
        elif c == ends:
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    raise ValueError(f"No closing {ends}")


def _array(text: str, i: int) -> tuple[list[_Token], int]:
    elements: list[_Token] = []
    while i < len(text):
        if text[i] == ")":
            return elements, i + 1
        if text[i] in " \t\n":
            i += 1
        elif text.startswith("\\\n", i):
            i += 2
        elif text[i] == "#":
            i = _end_of_line(text, i)
        elif text.startswith(OPERATORS, i) or text[i] in "<>":
            raise ValueError(f"an array with {text[i]}")
        else:
            token, i = _word(text, i)
            elements.append(token)
    raise ValueError("No closing )")


# Read a configuration file into names and values: YAML or JSON, or the shell or Python script that starts the run.
#
# Nested names are joined by dots, so that `actor_rollout_ref: {actor: {use_kl_loss: true}}` in a file and
# `actor_rollout_ref.actor.use_kl_loss=true` in a script are the same.

OVERRIDE = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
"""`name=value` as Hydra takes it, perhaps with + before it; `~name` removes a setting."""

DATA = (".yaml", ".yml", ".json")
MOST = 100_000
"""Values in a YAML file, with its aliases written out."""

SHORT = {"-cn": "config_name", "-cp": "config_path", "-cd": "config_dir"}
"""Hydra's short flags."""

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start another one."""

OTHER_COMMANDS = (
    "echo", "printf", "cat", "cp", "mv", "rm", "ls", "cd", "mkdir", "chmod", "sed", "grep", "git", "pip", "curl",
)  # fmt: skip
"""Commands whose words may be those of a run, and start none."""


@dataclass(frozen=True)
class Read:
    """What a file says.

    Attributes:
        settings: values by dotted name.
        trainer: TRL's trainer, where the script names it.
        not_literal: what a Python script has in place of a value, by name, where it is known only when it runs.
        program: the module, the file or the command that a shell script starts.
        environment: variables of the environment whose defaults were taken, by name of the setting.
        unread: words of a command that may have settings.
        notes: what was read in addition.
    """

    settings: dict[str, Any]
    trainer: str | None = None
    not_literal: dict[str, str] = field(default_factory=dict)
    program: str = ""
    environment: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_settings(path: Path) -> list[Read]:
    """The settings in a file, by dotted name.

    Args:
        path: `.yaml`, `.yml`, `.json` or `.py`; any other file is read as a shell script.

    Returns:
        What each command of a shell script says that starts a program of Python, or the one thing that another file
        says. Values of a shell script are strings, and a flag without a value is `True`.
    """
    text = _text(path)
    if path.suffix.lower() in DATA:
        return [Read(dict(_flat(loaded(text, path))))]
    if path.suffix.lower() == ".py":
        literals, trainer, others, notes = of_python(text, path)
        return [Read(literals, trainer, others, notes=notes)]
    found = [_started(words) for words in commands_of(text, path)]
    return [read for read in found if read is not None]


def read_data(path: Path) -> dict[str, Any]:
    """The settings in a YAML or JSON file, by dotted name."""
    return dict(_flat(loaded(_text(path), path)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise RunFileError("a configuration file", f"{path}: {reason}", "give the path of the file") from error


def _started(words: list[Word]) -> Read | None:
    """The settings of a command that starts a program of Python."""
    found = None if words[0] in OTHER_COMMANDS else _program(words)
    if found is None:
        return None
    program, arguments = found
    settings: dict[str, Any] = {}
    environment: dict[str, tuple[str, ...]] = {}
    unread: list[str] = []
    i = 0
    while i < len(arguments):
        word, i = arguments[i], i + 1
        is_flag = word.startswith("--") and len(word) > 2
        if is_flag or word in SHORT:
            name, has_value, value = word[2:].partition("=") if is_flag else (SHORT[word], "", "")
            name, used = name.replace("-", "_"), word.environment
            if not has_value:
                value = arguments[i] if i < len(arguments) and not arguments[i].startswith("--") else True
                used += arguments[i].environment if value is not True else ()
                i += value is not True
        elif override := OVERRIDE.fullmatch(word):
            name, value, used = override[1], override[2], word.environment
            if value is None and not word.startswith("~"):
                continue  # a value of the flag before it
            value = value and _unquoted(value)
        elif word.startswith("$") or ("$" in word.partition("=")[0] and "=" in word):
            unread.append(word)
            continue
        else:
            continue
        if "$" in name:
            unread.append(word)
            continue
        settings.pop(name, None)
        settings[name] = value
        environment[name] = used
    return Read(settings, program=program, environment=environment, unread=tuple(unread))


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _program(words: list[Word]) -> tuple[str, list[Word]] | None:
    """The program that a command starts, and its arguments: those before it are the launcher's."""
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if word in ("-m", "--module") and following and following not in LAUNCHERS:
            return following, words[i + 2 :]
        if word.endswith(".py") or word in ("main_ppo", "train_ppo_ray"):
            return word, words[i + 1 :]
        if word.split("/")[-1] in ("trl", "klgrad") and following and (i == 0 or not words[i - 1].startswith("-")):
            return f"{word.split('/')[-1]} {following}", words[i + 2 :]
    return None


def loaded(text: str, path: Path) -> dict[Any, Any]:
    """The content of a YAML or JSON file.

    Args:
        text: the content.
        path: the file.
    """
    import yaml

    try:
        if path.suffix.lower() == ".json":
            found = json.loads(text)
        else:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if node is not None and _size(node, {}) > MOST:
                remedy = "write the values without aliases"
                raise RunFileError(f"at most {MOST} values", f"{path} with aliases of more", remedy)
            found = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise RunFileError(f"{path} as YAML", " ".join(str(error).split()), "correct the file") from error
    except ValueError as error:
        if isinstance(error, RunFileError):
            raise
        raise RunFileError(f"{path} as JSON", str(error), "correct the file") from error
    if not isinstance(found, dict):
        raise RunFileError("names and values", f"{path} with {type(found).__name__}", "write `name: value` lines")
    return found


def _size(node: Any, known: dict[int, float]) -> float:
    """The number of values below a node of YAML, with aliases written out; infinite for one that contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        inner = node.value if isinstance(node.value, list) else []
        parts = [part for x in inner for part in (x if isinstance(x, tuple) else (x,))]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _flat(nested: dict[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


# Names in a configuration file that look like mistyped names of settings.

LIKENESS = 0.75
"""Of two short words: one letter is missing or two are exchanged in a word of four."""

DIFFERENT = 2
"""Letters without a counterpart in long words, both together: `generations` is no mistyped `iterations`."""


def mistyped(given: Iterable[str], known: Iterable[str]) -> list[str]:
    """A note for each given name that is close to a known one; other unknown names are settings of other things."""
    names = tuple(known)
    unknown = [name for name in given if name not in names]
    near = {name: [other for other in names if _close(name, other)] for name in unknown}
    return [
        f"`{name}` is not read; did you mean {' or '.join(f'`{x}`' for x in found)}?"
        for name, found in near.items()
        if found
    ]


def _close(name: str, other: str) -> bool:
    """Whether each word is close: `per_device_eval_batch_size` as a whole is like `per_device_train_batch_size`."""
    if _letters(name) == _letters(other):
        return True
    words, others = _words(name), _words(other)
    return len(words) == len(others) and all(map(_alike, words, others))


def _alike(word: str, other: str) -> bool:
    same = sum(block.size for block in SequenceMatcher(None, word, other).get_matching_blocks())
    letters = len(word) + len(other)
    return letters - 2 * same <= DIFFERENT and 2 * same >= LIKENESS * letters


def _words(name: str) -> list[str]:
    return re.split(r"[-._]", name.lower())


def _letters(name: str) -> str:
    return "".join(_words(name))


# Which framework a configuration file is of, and its reader.


@dataclass(frozen=True)
class Reader:
    """How the settings of one framework are read.

    Attributes:
        title: its name in a sentence.
        known: the settings that matter, with their defaults.
        harmless: settings with the name of a KL that do not change what is descended.
        beginnings: how the names of settings begin that only this framework has.
        programs: the modules, files and commands that start a run.
        read: the run with given settings and, for TRL, a trainer.
    """

    title: str
    known: dict[str, Any]
    harmless: tuple[str, ...]
    beginnings: tuple[str, ...]
    programs: re.Pattern[str]
    read: Callable[[dict[str, Any], str | None], Run]


OTHER = r"(?!.*(sft|generat|serve|tinker|eval|merge))"
"""Programs of the same packages that train by no reward."""

READERS = {
    "verl": Reader(
        "verl",
        run_settings.DEFAULTS,
        run_settings.HARMLESS,
        ("actor_rollout_ref.", "algorithm."),
        re.compile(rf"{OTHER}((verl|recipe)[./](.*[./_])?|.*/)?main(_\w+)?(\.py)?"),
        lambda given, _: run_settings.verl_run(given),
    ),
    "skyrl": Reader(
        "SkyRL",
        run_settings.SKYRL_DEFAULTS,
        run_settings.SKYRL_HARMLESS,
        ("trainer.algorithm.",),
        re.compile(rf"{OTHER}skyrl(_train)?[./].*"),
        lambda given, _: run_settings.skyrl_run(given),
    ),
    "openrlhf": Reader(
        "OpenRLHF",
        run_settings.OPENRLHF_DEFAULTS,
        run_settings.OPENRLHF_HARMLESS,
        ("algo.kl.", "algo.advantage.", *run_settings.ONLY_OLD),
        re.compile(r"(.*[./])?train_ppo(_ray)?(\.py)?"),
        lambda given, _: run_settings.openrlhf_run(given),
    ),
    "trl": Reader(
        "TRL",
        run_settings.GRPO | run_settings.RLOO,
        (),
        (),
        re.compile(r"trl (grpo|rloo)|trl[./]scripts[./](grpo|rloo)(\.py)?"),
        run_settings.trl_run,
    ),
}
"""By framework, in the order in which names are looked at."""

LIKE_A_KL = re.compile(r"(?:^|[._])(?:kl|beta(?![a-z0-9])|estimator)")
"""A setting that may be of a KL, by its name."""

OF_A_TRAINER = re.compile(r"(grpo|gspo|rloo)\w*\.py$|\.\w*(grpo|gspo|rloo)\w*$")
"""A script that trains with TRL, by its name."""

OWN_CONFIGURATIONS = ("ppo_trainer", "ppo_megatron_trainer")
"""Configurations of verl itself, whose defaults are those of `of_verl.DEFAULTS`."""


def read_run(
    path: Path, framework: str | None = None, trainer: str | None = None, settings: dict[str, str] | None = None
) -> Run:
    """Read the configuration of a run.

    Args:
        path: a YAML or JSON file as the framework takes it, or the shell or Python script that starts the run.
            A script is not run: of a shell script the variables are resolved, and of a Python script the literals
            are read, as in `args = GRPOConfig(beta=0.04)` or, after it, `args.beta = 0.04`.
        framework: `trl`, `verl`, `openrlhf` or `skyrl`; None to tell by the program that a script starts, and by the
            names of the settings.
        trainer: for TRL, `grpo` or `rloo`; None to tell by the settings.
        settings: values by name, in place of those of the file.

    Returns:
        The settings of its KL, and what to change for the reverse KL. Missing settings have the framework's defaults.
        Unknown ones are ignored, with a note for names that are close to one that matters.

    Raises:
        RunFileError: for a file that cannot be read, is of no known framework, has a value that cannot be, or says
            in a way that is not read what may be a setting of the KL.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "run.json"
        >>> _ = path.write_text('{"beta": 0.04, "use_bias_correction_kl": false, "loss_type": "dr_grpo"}')
        >>> run = read_run(path)
        >>> run.framework, run.trainer, [(change.name, change.value) for change in run.changes]
        ('trl', 'GRPOTrainer', [('use_bias_correction_kl', True)])
    """
    if framework is not None and framework not in READERS:
        raise UnknownNameError("framework with a configuration that can be read", framework, READERS)
    reads = [_with_files(read, path) for read in read_settings(path)]
    told = [(read, _framework_of(read)) for read in reads]
    chosen = [(read, of) for read, of in told if of and framework in (None, of)]
    if not chosen and framework is not None:  # its settings are looked for in what is of no known framework
        chosen = [(read, framework) for read, of in told if of is None]
    if started := [(read, of) for read, of in chosen if READERS[of].programs.fullmatch(read.program)]:
        chosen = started  # other programs may have flags of the same names
    given = {name.replace("-", "_"): value for name, value in (settings or {}).items()}
    runs = [_run(read, of, trainer, given, path) for read, of in chosen]
    recognised = [run for run in runs if run is not None]
    if not recognised:
        raise _not_recognised(path, framework, [of for _, of in told if of and of != framework])
    if any(run.settings != recognised[0].settings for run in recognised[1:]):
        programs = " and ".join(read.program for read, _ in chosen)
        raise RunFileError("one command that starts a run", f"{path} with {programs}", "give a script with one of them")
    return recognised[0]


def _framework_of(read: Read) -> str | None:
    """By the program that is started, the names of the settings, or the name of a script; "" for another program."""
    if read.program.startswith("klgrad "):
        remedy = "klgrad train ... --dry-run says what it descends"
        raise RunFileError("a run of another framework", f"{read.program}", remedy)
    for framework, reader in READERS.items():
        if reader.programs.fullmatch(read.program):
            return framework
    if re.match(r"(trl |openrlhf\.|verl\.|skyrl)", read.program):
        return ""  # their other commands have no KL to a reference, or another one
    names = (*read.settings, *read.not_literal)
    for framework, reader in READERS.items():
        if any(name.startswith(reader.beginnings) for name in names if reader.beginnings):
            return framework
    if read.trainer or any(name in names for name in (*run_settings.TELLING, *run_settings.OWN_FIELDS)):
        return "trl"
    return "trl" if OF_A_TRAINER.search(read.program) else None


def _not_recognised(path: Path, framework: str | None, others: list[str]) -> RunFileError:
    is_python = path.suffix.lower() == ".py"
    if framework is not None and others:
        title = READERS[others[0]].title
        received, remedy = f"{path}, which looks like {title}'s", f"klgrad advise {others[0]} --config FILE"
        return RunFileError(f"a configuration of {framework}", received, remedy)
    wanted = f"a configuration of {framework or ', '.join(READERS)}{f', {LOOKED_FOR}' if is_python else ''}"
    remedy = "name the framework: klgrad advise trl --config FILE"
    if is_python:
        remedy = "give the run's settings as YAML, or the shell script that starts it with its arguments"
    elif framework is not None:
        remedy = "give the file with its settings, or name the settings: --set NAME=VALUE"
    return RunFileError(wanted, f"{path} with none of their settings of a KL", remedy)


def _run(read: Read, framework: str, trainer: str | None, settings: dict[str, str], path: Path) -> Run | None:
    """The run, or None if no setting was recognised and nothing else tells what is run."""
    reader = READERS[framework]
    named, notes = _named(read.settings, framework)
    given, set_notes = _named(settings, framework)
    for name in given:
        if name not in reader.known and not name.startswith(PREFIX):
            raise UnknownNameError("setting", name, reader.known)
    _refuse_unread(read, framework, named, given)
    found = reader.read({**named, **given}, trainer or read.trainer or _trainer(read.program))
    is_told = read.trainer or reader.programs.fullmatch(read.program)
    is_told = is_told or any(name.startswith(reader.beginnings) for name in named if reader.beginnings)
    if not found.given and not is_told:
        return None
    old = [name for name in read.settings if name in run_settings.OLD] if framework == "openrlhf" else []
    if old:
        found = replace(found, changes=run_settings.with_old_names(found.changes))
    near = mistyped((*named, *read.not_literal), found.settings)
    literal = [note for note in read.notes if not note.startswith("`") or note.split("`")[1] in found.settings]
    outside = _from_outside(read, named, found, given)
    return replace(
        found,
        notes=(*found.notes, *notes, *set_notes, *literal, *outside, *near),
        overrides=tuple(name for name in found.given if name in given),
    )


def _trainer(program: str) -> str | None:
    """TRL's trainer, by the command or the script."""
    found = re.search(r"(grpo|rloo)[^./]*(\.py)?$", program)
    return found[1] if found else None


def _named(settings: dict[str, Any], framework: str) -> tuple[dict[str, Any], list[str]]:
    """The settings by the names that they have today, with `no_x` as x = False."""
    known, found, notes = READERS[framework].known, {}, []
    for name, value in settings.items():
        positive = name.removeprefix("no_")
        if framework == "openrlhf" and name in run_settings.OLD:
            found[run_settings.OLD[name]] = value
            notes = [run_settings.OLD_NAMES]
        elif name not in known and positive != name and isinstance(known.get(positive), bool):
            found[positive] = False
        else:
            found[name] = value
    return found, notes


def _refuse_unread(read: Read, framework: str, named: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse what may be a setting of the KL and is not read."""
    reader = READERS[framework]
    remedy = "give it by --set NAME=VALUE, or remove it if it is none"
    open_values = {name: text for name, text in read.not_literal.items() if name in reader.known and name not in given}
    if open_values:
        written = ", ".join(f"{name}={text}" for name, text in open_values.items())
        values = " ".join(f"--set {name}=VALUE" for name in open_values)
        raise RunFileError("values that are known without running the script", written, f"add {values}")
    for name, value in named.items():
        if any(other.startswith(f"{name}.") for other in reader.known) and value not in (None, ""):
            raise RunFileError(f"each setting of {name} by its own name", f"{name} as a whole", f"{remedy}")
        if name in names_like_a_kl([name], framework):
            near = mistyped([name], reader.known)
            meant = f"; {near[0].partition('; ')[2]}" if near else ""
            received = f"{name}, which may be of a KL"
            raise RunFileError(f"settings of {reader.title} that are known", received, f"{remedy}{meant}")
    for word in read.unread:
        if not re.fullmatch(r"\$\{?\w+(:?[-+][^}]*)?\}?", word) or re.fullmatch(r"\$\{?[\d@*].*", word):
            raise RunFileError(
                "arguments that are written in the script", word, f"what is in {word} is not read; write it out"
            )


def _from_outside(read: Read, named: dict[str, Any], run: Run, given: dict[str, Any]) -> list[str]:
    """Notes on variables of the environment."""
    old = {name: run_settings.OLD.get(name, name) for name in read.environment}
    used = {
        old[name]: variables
        for name, variables in read.environment.items()
        if variables and old[name] in run.settings and old[name] not in given
    }
    notes = [
        f"`{name}` is {named[name]} unless the environment has another {' or '.join(dict.fromkeys(variables))}."
        for name, variables in used.items()
        if name in named
    ]
    unset = " and ".join(dict.fromkeys(read.unread))
    return [*notes, *([f"The script does not set {unset}: settings in it are not read."] if unset else [])]


def _with_files(read: Read, path: Path) -> Read:
    """With the settings of the files that a command or a list of defaults names; those of the command hold."""
    if path.suffix.lower() == ".py":
        return read
    if path.suffix.lower() in DATA:
        base = _defaults(path) if any(name == "defaults" for name in read.settings) else {}
        return replace(read, settings={**base, **{n: x for n, x in read.settings.items() if n != "defaults"}})
    told = _framework_of(read)
    is_hydra = any(name in read.settings for name in ("config_name", "config_path", "config_dir"))
    name = read.settings.get("config_name" if is_hydra else "config")
    if name is None and not is_hydra:
        return read
    folder = read.settings.get("config_path") or read.settings.get("config_dir")
    if is_hydra:
        own = str(name or "ppo_trainer").removesuffix(".yaml")
        if folder in (None, "config", "./config") and own in OWN_CONFIGURATIONS and told == "verl":
            return read
        file = f"{folder}/{own}.yaml" if folder else f"{own}.yaml"
    else:
        file = str(name)
    found = _beside(file, path)
    if found is None:
        remedy = "give that file by --config, and what the script changes by --set NAME=VALUE"
        raise RunFileError("the settings of the run", f"{file}: what is in {file} is not read", remedy)
    base = {**(_defaults(found) if is_hydra else {}), **read_data(found)}
    own_settings = {n: x for n, x in read.settings.items() if n not in ("config", "config_name", "config_path")}
    note = f"With the settings of {found}."
    return replace(read, settings={**base, **own_settings}, notes=(*read.notes, note))


def _beside(file: str, path: Path) -> Path | None:
    """The file, from the current folder, that of the script, or one above it: scripts are started from one of them."""
    if "$" in file or "`" in file:
        return None
    folders = [Path.cwd(), *path.resolve().parents]
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def _defaults(path: Path) -> dict[str, Any]:
    """The settings of the configurations in the list `defaults` of a file of Hydra."""
    listed = loaded(path.read_text(encoding="utf-8"), path).get("defaults")
    found: dict[str, Any] = {}
    if not isinstance(listed, list):
        return found
    if "_self_" in listed[:-1]:
        remedy = "write _self_ last, or leave it out"
        raise RunFileError("settings that its defaults do not replace", f"{path} with _self_ before others", remedy)
    for entry in listed:
        if entry == "_self_" or entry in OWN_CONFIGURATIONS:
            continue
        file = path.parent / f"{entry}.yaml" if isinstance(entry, str) else None
        if file is None or not file.is_file():
            written = entry if isinstance(entry, str) else "a group of configurations"
            remedy = "write its settings into the file; Hydra prints all values with --cfg job --resolve"
            raise RunFileError("the settings of the run", f"{path} with {written} among its defaults", remedy)
        found |= {**_defaults(file), **read_data(file)}
    return found


def names_like_a_kl(names: Iterable[str], framework: str) -> list[str]:
    """The names that look like those of a KL, and are neither known nor harmless."""
    reader = READERS[framework]
    known = (
        *reader.known,
        *reader.harmless,
        *run_settings.OWN_FIELDS,
    )  # the last are refused with a remedy of their own
    declared = PREFIX if framework == "verl" else " "
    return [name for name in names if LIKE_A_KL.search(name) and name not in known and not name.startswith(declared)]


# What each KL of a run descends: by the audit of the installed framework, or as it was recorded.


@dataclass(frozen=True)
class Finding:
    """What one KL of a run descends.

    Attributes:
        part: the KL.
        verdict, verdict_off_policy: on fresh and on stale samples; empty if these settings were never audited.
        holds: `always` if the first holds in batches of every size, or `large-batches`; None for `unknown`.
        words, words_off_policy: the verdicts in words.
        source: where the verdicts are from.
        advice: what the audit advises; empty for a recorded one.
        notes: the notes of the audit.
    """

    part: Part
    verdict: str
    verdict_off_policy: str
    holds: str | None
    words: str
    words_off_policy: str
    source: str
    advice: str = ""
    notes: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        found = {name: value for name, value in vars(self).items() if name != "part"}
        part = {"place": self.part.place, "loss": self.part.loss, "beta": self.part.coefficient}
        return {**part, "caveat": self.part.caveat, **found}


def find(run: Run) -> list[Finding]:
    """Audit each KL of a run with the installed framework; take the recorded audit where it is not installed.

    Args:
        run: the run, of `read_run`.

    Returns:
        One finding for each of its KLs.
    """
    return [_audited(run, part) or _recorded(run, part) for part in run.parts]


def _audited(run: Run, part: Part) -> Finding | None:
    framework = FRAMEWORKS[run.framework]
    if framework.installed is None:
        return None
    import torch

    from ..audit import audit
    from ..audit.advice import in_words, notes

    torch.set_num_threads(1)  # the tensors are too small for threads to help
    try:
        listed = part.build() if part.build else {x.name: x for x in framework.subjects()}.get(part.loss)
    except (NotAuditableError, ImportError):
        return None
    if listed is None:
        return None
    r = audit(listed)
    source = f"audited here with {framework.name} {framework.installed}"
    words = in_words(r), in_words(r, on_policy=False)
    return Finding(part, r.verdict, r.verdict_off_policy, r.holds, *words, source, str(r.advice), "; ".join(notes(r)))


def _recorded(run: Run, part: Part) -> Finding:
    known = recorded(run.framework)
    if known is None or part.loss not in known.verdicts:
        # Without `build` the framework's list has all that can be audited, installed or not.
        remedy = f"install {run.framework} to audit these settings" if part.build else "no audit has these settings"
        return Finding(part, "", "", None, "", "", f"not audited: {remedy}")
    words = next(row for row in known.rows if row[0] == part.loss)
    source = f"recorded on {known.date} with {known.framework} {known.version}"
    return Finding(part, *known.verdicts[part.loss], words[1], words[2], source, notes=words[-1])

"""Read a shell script that starts a run, without running it: its commands, with the script's variables in their places.

What cannot be known without a shell (`$(date)`, a variable of the environment, one that a branch changes) stays as it
is written, with its `$`, so that a reader can tell.
"""

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RunFileError
from .run_settings import Reading

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
        return list(_ShellScript({}).run(text))
    except (ValueError, IndexError, RecursionError) as error:
        reason = str(error) or "it cannot be read"
        raise RunFileError("a shell script", f"{path}: {reason}", "close its quotes, or give a YAML file") from error


class _ShellScript:
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
        yield from _ShellScript(dict(self.variables), self.depth + 1, in_function).run(text)

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


# The settings of a command that starts a program of Python.

OVERRIDE = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
"""`name=value` as Hydra takes it, perhaps with + before it; `~name` removes a setting."""

SHORT = {"-cn": "config_name", "-cp": "config_path", "-cd": "config_dir"}
"""Hydra's short flags."""

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start another one."""

OTHER_COMMANDS = (
    "echo", "printf", "cat", "cp", "mv", "rm", "ls", "cd", "mkdir", "chmod", "sed", "grep", "git", "pip", "curl",
)  # fmt: skip
"""Commands whose words may be those of a run, and start none."""


def settings_of(words: list[Word]) -> Reading | None:
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
    return Reading(settings, program=program, environment=environment, unread=tuple(unread))


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

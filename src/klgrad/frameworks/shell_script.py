"""Read a shell script that starts a run, without running it: its commands, with the script's variables in their places.

What cannot be known without a shell (`$(date)`, a variable of the environment, one that a branch or `source` may
change) stays as it is written, with its `$`, so that a reader can tell.
"""

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ..errors import RunFileError
from .run_settings import Reading

NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
BRACED = re.compile(rf"({NAME}|\d+)(?:\[([@*]|\d+)\])?(?:(:?[-=+])(.*))?", re.DOTALL)
"""The inside of `${...}`: a name, an index, and a default or a replacement."""

BLANK = re.compile(r"(?:[ \t]|\\\n|#[^\n]*)+")
BLANK_LINES = re.compile(r"(?:[ \t\n]|\\\n|#[^\n]*)+")
REDIRECTION = re.compile(r"(?>\d*(?:&>>?|>>|>&|>\||<&|<<<|<>|>|<))(?!\()[ \t]*")
HEREDOC = re.compile(r"\d*<<(?!<)(-?)[ \t]*(['\"]?)([\w.-]+)\2")
OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;|&()\n]")
PLAIN = re.compile(r"[^ \t\n;|&()<>\\'\"$`]+")
QUOTED = re.compile(r"[^\"\\$`]+")
EXPANSION = re.compile(rf"\$(?:{NAME}|[@*#?$!\-0-9])|`[^`]*`")
INSIDE, INSIDE_BRACES = re.compile(r"\\.|'[^']*'|['()]", re.DOTALL), re.compile(r"\\.|[{}]", re.DOTALL)
"""Brackets, and what hides them."""

DECLARATIONS = ("export", "local", "declare", "typeset", "readonly")
LOOPS = ("for", "while", "until", "function")
"""Keywords of bodies that run at another time, or often."""

ASSIGNING = ("read", "unset", "mapfile", "readarray", "getopts", "let", "printf")
"""Commands that may change the variables that they name."""

ANYTHING = "*"
"""Stands for every variable that is not assigned, once a command may have changed them all."""

SHELLS = ("bash", "sh", "zsh")
PERHAPS = "?"
"""No variable has this name."""

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
        environment: variables whose defaults are in it, as `BETA` in `${BETA:-0.04}`, and those that the script changes
            in a way that is not followed; `PERHAPS` for a word that a branch adds to an array.
    """

    environment: tuple[str, ...]

    def __new__(cls, text: object, environment: tuple[str, ...] = ()) -> "Word":
        """The text, with these variables."""
        word = super().__new__(cls, text)
        word.environment = environment
        return word


Variables = dict[str, list[Word] | None]
"""The words of each variable: one, or those of an array; None if they are unknown."""


def _join(words: list[Word], between: str = " ") -> Word:
    return Word(between.join(words), tuple(name for word in words for name in word.environment))


# The words and the operators of a script.


class _Piece(NamedTuple):
    text: str
    quoted: bool = False
    expanded: bool = False  # whether it is to be replaced by a value


class _RawWord:
    """A word before its variables are replaced; `array` has the elements of `NAME=(...)`."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.array: list[_RawWord] | None = None

    def add(self, piece: _Piece) -> None:
        last = self.pieces[-1] if self.pieces else None
        if last and not piece.expanded and last[1:] == piece[1:]:
            self.pieces[-1] = last._replace(text=last.text + piece.text)
        else:
            self.pieces.append(piece)

    @property
    def plain(self) -> str:
        """The text without the parts that are quoted or expanded."""
        return "".join(piece.text for piece in self.pieces if not any(piece[1:]))

    @property
    def is_plain(self) -> bool:
        return self.array is None and not any(any(piece[1:]) for piece in self.pieces)

    @property
    def assignment(self) -> re.Match[str] | None:
        """The match of `NAME=` at its beginning."""
        return ASSIGNMENT.match(self.pieces[0].text) if self.pieces and not any(self.pieces[0][1:]) else None


class _Lexer:
    """Reads a text from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text.replace("\r\n", "\n"), 0

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What matches here, and go on after it."""
        match = pattern.match(self.text, self.place)
        self.place = match.end() if match else self.place
        return match

    def tokens(self) -> Iterator[_RawWord | str]:
        """Words, and operators as texts, without comments, redirections and documents in the script."""
        documents: list[str] = []
        while self.place < len(self.text):
            if self.take(BLANK):
                continue
            if match := self.take(HEREDOC):
                indent = r"\t*" if match[1] else ""
                documents.append(f"^{indent}{re.escape(match[3])}$")
            elif self.take(REDIRECTION):
                if self.place < len(self.text) and not OPERATOR.match(self.text, self.place):
                    self.word()
            elif self.text.startswith("((", self.place):
                begin = self.place
                self.skip("))")
                arithmetic = _RawWord()
                arithmetic.add(_Piece(self.text[begin : self.place]))
                yield arithmetic
            elif match := self.take(OPERATOR):
                yield match[0]
                for document in documents if match[0] == "\n" else ():
                    end = re.compile(document, re.MULTILINE).search(self.text, self.place)
                    self.place = min(end.end() + 1, len(self.text)) if end else len(self.text)
                documents = [] if match[0] == "\n" else documents
            else:
                yield self.word()

    def skip(self, ending: str) -> None:
        """Go on after the next such text, or to the end."""
        end = self.text.find(ending, self.place)
        self.place = len(self.text) if end < 0 else end + len(ending)

    def word(self) -> _RawWord:
        """The word that begins here."""
        word = _RawWord()
        while self.place < len(self.text):
            c, following = self.text[self.place], self.text[self.place + 1 : self.place + 2]
            if match := self.take(PLAIN):
                word.add(_Piece(match[0]))
            elif c == "(" and len(word.pieces) == 1 and word.is_plain and ASSIGNMENT.fullmatch(word.plain):
                self.place += 1
                word.array = list(self.elements())
                break
            elif c in "<>" and following == "(":  # a process substitution
                word.add(_Piece(f"${c}{self.brackets()}", quoted=True))
            elif c == "\\":
                self.place += 2
                if following != "\n":
                    word.add(_Piece(following, quoted=True))
            elif c == "'" or (c == "$" and following == "'"):
                begin = self.place + len(c + following if c == "$" else c)
                end = self.text.find("'", begin)
                if end < 0:
                    raise ValueError("No closing quotation")
                word.add(_Piece(self.text[begin:end], quoted=True))
                self.place = end + 1
            elif c == '"':
                self.place += 1
                self.quoted(word)
            elif c not in "$`":
                break
            elif text := self.expansion():
                word.add(_Piece(text, expanded=True))
            else:
                word.add(_Piece(c))
                self.place += 1
        return word

    def quoted(self, word: _RawWord) -> None:
        """Add what is between double quotes; "$@" alone adds no empty text, and is no word without arguments."""
        after_expansion = False
        while self.place < len(self.text):
            c, following = self.text[self.place], self.text[self.place + 1 : self.place + 2]
            if c == '"':
                self.place += 1
                if not after_expansion:
                    word.add(_Piece("", quoted=True))
                return
            after_expansion = False
            if match := self.take(QUOTED):
                word.add(_Piece(match[0], quoted=True))
            elif c == "\\" and following and following in '$`"\\\n':
                self.place += 2
                word.add(_Piece(following.strip("\n"), quoted=True))
            elif c != "\\" and (text := self.expansion()):
                word.add(_Piece(text, quoted=True, expanded=True))
                after_expansion = True
            else:
                word.add(_Piece(c, quoted=True))
                self.place += 1
        raise ValueError("No closing quotation")

    def expansion(self) -> str:
        """The expansion that begins here; empty for a single $."""
        if self.text.startswith(("${", "$("), self.place):
            return f"${self.brackets()}"
        if match := self.take(EXPANSION):
            return match[0]
        if self.text[self.place] == "`":
            raise ValueError("No closing quotation")
        return ""

    def brackets(self) -> str:
        """The text in the brackets that open after this character, with them."""
        begin, depth = self.place + 1, 0
        kind = "()" if self.text[begin] == "(" else "{}"
        for match in (INSIDE if kind == "()" else INSIDE_BRACES).finditer(self.text, begin):
            if match[0] == "'":
                break
            depth += (match[0] == kind[0]) - (match[0] == kind[1])
            if depth == 0:
                self.place = match.end()
                return self.text[begin : self.place]
        raise ValueError(f"No closing {kind[1]}")

    def elements(self) -> Iterator[_RawWord]:
        """The elements of an array, up to the bracket that closes it."""
        while self.place < len(self.text):
            c = self.text[self.place]
            if c == ")":
                self.place += 1
                return
            if c in "<>;|&(":
                raise ValueError(f"an array with {c}")
            if not self.take(BLANK_LINES):
                yield self.word()
        raise ValueError("No closing )")


# The commands, with the variables in their places.


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
        raise RunFileError(
            "a shell script, or a file that ends in .yaml, .yml, .json, .toml or .py",
            f"{path}: {reason}",
            "close its quotes, or name the run's configuration",
        ) from error


@dataclass
class _Branch:
    """A part of the script that may not run, or may run often.

    Attributes:
        keyword: what began it.
        outside: the variables before it.
        before: those at its beginning.
        changed: those that a part of it may change, with what it adds to arrays where it does no more.
        function: its name, if it is one.
    """

    keyword: str
    outside: Variables
    before: Variables
    changed: Variables = field(default_factory=dict)
    function: str = ""


class _ShellScript:
    """The variables at one place of a script."""

    def __init__(self, variables: Variables, depth: int = 0, in_function: bool = False) -> None:
        self.variables, self.depth = variables, depth
        self.branches: list[_Branch] = [_Branch("function", {}, {})] * in_function
        self.functions: dict[str, set[str]] = {}
        self.several: set[str] = set()  # the variables that are assigned more than once

    def run(self, text: str) -> Iterator[list[Word]]:
        """The commands of a text."""
        current: list[_RawWord] = []
        before = ""  # the operator before this command
        tokens = [*_Lexer(text).tokens(), "\n"]
        assigned = [token.assignment[1] for token in tokens if isinstance(token, _RawWord) and token.assignment]
        self.several = {name for name in assigned if assigned.count(name) > 1}
        for i, token in enumerate(tokens):
            if isinstance(token, _RawWord):
                current.append(token)
                continue
            if token == "(" and len(current) == 1 and tokens[i + 1] == ")":
                self._enter("function", current[0].plain)
                current = []
                continue
            if token == "\n" and not current and before in ("&&", "||"):  # the list goes on in the next line
                continue
            if token == "(":
                self._enter("(")
            if not (token == ")" and self._innermost("case")):
                yield from self._command(current)
            if token not in ("&&", "|", "|&", "("):
                self._leave("&&")
            if token in ("&&", "||") and not self._innermost("&&"):
                self._enter("&&")
            if token == ")":
                self._leave("(")
            if token.startswith(";;"):
                self._alternative()
            before, current = token, []

    def _innermost(self, keyword: str) -> bool:
        return bool(self.branches) and self.branches[-1].keyword == keyword

    @property
    def _in_function(self) -> bool:
        return any(branch.keyword == "function" for branch in self.branches)

    def _enter(self, keyword: str, function: str = "") -> None:
        outside = dict(self.variables)
        if keyword in LOOPS:  # where another assignment may be the last one
            self.variables |= dict.fromkeys(self.several)
        self.branches.append(_Branch(keyword, outside, dict(self.variables), function=function))

    def _alternative(self) -> None:
        """Another branch begins: the variables are those before the first one."""
        if self.branches:
            self.variables = dict(self.branches[-1].before)

    def _leave(self, *keywords: str) -> None:
        if any(map(self._innermost, keywords)):
            branch = self.branches.pop()
            self.variables = branch.outside.copy()
            for name, added in branch.changed.items():
                before = branch.outside.get(name)
                if added is None or before is None or branch.keyword == "function":
                    self.variables[name] = None
                else:
                    self.variables[name] = [*before, *(Word(x, (PERHAPS,)) for x in added)]
            self.functions[branch.function] = {*branch.changed}

    def _put(self, values: Variables, added: list[Word] | None = None) -> None:
        """Change variables, or add words to one, here and for what comes after the branches that are open."""
        self.variables |= values
        for branch, (name, words) in product(self.branches, values.items()):
            same = words is not None and words == branch.outside.get(name)
            if branch.keyword == "function" or not same:
                before = branch.changed.get(name, [])
                branch.changed[name] = None if added is None or before is None else [*before, *added]

    def _command(self, words: list[_RawWord]) -> Iterator[list[Word]]:
        """Assign variables, follow keywords, and give the words of a command."""
        while words and words[0].is_plain:
            keyword = words[0].plain
            if keyword in ("if", "while", "until", "{"):
                if not (keyword == "{" and self._innermost("function")):  # which has begun already
                    self._enter(keyword)
            elif keyword in ("else", "elif"):
                self._alternative()
            elif keyword in ("fi", "done", "esac", "}"):
                self._leave("if", "while", "until", "for", "case", "{", "function")
            elif keyword in ("for", "select", "case", "function"):
                function = words[1].plain if keyword == "function" and len(words) > 1 else ""
                self._enter("for" if keyword == "select" else keyword, function)
                if keyword in ("for", "select") and len(words) > 1 and words[1].is_plain:
                    self._put({words[1].plain: None})
                return
            elif keyword not in ("then", "do", "!", "time"):
                break
            words = words[1:]
        if not (self._innermost("case") and words and words[0].plain == "in"):
            yield from self._simple(words)

    def _simple(self, raw: list[_RawWord]) -> Iterator[list[Word]]:
        declares = bool(raw) and raw[0].plain in DECLARATIONS
        assigned = [word for word in raw[declares:] if word.assignment]
        if declares or (assigned and len(assigned) == len(raw)):
            for word in assigned:
                self._assign(word)
            return
        while raw and raw[0].assignment:  # for the environment of the command
            raw = raw[1:]
        words = [word for each in raw for word in self._expand(each)]
        if not words:
            return
        self._forget(words)
        yield words
        inner = [" ".join(words[1:])] if words[0] == "eval" else []
        for shell, option, text in zip(words, words[1:], words[2:], strict=False):
            if shell.split("/")[-1] in SHELLS and re.fullmatch(r"-\w*c", option):
                inner.append(text)
        for text in inner if self.depth < DEEPEST else ():
            yield from _ShellScript(dict(self.variables), self.depth + 1, self._in_function).run(text)

    def _forget(self, words: list[Word]) -> None:
        """Make unknown what a command may assign."""
        command, element = words[0], re.match(rf"({NAME})\[[^]]*\]\+?=", words[0])
        if command == "eval" or (command in ("source", ".") and not words[-1].endswith("/activate")):
            self._put(dict.fromkeys((*self.variables, ANYTHING)))
        elif command in ASSIGNING or command.startswith("(("):
            self._put(dict.fromkeys(re.findall(NAME, " ".join(words))))
        elif command == "set" and ("--" in words or (words[1:] and words[1][:1] not in "-+")):
            self._put({"@": None})
        elif element:
            self._put({element[1]: None})
        self._put(dict.fromkeys(self.functions.get(command, ())))

    def _assign(self, raw: _RawWord) -> None:
        match = raw.assignment
        assert match is not None
        name, adds = match.groups()
        words: list[Word] | None
        added = None
        if raw.array is not None:
            words = [word for element in raw.array for word in self._expand(element)]
            added = words if adds else None
        else:  # which is not split into words
            value = _RawWord()
            value.pieces = [piece._replace(quoted=True) for piece in raw.pieces]
            value.pieces[0] = value.pieces[0]._replace(text=value.pieces[0].text[match.end() :])
            words = [_join(self._expand(value))]
        if adds:
            before = self.variables.get(name)
            if before is None:
                words = None
            elif raw.array is not None:
                words = [*before, *words]
            else:
                words = [_join([before[0], words[0]], ""), *before[1:]]
        if words and sum(map(len, words)) > LONGEST:
            words = None
        self._put({name: words}, added if words is not None else None)

    def _expand(self, raw: _RawWord) -> list[Word]:
        """The words of one, with the variables in their places."""
        words: list[Word] = []
        begun = False  # whether the next part belongs to the last word
        for text, quoted, expanded in raw.pieces:
            values = self._value(text) if expanded else [Word(text)]
            if values == [text]:  # plain, or unknown and kept in one piece
                parts = values
            elif quoted and "@" not in text:
                parts = [_join(values)]
            else:
                parts = _split(values, quoted)
            apart = expanded and not quoted and bool(values) and values[0][:1].isspace()
            for k, part in enumerate(parts):
                if begun and k == 0 and not apart:
                    words[-1] = _join([words[-1], part], "")
                else:
                    words.append(part)
                begun = True
        return words

    def _value(self, text: str) -> list[Word]:
        """The value of `$NAME`, `${...}`, `$((...))` or `$(...)`, or the text itself."""
        raw = [Word(text)]
        if text in ("$(pwd)", "`pwd`", "$PWD", "${PWD}"):
            return [Word(Path.cwd())]
        if arithmetic := re.fullmatch(r"\$\(\((.*)\)\)|\$\(expr (.*)\)", text, re.DOTALL):
            number = self._number(arithmetic[1] or arithmetic[2])
            return raw if number is None else [Word(number)]
        if text.startswith(("$(", "`")):
            return raw
        changed = self._in_function or "@" in self.variables  # whether $@ is not the script's own arguments
        if text[1:].lstrip("{")[:1] in ("@", "*"):
            return [Word(text, ("@",))] if changed else raw
        match = BRACED.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if match is None:
            return raw
        name, index, rule, default = match.groups()
        known = name in self.variables
        value = self.variables.get(name, None if ANYTHING in self.variables else [])
        if value is None or (name.isdigit() and changed):
            return [Word(text, (name,))]
        if index not in ("@", "*"):
            value = value[int(index or 0) :][:1]
        if rule is None:
            return value if known else raw
        is_set = known and (value != [""] or ":" not in rule)
        if rule.endswith("+"):
            value = [self._default(default) if is_set else Word("")]
        elif not is_set:
            value = [self._default(default)]
            if rule.endswith("="):
                self._put({name: list(value)})
        outside = () if known and not rule.endswith("=") else (name,)
        return [Word(part, part.environment + outside) for part in value]

    def _default(self, text: str) -> Word:
        tokens = [token for token in _Lexer(text).tokens() if isinstance(token, _RawWord)]
        return _join([word for token in tokens for word in self._expand(token)])

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


def _split(values: list[Word], quoted: bool) -> list[Word]:
    """The words of values; a command in them, whose output is unknown, is kept in one piece."""
    is_whole = lambda value: quoted or "$(" in value or "`" in value
    return [
        Word(part, value.environment) for value in values for part in ([value] if is_whole(value) else value.split())
    ]


# The settings of a command that starts a program of Python.

OVERRIDE = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
"""`name=value` as Hydra takes it, perhaps with + before it; `~name` removes a setting."""

OWN_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*][^}]*\}")
UNSET = re.compile(r"\$\{?[A-Za-z_]\w*(:?[-+][^}]*)?\}?")
"""A variable as a whole word."""

ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")
"""A variable of several words, which is no value of the flag before it."""

LATER_VALUE = re.compile(r"\$(\w+|\{\w+(:-[^}]*)?\})/[^=]*|\$\(seq [^()]*\)")
"""A path below a folder that is not known, or numbers: further values of the flag before it."""

SHORT = {"-cn": "config_name", "-cp": "config_path", "-cd": "config_dir"}
"""Hydra's short flags."""

COMMANDS = ("trl", "klgrad", "swift", "megatron", "axolotl")
"""Commands whose first argument says what they do."""

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start another one."""

OTHER_COMMANDS = (
    "echo", "printf", "cat", "cp", "mv", "rm", "ls", "cd", "mkdir", "chmod", "sed", "grep", "git", "pip", "curl",
)  # fmt: skip
"""Commands whose words may be those of a run, and start none."""


def settings_of(words: list[Word]) -> Reading | None:
    """The settings of a command that starts a program of Python."""
    started = None if words[0] in OTHER_COMMANDS else _program(words)
    if started is None:
        return None
    program, words = started
    is_own = lambda word: OWN_ARGUMENTS.fullmatch(word) and not word.environment
    arguments = [word for word in words if not is_own(word)]
    settings: dict[str, object] = {}
    environment: dict[str, tuple[str, ...]] = {}
    not_literal: dict[str, str] = {}
    unset: list[str] = []
    unread: list[str] = []
    i = 0
    while i < len(arguments):
        word, i = arguments[i], i + 1
        is_flag = word.startswith("--") and len(word) > 2
        if is_flag or word in SHORT:
            name, has_value, value = word[2:].partition("=") if is_flag else (SHORT[word], "", "")
            name, used = name.replace("-", "_"), word.environment
            if not has_value:
                has_one = i < len(arguments) and not arguments[i].startswith("--") and not ARRAY.fullmatch(arguments[i])
                value = arguments[i] if has_one else True
                used += arguments[i].environment if value is not True else ()
                i += value is not True
        elif override := OVERRIDE.fullmatch(word):
            name, value, used = override[1], override[2], word.environment
            if value is None and not word.startswith("~"):
                continue  # a value of the flag before it
            if value and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
                value = value[1:-1]
        elif LATER_VALUE.fullmatch(word):
            continue
        elif word.startswith("$") or ("$" in word.partition("=")[0] and "=" in word):
            (unset if UNSET.fullmatch(word) and not word.environment else unread).append(word)
            continue
        else:
            continue
        if "$" in name:
            unread.append(word)
            continue
        if PERHAPS in used:
            not_literal[name] = f"{value} in a branch that may not run"
            continue
        settings.pop(name, None)
        settings[name] = value
        environment[name] = used
    notes = ("The script's own arguments are not read.",) * (len(arguments) < len(words))
    return Reading(settings, None, not_literal, program, environment, tuple(unset), tuple(unread), notes)


def _program(words: list[Word]) -> tuple[str, list[Word]] | None:
    """The program that a command starts, and its arguments: those before it are the launcher's."""
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if word in ("-m", "--module") and following and following not in LAUNCHERS:
            return following, words[i + 2 :]
        if word.endswith(".py") or word in ("main_ppo", "train_ppo_ray"):
            return word, words[i + 1 :]
        if word.split("/")[-1] in COMMANDS and following and (i == 0 or not words[i - 1].startswith("-")):
            return f"{word.split('/')[-1]} {following}", words[i + 2 :]
    return None

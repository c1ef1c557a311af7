"""Read a shell script that starts a run, without running it: its commands, with the script's variables in their places.

A variable is known if the script gives it one value, outside of branches, loops and functions. What cannot be known
without a shell (`$(date)`, a variable of the environment, one that `source` may set) stays as it is written, with its
`$`, so that a reader can tell.
"""

import ast
import operator
import re
from collections.abc import Iterator, Set
from pathlib import Path

from ..errors import RunFileError
from .run_settings import Reading

NAME = r"[A-Za-z_]\w*"
BLANK = re.compile(r"(?:[ \t]|\\\n|#[^\n]*)+")
BLANK_LINES = re.compile(r"(?:[ \t\n]|\\\n|#[^\n]*)+")
HEREDOC = re.compile(r"\d*<<(?!<)-?[ \t]*(['\"]?)([\w.-]+)\1")
REDIRECTION = re.compile(r"(?>\d*(?:&>>?|>>|>&|>\||<&|<<<|<>|>|<))(?!\()[ \t]*")
OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;|&()\n]")
KEYWORD = re.compile(r"(if|then|elif|else|fi|while|until|do|done|for|select|case|esac|[{}!]|time)(?=[\s;]|$)")
FUNCTION = re.compile(r"(?:function[ \t]+[\w-]+(?:[ \t]*\(\))?|[\w-]+[ \t]*\(\))\s*\{")
ARITHMETIC = re.compile(r"\(\(.*?\)\)", re.DOTALL)
ASSIGNMENT = re.compile(rf"({NAME})(\[[^]]*\])?(\+?)=(\()?")
LOOP_VARIABLE = re.compile(rf"[ \t]+({NAME})")
PLAIN = re.compile(r"[^ \t\n;|&()<>\\'\"$`]+")
SINGLE_QUOTED = re.compile(r"\$?'([^']*)'")
IN_DOUBLE_QUOTES = re.compile(r"[^\"\\$`]+")
EXPANSION = re.compile(rf"\$(?:{NAME}|[@*#?$!\-0-9])|`[^`]*`")
BRACED = re.compile(rf"({NAME}|\d+)(?:\[([@*]|\d+)\])?(?:(:?[-=])(.*))?", re.DOTALL)
"""The inside of `${...}`: a name, an index, and a default."""

INSIDE, INSIDE_BRACES = re.compile(r"\\.|'[^']*'|['()]", re.DOTALL), re.compile(r"\\.|[{}]", re.DOTALL)
"""Brackets, and what hides them."""

OPENS, CLOSES = ("if", "while", "until", "for", "select", "case", "{"), ("fi", "done", "esac", "}")
DECLARATIONS = ("export", "local", "declare", "typeset", "readonly")
ASSIGNING = ("read", "unset", "mapfile", "readarray", "getopts", "let", "printf")
"""Commands that may change the variables that they name."""

SHELLS = ("bash", "sh", "zsh")
PERHAPS = "?"
"""No variable has this name."""

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}


class Word(str):
    """A word of a command.

    Attributes:
        environment: variables whose defaults are in it, as `BETA` in `${BETA:-0.04}`; `PERHAPS` for a word that a
            branch adds to an array.
    """

    environment: tuple[str, ...]

    def __new__(cls, text: object, environment: tuple[str, ...] = ()) -> "Word":
        """The text, with these variables."""
        word = super().__new__(cls, text)
        word.environment = environment
        return word


def _join(words: list[Word], between: str = " ") -> Word:
    return Word(between.join(words), tuple(name for word in words for name in word.environment))


def commands_of(text: str, path: Path) -> list[list[Word]]:
    """The commands of a script.

    Args:
        text: the script.
        path: its file, for errors.

    Returns:
        The words of each command, in the order of the script; those of all branches and functions.
    """
    try:
        script = _Script(text, {})
        list(script.commands())  # which notes the variables that are unsure
        return list(_Script(text, {}, script.unsure).commands())
    except (ValueError, RecursionError) as error:
        reason = str(error) or "it cannot be read"
        raise RunFileError(
            "a shell script, or a file that ends in .yaml, .yml, .json, .toml or .py",
            f"{path}: {reason}",
            "close its quotes, or name the run's configuration",
        ) from error


class _Script:
    """Reads a script from left to right, and puts the words of each variable in its place.

    Attributes:
        variables: the words of each variable that is known here: one, or those of an array.
        unknown: variables that are never known.
        unsure: variables that are assigned again, or in a branch, a loop or a function, or by a command like `read`.
    """

    def __init__(self, text: str, variables: dict[str, list[Word]], unknown: Set[str] = frozenset()) -> None:
        self.text, self.place = text.replace("\r\n", "\n"), 0
        self.variables, self.unknown = variables, unknown
        self.unsure: set[str] = set()
        self.sourced = False  # whether another script may have set any variable
        self.opened: list[str] = []  # the branches and brackets around this place
        self.listed = False  # whether && or || is before this command
        self.ends: list[str] = []  # of documents in the script that begin after this line

    def commands(self) -> Iterator[list[Word]]:
        """The words of each command, without redirections and documents."""
        words: list[Word] = []
        before: dict[str, list[Word]] | None = None  # the variables before `NAME=value` in front of a command
        while self.place <= len(self.text):
            if self.take(BLANK):
                continue
            if match := self.take(HEREDOC):
                self.ends.append(rf"^\s*{re.escape(match[2])}$")
            elif self.take(REDIRECTION):
                self.word()
            elif self.place == len(self.text) or OPERATOR.match(self.text, self.place):
                if not words and self.take(ARITHMETIC):
                    self.unsure |= set(re.findall(NAME, self.text[: self.place].rpartition("((")[2]))
                    continue
                match = self.take(OPERATOR)
                self.place += not match
                yield from self.after(words, match[0] if match else "\n")
                words, before = [], None
            elif not words and self.take(FUNCTION):
                self.opened.append("{")
            elif not words and (match := self.take(KEYWORD)):
                words = self.after_keyword(match[1])
            elif (not words or words[0] in DECLARATIONS) and (match := self.take(ASSIGNMENT)):
                before = before or dict(self.variables)
                self.assign(match)
            else:
                if not words and before is not None:
                    self.variables = before
                words += self.word()

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What matches here, and go on after it."""
        match = pattern.match(self.text, self.place)
        self.place = match.end() if match else self.place
        return match

    def after_keyword(self, keyword: str) -> list[Word]:
        """Enter or leave a branch; the first word of the command if the keyword is one."""
        if keyword in OPENS:
            self.opened.append(keyword)
        elif keyword in CLOSES and self.opened:
            self.opened.pop()
        if keyword in ("for", "select") and (match := self.take(LOOP_VARIABLE)):
            self.unsure.add(match[1])
        return [Word(keyword)] if keyword in ("for", "select", "case") else []

    def after(self, words: list[Word], ended_by: str) -> Iterator[list[Word]]:
        """The command that an operator ends, and those that it runs; without the patterns of `case`."""
        is_pattern = ended_by == ")" and self.opened[-1:] == ["case"]
        if words and not is_pattern and words[0] not in (*DECLARATIONS, "for", "select", "case"):
            yield words
            yield from self.run_by(words)
        if ended_by == "(":
            self.opened.append("(")
        elif ended_by == ")" and self.opened[-1:] == ["("]:
            self.opened.pop()
        if words or ended_by != "\n":
            self.listed = ended_by in ("&&", "||")
        for end in self.ends if ended_by == "\n" else ():
            document = re.compile(end, re.MULTILINE).search(self.text, self.place)
            self.place = min(document.end() + 1, len(self.text)) if document else len(self.text)
        self.ends = [] if ended_by == "\n" else self.ends

    def run_by(self, words: list[Word]) -> Iterator[list[Word]]:
        """The commands that `eval` and `bash -c` run; what a command may assign becomes unknown."""
        command = words[0]
        if command in ASSIGNING:
            self.unsure |= set(re.findall(NAME, " ".join(words)))
        elif command == "set" and ("--" in words or (words[1:] and words[1][:1] not in "-+")):
            self.variables["@"] = []
        inner = [" ".join(words[1:])] if command == "eval" else []
        for shell, option, text in zip(words, words[1:], words[2:], strict=False):
            if shell.split("/")[-1] in SHELLS and re.fullmatch(r"-\w*c", option):
                inner.append(text)
        for text in inner:
            yield from _Script(text, dict(self.variables), self.unknown).commands()
        if command == "eval" or (command in ("source", ".") and not words[-1].endswith("/activate")):
            self.variables, self.sourced = {}, True

    def assign(self, match: re.Match[str]) -> None:
        """Give a variable the value that begins here."""
        name, element, adds, opens = match.groups()
        words = list(self.elements()) if opens else [_join(self.word(is_split=False))]
        before = self.variables.get(name)
        is_again = before is None if adds else before not in (None, words)
        if element or is_again or (self.in_branch and not (opens and adds)):
            self.unsure.add(name)
        elif before is None or not adds:
            self.variables[name] = words
        elif opens:
            unsure = (PERHAPS,) * self.in_branch
            self.variables[name] = [*before, *(Word(x, x.environment + unsure) for x in words)]
        else:
            self.variables[name] = [_join([*before[:1], *words], ""), *before[1:]]

    @property
    def in_branch(self) -> bool:
        """Whether what is here may not run, or may run often."""
        return bool(self.opened) or self.listed

    def elements(self) -> Iterator[Word]:
        """The elements of an array, up to the bracket that closes it."""
        while not self.text.startswith(")", self.place):
            begin = self.place
            if not self.take(BLANK_LINES):
                yield from self.word()
            if begin == self.place:
                raise ValueError("an array without an end")
        self.place += 1

    def word(self, is_split: bool = True) -> list[Word]:
        """The word that begins here, with its variables in their places: none, one or several."""
        words: list[Word] = []
        begin = self.place
        while self.place < len(self.text):
            c, following = self.text[self.place], self.text[self.place + 1 : self.place + 2]
            is_first = self.place == begin
            if match := self.take(PLAIN):
                parts = [Word(match[0])]
            elif c == "\\":
                self.place += 2
                parts = [Word(following)] if following != "\n" else []
            elif match := self.take(SINGLE_QUOTED):
                parts = [Word(match[1])]
            elif c == '"':
                self.place += 1
                parts = self.double_quoted()
            elif c in "<>" and following == "(":  # a process substitution
                parts = [Word(f"${c}{self.brackets()}")]
            elif c in "$`" and (text := self.expansion()):
                parts = self.value(text)
                if is_split and parts != [text]:  # what is unknown stays in one piece
                    parts = [Word(x, part.environment) for part in parts for x in _fields(part)]
            elif c == "$":
                self.place += 1
                parts = [Word(c)]
            elif c in "'`":
                raise ValueError("No closing quotation")
            else:
                break
            words = parts if is_first else _joined(words, parts)
        return words

    def double_quoted(self) -> list[Word]:
        """What is between double quotes; "$@" alone is no word without arguments."""
        words, is_empty = [Word("")], False
        while self.place < len(self.text):
            c, following = self.text[self.place], self.text[self.place + 1 : self.place + 2]
            if c == '"':
                self.place += 1
                return [] if is_empty and words == [""] else words
            if match := self.take(IN_DOUBLE_QUOTES):
                parts = [Word(match[0])]
            elif c == "\\" and following and following in '$`"\\\n':
                self.place += 2
                parts = [Word(following.strip("\n"))]
            elif c in "$`" and (text := self.expansion()):
                parts = self.value(text)
                is_empty = not parts
                parts = parts if "@" in text else [_join(parts)] if parts else []
            else:
                self.place += 1
                parts = [Word(c)]
            words = _joined(words, parts)
        raise ValueError("No closing quotation")

    def expansion(self) -> str:
        """The expansion that begins here; empty for a single $."""
        if self.text.startswith(("${", "$("), self.place):
            return f"${self.brackets()}"
        match = self.take(EXPANSION)
        return match[0] if match else ""

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

    def value(self, text: str) -> list[Word]:
        """The value of `$NAME`, `${...}`, `$((...))` or `$(...)`, or the text itself."""
        raw = [Word(text)]
        if text in ("$(pwd)", "`pwd`", "$PWD", "${PWD}"):
            return [Word(Path.cwd())]
        if arithmetic := re.fullmatch(r"\$\(\((.*)\)\)", text, re.DOTALL):
            number = self.number(arithmetic[1])
            return raw if number is None else [Word(number)]
        changed = "{" in self.opened or "@" in self.variables  # whether $@ is not the script's own arguments
        if text.startswith(("$(", "`")) or text[1:].lstrip("{")[:1] in ("@", "*"):
            return [Word(text, ("@",) * changed)]
        match = BRACED.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if match is None:
            return raw
        name, index, rule, default = match.groups()
        value = self.variables.get(name)
        if name in self.unknown or (value is None and self.sourced) or (name.isdigit() and changed):
            return [Word(text, (name,))]
        if value is not None and index not in ("@", "*"):
            value = value[int(index or 0) :][:1]
        if rule is None:
            return raw if value is None else value
        is_set = value is not None and (value != [""] or ":" not in rule)
        if not is_set:
            value = [self.default(default)]
            if rule.endswith("=") and self.in_branch:
                self.unsure.add(name)
            elif rule.endswith("="):
                self.variables[name] = value
        outside = () if name in self.variables and not rule.endswith("=") else (name,)
        return [Word(part, part.environment + outside) for part in value or []]

    def default(self, text: str) -> Word:
        """The text after `:-`, with variables in it in their places."""
        plain = text.strip("'").replace('"', "")
        return _join(_Script(f'{plain}"', self.variables, self.unknown).double_quoted())

    def number(self, text: str) -> int | None:
        """The value of an arithmetic expression of whole numbers and variables."""
        try:
            return self.evaluate(ast.parse(text.replace("$", "").strip(), mode="eval").body)
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
            return None

    def evaluate(self, node: ast.expr) -> int:
        """The value of a node, if it is arithmetic of whole numbers."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id not in self.unknown:
            return int((self.variables.get(node.id) or [""])[0])
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](self.evaluate(node.left), self.evaluate(node.right))
        raise ValueError("no arithmetic of whole numbers")


def _fields(value: Word) -> list[str]:
    """The words of a value; a command in it, whose output is unknown, is kept in one piece."""
    return [value] if "$(" in value or "`" in value else value.split()


def _joined(words: list[Word], parts: list[Word]) -> list[Word]:
    """Words, the last of which goes on with the first of the parts."""
    if not words or not parts:
        return words or parts
    return [*words[:-1], _join([words[-1], parts[0]], ""), *parts[1:]]


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

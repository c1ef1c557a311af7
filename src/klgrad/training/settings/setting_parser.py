"""TRL's parser, with errors of one line, checks of every value, and settings from files."""

import argparse
from typing import Any, NoReturn

from trl.scripts.utils import TrlParser
from trl.trainer.grpo_config import GRPOConfig

from ...errors import MeaningError, UnknownNameError
from ...trl import KLConfig
from ...trl.field_limits import complaint, has_choices
from ...trl.field_types import settings_of_class
from ..training_errors import SettingError
from .run_config import ALIASES, PolicyConfig, RunConfig


class Parser(TrlParser):
    """TRL's parser, with errors of one line instead of a list of four hundred flags."""

    def __init__(self, command: str) -> None:
        kinds: Any = (RunConfig, KLConfig, PolicyConfig)
        super().__init__(kinds, prog=f"klgrad {command}", allow_abbrev=False)
        self.known = {action.dest for action in self._actions} - {"help"}
        self.pristine = {action.dest: action.default for action in self._actions}
        self.settings = {name: found for kind in kinds for name, found in settings_of_class(kind).items()}

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise SettingError("settings of the right kind", message, f"see {self.prog} --help")

    def checked(self, values: dict[Any, Any], where: str) -> dict[str, Any]:
        """Settings of a file, under their full names and with the declared types; text is read as on a command line."""
        found = {}
        for key, value in values.items():
            if not isinstance(key, str):
                received = f"the key {key!r} in {where}"
                raise SettingError("names of settings", received, f"see {self.prog} --help for the names")
            name = ALIASES.get(key, key)
            if name not in self.known:
                raise UnknownNameError(f"setting in {where}", name, {*self.known, *ALIASES})
            found[name] = self._value(name, value)
            wrong = None if has_choices(name) else self.settings[name].misfit(found[name])
            if wrong is not None:
                expected, received, remedy = wrong
                raise SettingError(expected, f"{received}, in {where}", remedy)
        return found

    def _value(self, name: str, value: Any) -> Any:
        """Convert text, as YAML reads 3e-5 as text, and a single value where a list is declared."""
        action = next(action for action in self._actions if action.dest == name)
        try:
            if isinstance(value, list):
                return [self._get_value(action, x) if isinstance(x, str) else x for x in value]
            value = self._get_value(action, value) if isinstance(value, str) else value
        except argparse.ArgumentError as error:
            self.error(str(error))
        return [value] if action.nargs == "+" and value is not None else value

    def adopt(self, values: dict[str, Any]) -> None:
        """Make these values the defaults."""
        self.set_defaults_with_config(**values)

    def check_values(self, values: dict[str, Any]) -> None:
        """Check types and ranges of all values, from every source, before any of them is used."""
        own = {name for name in KLConfig.__annotations__ if name not in GRPOConfig.__dataclass_fields__}
        for name, value in values.items():
            found = None if value == self.pristine[name] else complaint(self.settings[name], value)
            if found is not None:
                raise (MeaningError if name in own else SettingError)(*found)

    def given_flags(self, arguments: list[str]) -> dict[str, Any]:
        """Values of the command line itself, without defaults."""
        before = {action: action.default for action in self._actions}
        for action in self._actions:
            action.default = argparse.SUPPRESS
        try:
            return vars(self.parse_known_args(arguments)[0])
        finally:
            for action, default in before.items():
                action.default = default

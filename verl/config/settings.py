"""What the user gives, as settings: presets, YAML files and the ``key=value`` words of the command line."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from verl.config.aliases import canonical
from verl.config.keys import free_dicts, holds_text
from verl.config.names import did_you_mean, nearest_path
from verl.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """What settings are read from: a preset, a file, a mapping or the command line."""

    kind: str  # "default" (nothing was read), "preset", "file", "given mapping" or "command line"
    name: str = ""  # the preset's, or the file's path
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Line of each key in the text, counted from 1, by the name as it is written there."""

    def __str__(self) -> str:
        return self.name if self.kind == "file" else f"the {self.kind} {self.name}".rstrip()

    def place(self, spelled: str) -> str:
        """Where one of its settings stands: ``run.yaml:12``, ``the command line``."""
        line = self.lines.get(spelled)
        return f"{self}:{line}" if line else str(self)


COMMAND_LINE = Source("command line")
MAPPING = Source("given mapping")
OPEN = "???"
"""How OmegaConf writes a value that is still to be given."""


@dataclass(frozen=True)
class Setting:
    """One value that the user gave."""

    key: str  # the name under which it is looked up (see :func:`verl.config.aliases.canonical`)
    spelled: str  # the name as the user wrote it
    value: Any  # what the YAML says, references not resolved
    source: Source

    @property
    def place(self) -> str:
        """Where it stands, to be read after a complaint: ``in run.yaml:12``, ``on the command line``."""
        return f"{'on' if self.source == COMMAND_LINE else 'in'} {self.source.place(self.spelled)}"


def flatten(spelled: str, value: Any, source: Source) -> list[Setting]:
    """Settings of a value and everything under it; free mappings and lists stay whole."""
    key = canonical(spelled)
    if isinstance(value, dict) and value and key not in free_dicts():
        inner = (flatten(f"{spelled}.{name}" if spelled else str(name), item, source) for name, item in value.items())
        return [setting for settings in inner for setting in settings]
    return [Setting(key, spelled, value, source)] if spelled else []


def read_file(path: str | Path) -> list[Setting]:
    """Settings of a YAML file, or of the ``config.yaml`` in a run's folder. Raises ConfigError: the file is missing
    (with the nearest there is), unreadable, not YAML, or not a mapping."""
    file = Path(path).expanduser()
    if (file / "config.yaml").is_file():
        file = path = file / "config.yaml"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("the configuration file does not exist", str(path), _existing_file(file)) from None
    except IsADirectoryError:
        fix = "name a YAML file, or the folder of a run"
        raise ConfigError("the configuration cannot be read: the folder holds no config.yaml", str(path), fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file cannot be read: {error}", str(path), "give a YAML file") from error
    return read_text(text, Source("file", str(path)))


def _existing_file(missing: Path) -> str:
    with_ending = [missing.with_name(missing.name + ending) for ending in (".yaml", ".yml")]
    found = next((file for file in with_ending if file.is_file()), None) or nearest_path(missing)
    return f"did you mean {found}?" if found else f"check the path; {missing.parent.absolute()} has no file like it"


def read_text(text: str, source: Source) -> list[Setting]:
    """Settings of YAML text. ``source``: what the text is; its ``lines`` are found here. Raises ConfigError: not YAML,
    or not a mapping of keys to values."""
    import yaml

    fix = "write plain YAML values, without tags"
    tree = _parsed(lambda conf: conf.load(io.StringIO(text)), str(source), None, "correct the file", fix)
    # OmegaConf reads a lone word as a key without a value.
    if not isinstance(tree, dict) or (tree and ":" not in text):
        fix = "write it as  section:\\n  key: value"
        raise ConfigError(f"{source} is not a mapping of keys to values", text.strip()[:60], fix)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return flatten("", tree, replace(source, lines=dict(_lines(yaml.compose(text, loader)))))


def _lines(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The line of every key under a node of YAML, by its dotted name."""
    for name, value in node.value if node is not None and node.id == "mapping" else ():
        key = f"{prefix}{name.value}"
        yield key, name.start_mark.line + 1
        yield from _lines(value, key + ".")


def _parsed(read: Callable[[Any], Any], subject: str, value: str | None, fix_yaml: str, fix_value: str) -> Any:
    """What OmegaConf reads, its references not resolved; None for what is neither a mapping nor a list. Raises
    ConfigError: about ``subject``, whatever YAML or OmegaConf complains about."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(read(OmegaConf), resolve=False)
    except (OSError, AssertionError):
        return None
    except yaml.YAMLError as error:
        raise ConfigError(f"{subject} is not valid YAML: {_yaml_complaint(error)}", value, fix_yaml) from error
    except OmegaConfBaseException as error:
        fix = "refer to another key as ${section.key}; write a literal ${ as \\${"
        raise ConfigError(f"{subject} cannot be read: {str(error).splitlines()[0]}", value, fix) from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        # A value that does not fit its tag (!!int without a number), or is too deep.
        raise ConfigError(f"{subject} cannot be read: {error}", value, fix_value) from error


def _yaml_complaint(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + str(problem or error).splitlines()[0]


def read_overrides(overrides: Sequence[str]) -> list[Setting]:
    """Settings of ``key=value`` words, in order. A key may begin with + or ++. The value is YAML in flow style ([a, b],
    {k: v}, null, 1e-6, "quoted"); for a key that takes text, anything that does not begin with a bracket or quote is
    taken as it stands. Raises ConfigError: there is no =, no key, or the value is not YAML."""
    return [setting for word in overrides for setting in _read_override(word)]


def _read_override(word: str) -> list[Setting]:
    key, equals, text = word.partition("=")
    key, text = key.strip(), text.strip()
    if key.startswith("~"):
        raise ConfigError("keys cannot be deleted by ~", word, "set the key to its default value instead")
    if not equals:
        raise ConfigError("an override needs the form key=value", word, f"for example {word or 'rollout.n'}=...")
    if any("\ud800" <= character <= "\udfff" for character in word):
        raise ConfigError("an override is not valid UTF-8 text", ascii(word), "use UTF-8 in names and values")
    spelled = key.removeprefix("+").removeprefix("+")
    if not spelled or any(not part for part in spelled.split(".")):
        raise ConfigError("an override needs a key before the =", word, "for example rollout.n=8")
    return flatten(spelled, _value(canonical(spelled), text, word), COMMAND_LINE)


def _value(key: str, text: str, word: str) -> Any:
    if holds_text(key) and text and text[0] not in "[{'\"" and text.lower() not in ("null", "~"):
        return text
    fix = "write lists as [a, b], and put quotes around text with special characters"
    tree = _parsed(
        lambda conf: conf.from_dotlist([f"v={text}"]), f"the value of {key}", word, fix, "write a plain YAML value"
    )
    return tree["v"]


_FOLDER = Path(__file__).with_name("presets")


@cache
def presets() -> dict[str, str]:
    """What each preset is, in a line: its file's first comment."""
    files = sorted(_FOLDER.glob("*.yaml"))
    return {file.stem: file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for file in files}


def read_preset(name: str) -> list[Setting]:
    """Settings of a preset. Raises ConfigError: there is none of that name."""
    if name not in presets():
        raise ConfigError("unknown preset", name, f"{did_you_mean(name, presets())}presets: {', '.join(presets())}")
    return read_text((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), Source("preset", name))

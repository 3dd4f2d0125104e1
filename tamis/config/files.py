"""Reading a config file: strict YAML, and for every file that cannot be one, a message that names what to do. No torch.

What the keys mean is in config.py.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

SHIPPED = Path("configs")
EXAMPLE = SHIPPED / "train_showcase.yaml"
SUGGESTED = 3


class ConfigError(ValueError):
    """A configuration the user must change; the message names the key and what it may hold."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The sections of a config file."""
    text = _read_text(Path(path))
    if not text.strip():
        raise ConfigError(f"config file {path} is empty: write at least one section into it, or copy {EXAMPLE}")
    try:
        tree = read_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {_place_and_problem(error)}") from None
    if tree is None:  # comments alone
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config file {path} must hold the sections model, nsa, data, runtime, train with their keys, "
            f"as {EXAMPLE} does"
        )
    return tree


def read_value(text: str) -> Any:
    """One value as a config file would hold it."""
    return yaml.load(text, Loader=_StrictLoader)  # noqa: S506  a SafeLoader that also refuses repeated keys


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"config file {path} does not exist{_files_like(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"config file {path} cannot be read: it is a directory{_files_in(path)}") from None
    except PermissionError:
        raise ConfigError(f"config file {path} cannot be read: no permission; try chmod u+r {path}") from None
    except UnicodeDecodeError:
        what = "a checkpoint, which --resume takes" if path.suffix == ".pt" else "not a text file"
        raise ConfigError(f"config file {path} cannot be read: it is {what}; a config is YAML like {EXAMPLE}") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None


def _files_like(path: Path) -> str:
    """The config files with the most similar names: beside the one that was meant, and among the shipped ones."""
    files = {file.stem: file for folder in (path.parent, SHIPPED) for file in _yaml_files(folder)}
    names = [name for name in files if path.stem and path.stem in name][:SUGGESTED]
    names = names or difflib.get_close_matches(path.stem, files, n=SUGGESTED, cutoff=0.5)
    if names:
        return f"; did you mean {' or '.join(str(files[name]) for name in names)}?"
    if files:
        return f"; there are {', '.join(str(file) for file in files.values())}"
    return f"; there is no {SHIPPED}/ here either: work in the repository's root"


def _files_in(folder: Path) -> str:
    files = _yaml_files(folder)
    return f"; name a file of it: {', '.join(map(str, files))}" if files else f"; name a YAML file like {EXAMPLE}"


def _yaml_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.y*ml") if path.is_file())


def _place_and_problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:  # of the reader: a character that no text has
        return "it holds bytes that are no text; is it another kind of file?"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses repeated keys and reads 2e-4 as a number, as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [repr(key) for place, key in enumerate(keys) if key in keys[:place]]
        if twice:
            problem = f"the key {', '.join(dict.fromkeys(twice))} appears twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)

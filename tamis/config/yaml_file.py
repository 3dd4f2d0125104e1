"""Config files: strict, bounded YAML. Every refusal names the file and what to do. No torch."""

from __future__ import annotations

import difflib
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

SHIPPED = Path("configs")
PACKAGED = Path(__file__).parent / "shipped"  # the same files, in a checkout and in an installed package
EXAMPLE = SHIPPED / "train_showcase.yaml"
SUGGESTED = 3

MOST_BYTES = 256 * 1024
MOST_VALUES = 2000  # keys and values, aliases expanded
MOST_LEVELS = 20


class ConfigError(ValueError):
    """A configuration the user must change; the message names the key and its allowed values."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the sections of a config file."""
    text = _read_text(_located(Path(path)))
    if not text.strip():
        raise ConfigError(f"config file {path} is empty: write at least one section into it, or copy {EXAMPLE}")
    try:
        tree = read_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {_line_and_problem(error)}") from None
    if tree is None:  # comments alone
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config file {path} must hold sections (model, nsa, data, runtime, train, …) with their keys, "
            f"as {EXAMPLE} does"
        )
    return tree


def read_value(text: str) -> Any:
    """Parse one YAML value; a YAMLError if it is malformed or too large."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506  a SafeLoader that also refuses repeated keys
    except ValueError as error:  # a scalar that looks like a number or date and is none
        raise yaml.YAMLError(str(error)) from None


def write_value(value: Any) -> str:
    """Return YAML that `read_value` reads as the same value; the keys of mappings keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def _located(path: Path) -> Path:
    """The file itself, or the packaged one if `configs/NAME.yaml` is not in the working folder."""
    packaged = PACKAGED / path.name
    return packaged if path.parent == SHIPPED and not path.exists() and packaged.is_file() else path


def _read_text(path: Path) -> str:
    try:
        return _bounded_bytes(path).decode()
    except ConfigError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"config file {path} does not exist{_similar_files(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"config file {path} cannot be read: it is a directory{_files_in(path)}") from None
    except PermissionError:
        raise ConfigError(f"config file {path} cannot be read: no permission; try chmod u+r {path}") from None
    except UnicodeDecodeError:
        what = "a checkpoint, which --resume takes" if path.suffix == ".pt" else "not a text file"
        raise ConfigError(f"config file {path} cannot be read: it is {what}; a config is YAML like {EXAMPLE}") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL in the name
        raise ConfigError(f"config file {str(path)!r} cannot exist: a file name holds no NUL character") from None


def _bounded_bytes(path: Path) -> bytes:
    """Read a regular file of bounded size. A FIFO or device could block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError
        if not stat.S_ISREG(kind):
            raise ConfigError(f"config file {path} cannot be read: it is no regular file; write the YAML into a file")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES and b"\0" not in content:
        raise ConfigError(
            f"config file {path} is larger than {MOST_BYTES // 1024} KiB: is it another kind of file? "
            f"A config is YAML like {EXAMPLE}"
        )
    return content


def _similar_files(path: Path) -> str:
    """Suggest the config files with the most similar names, in the same folder and among the shipped ones."""
    files = {file.stem: SHIPPED / file.name for file in _yaml_files(PACKAGED)}
    files |= {file.stem: file for folder in (SHIPPED, path.parent) for file in _yaml_files(folder)}
    names = [name for name in files if path.stem and path.stem in name][:SUGGESTED]
    names = names or difflib.get_close_matches(path.stem, files, n=SUGGESTED, cutoff=0.5)
    if names:
        return f"; did you mean {' or '.join(str(files[name]) for name in names)}?"
    return f"; there are {', '.join(str(file) for file in files.values())}"


def _files_in(folder: Path) -> str:
    files = _yaml_files(folder)
    return f"; name a file of it: {', '.join(map(str, files))}" if files else f"; name a YAML file like {EXAMPLE}"


def _yaml_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.y*ml") if path.is_file())


def _line_and_problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is not None and problem is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    if isinstance(error, yaml.reader.ReaderError):
        return "it holds bytes that are no text; is it another kind of file?"
    return str(error)


class _StrictLoader(yaml.SafeLoader):
    """A bounded SafeLoader that refuses repeated keys and reads 2e-4 as a number, as YAML 1.2 does."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._values: dict[int, int] = {}  # id of a node → values in it, aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node, but refuse documents that would grow too deep or too large."""
        mark = self.peek_event().start_mark
        self._level += 1
        if self._level > MOST_LEVELS:
            raise yaml.composer.ComposerError(None, None, f"nested more than {MOST_LEVELS} levels deep", mark)
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._level -= 1
        if is_alias and id(node) not in self._values:
            raise yaml.composer.ComposerError(None, None, "an alias that holds itself", mark)
        if node is not None and not is_alias:
            self._values[id(node)] = self._count(node, mark)
        return node

    def _count(self, node: yaml.Node, mark: yaml.Mark) -> int:
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        count = 1 + sum(self._values[id(child)] for child in flat)
        if count > MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_VALUES:,} keys and values", mark)
        return count

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [repr(key) for position, key in enumerate(keys) if key in keys[:position]]
        if twice:
            problem = f"the key {', '.join(dict.fromkeys(twice))} appears twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that the loader would read as a number, as the hash 19e976044560."""


for _reader_or_writer in (_StrictLoader, _Dumper):
    _reader_or_writer.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )

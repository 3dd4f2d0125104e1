"""From a YAML file and `section.key=value` overrides to a Config. Errors name the key and its values. No torch."""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tamis.config.combinations import impossible_combinations
from tamis.config.recipes import apply_recipe
from tamis.config.schema import Config, Section
from tamis.config.suggest import did_you_mean, nearest
from tamis.config.vocabulary import VOCABULARY, tokenizer_file, vocabulary_size
from tamis.config.yaml_file import ConfigError, read_value, read_yaml

OTHER_NAMES = {  # what other trainers call our keys
    "block_size": "train.seq_len",
    "context_length": "train.seq_len",
    "dropout": None,
    "dtype": "runtime.precision",
    "gradient_accumulation_steps": "train.accumulate_grad_batches",
    "head_dim": "model.d_k",
    "hidden_size": "model.dim",
    "learning_rate": "train.lr",
    "max_iters": "train.steps",
    "max_seq_len": "train.seq_len",
    "max_steps": "train.steps",
    "max_tokens": "train.tokens",
    "n_embd": "model.dim",
    "n_layer": "model.n_layers",
    "num_layers": "model.n_layers",
    "num_heads": "model.n_heads",
    "num_kv_heads": "model.n_kv_groups",
    "output_dir": "train.out_dir",
    "path": "data.local_path",
    "vocab_size": "data.tokenizer",
    "window": "nsa.w",
    "window_size": "nsa.w",
}
COUNTS_IN_TOKENS = {"steps": "tokens", "accumulate_grad_batches": "batch_tokens"}  # keys of train
KINDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def load_config(path: str | Path | None, overrides: list[str] | None = None, variables: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply overrides; a ConfigError has a line for each problem.

    `variables` are the overrides that variables stand for, which come before the others.
    """
    tree = read_yaml(path) if path is not None else {}
    groups = [list(variables), overrides or []]
    for override in itertools.chain(*groups):
        apply_override(tree, override)
    keys = [[override.partition("=")[0].strip() for override in group] for group in groups]
    given = list(itertools.chain(*keys))
    if "train.recipe" in given:  # a recipe of the command line comes before the keys of the file
        apply_recipe(tree, given)
    _replace_counts_in_tokens(tree, keys)
    try:
        return build_config(tree)
    except ConfigError as error:
        if path is None:
            raise
        lines = str(error).splitlines()
        raise ConfigError(
            "\n".join(line if _names_any(line, given) else f"{line} (in config file {path})" for line in lines)
        ) from None


def _replace_counts_in_tokens(tree: dict[str, Any], groups: list[list[str]]) -> None:
    """Let a count replace a key in tokens of a file, recipe or earlier group of keys; otherwise tokens win.

    One group may not set both.
    """
    train = tree.get("train")
    if not isinstance(train, dict):
        return

    def given_last(key: str) -> int:
        return max((index for index, group in enumerate(groups) if f"train.{key}" in group), default=-1)

    for count, tokens in COUNTS_IN_TOKENS.items():
        if train.get(count) is None or given_last(count) < max(0, given_last(tokens)):
            continue
        if given_last(count) > given_last(tokens):
            train[tokens] = None
        elif train[tokens] is not None:
            raise ConfigError(f"train.{count} and train.{tokens} set the same, and only one counts: give one of them")


def build_config(tree: dict[str, Any]) -> Config:
    """Validate a tree of sections, with its recipe applied; one ConfigError has a line for each problem."""
    apply_recipe(tree)
    problems, wrong = _unknown(tree), dict[str, str]()
    try:
        config = Config.model_validate(_known(tree))
    except ValidationError as error:
        for (
            one
        ) in error.errors():  # a key that takes text or a list has an error for each; the one of a value tells more
            dotted = ".".join(map(str, one["loc"][:2]))
            wrong[dotted] = _explain(one) if dotted not in wrong or one["type"] == "value_error" else wrong[dotted]
        config = Config.model_validate(_known(tree, without=wrong))  # for the combinations of the other keys
    problems += wrong.values()
    problems += [line for line in impossible_combinations(config) if not _names_any(line, wrong)]
    if problems:
        raise ConfigError("\n".join(problems))
    return _with_vocabulary(config)


def _with_vocabulary(config: Config) -> Config:
    """Fill in the vocabulary of a tokenizer file. A stored configuration holds it and needs the file no more."""
    data = config.data
    if data.tokenizer in VOCABULARY or data.vocab_size is not None:
        return config
    size = vocabulary_size(tokenizer_file(data.tokenizer))
    return config.model_copy(update={"data": data.model_copy(update={"vocab_size": size})})


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in a tree that was read from YAML."""
    dotted, equals, text = override.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not (equals and dot and section and key):
        guess = guess_key(dotted.strip()) if not dot else None
        hint = f"; did you mean {guess}={text or 'VALUE'}?" if guess else ", for example train.steps=100"
        raise ConfigError(f"override {shown(override)} must look like section.key=value{hint}")
    try:
        value = read_value(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {shown(override)}: the value is not valid YAML") from None
    if not isinstance(tree.setdefault(section, {}), dict):
        raise ConfigError(f"{section} must be a section with keys")
    tree[section][key] = value


def known_keys() -> list[str]:
    """Every key as `section.key`."""
    return [f"{name}.{key}" for name, section in sections().items() for key in section.model_fields]


def sections() -> dict[str, type[Section]]:
    return {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]


def guess_key(wrong: str, section: str = "") -> str | None:
    """The key that was probably meant, as `section.key`: its exact name, another trainer's name, or a similar one."""
    everywhere = {dotted.partition(".")[2]: dotted for dotted in known_keys()}
    own = {key: dotted for key, dotted in everywhere.items() if dotted.startswith(f"{section}.")}
    if wrong in everywhere:
        return everywhere[wrong]
    if wrong in OTHER_NAMES:
        return OTHER_NAMES[wrong]
    key = nearest(wrong, own) or nearest(wrong, everywhere)
    return everywhere[key] if key else None


def allowed_values(field: FieldInfo) -> str:
    """What a key may hold, in words: kind, choices and range."""
    options = get_args(field.annotation) or (field.annotation,)
    words = [word for option in options for word in (option, *get_args(option)) if isinstance(word, str)]
    if words:
        more = ", or a list of them" if any(get_origin(option) is list for option in options) else ""
        return f"one of {', '.join(words)}{more}"
    if get_origin(field.annotation) is list:
        return "a list of integers" if int in options else "a list of words"
    base, limits = options[0], list(field.metadata)
    if get_origin(base) is dict:
        return "a mapping of names to numbers above 0, or null"
    if get_args(base):  # Annotated[int, …] | None
        base, limits = get_args(base)[0], [*limits, *get_args(base)[1:]]
    more = ", or a list of them" if any(get_origin(option) is list for option in options) else ""
    null = " or null" if type(None) in options else ""
    return f"{KINDS[base]}{_range(limits)}{more}{null}"


def _range(limits: Iterable[Any]) -> str:
    """The bounds of a number in words, as " from 1 to 8" or " above 0, at most 1"."""
    bounds: dict[str, Any] = {}
    for limit in limits:
        for part in getattr(limit, "metadata", [limit]):
            bounds |= {name: getattr(part, name) for name in ("ge", "gt", "le", "lt") if hasattr(part, name)}
    if {"ge", "le"} <= bounds.keys():
        return f" from {_number(bounds['ge'])} to {_number(bounds['le'])}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [f"{word} {_number(bounds[name])}" for name, word in words.items() if name in bounds]
    return f" {', '.join(found)}" if found else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def shown(value: Any) -> str:
    """A value for an error message, shortened."""
    if value is None:
        return "empty (null)"
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def _unknown(tree: dict[str, Any]) -> list[str]:
    """A sentence for each section and key that no field reads."""
    known, problems = sections(), []
    for name, content in tree.items():
        if name not in known:
            hint = did_you_mean(nearest(str(name), known))
            problems.append(f"unknown section {shown(name)}{hint}; known: {', '.join(known)}")
        elif not isinstance(content, dict):
            problems.append(f"{name} must be a section with keys, got {shown(content)}")
        else:
            fields = known[name].model_fields
            for key in [key for key in content if key not in fields]:
                word = _key_word(key)
                hint = did_you_mean(guess_key(word, name)) or f"; known: {', '.join(fields)}"
                problems.append(f"unknown key {name}.{word}{hint}")
    return problems


def _key_word(key: Any) -> str:
    return key if isinstance(key, str) and key.isprintable() and len(key) < 100 else shown(key)


def _known(tree: dict[str, Any], without: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """The part of a tree that has fields, less the keys named as section.key."""
    return {
        name: {k: v for k, v in tree[name].items() if k in section.model_fields and f"{name}.{k}" not in without}
        for name, section in sections().items()
        if isinstance(tree.get(name), dict)
    }


def _names_any(sentence: str, keys: Iterable[str]) -> bool:
    return any(re.search(rf"{re.escape(key)}\b", sentence) for key in keys)


def _explain(error: Any) -> str:
    """One validation error as a sentence: the key, what was given, what it may hold."""
    section, key = map(str, error["loc"][:2])
    field = sections()[section].model_fields[key]
    given, message = shown(error["input"]) if field.repr else "not shown here", str(error["msg"])
    allowed = allowed_values(field)
    if allowed.startswith("one of "):
        choices = allowed.removeprefix("one of ")
        return f"{section}.{key} is {given}, which is none of its values (allowed: {choices})"
    if error["type"] == "value_error":
        return f"{section}.{key} is {given}: {message.removeprefix('Value error, ')}"
    return f"{section}.{key} is {given}: input should be {allowed}"

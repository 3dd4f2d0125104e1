"""Seeded odd configurations: files and overrides that a person, a tool or an attacker might write."""

import json
import math
import random
from pathlib import Path

from tamis.config import Config, ConfigError, known_keys, load_config
from tamis.config.size import flops_per_token, least_memory_bytes, parameter_count

VALUES = [
    "0", "-1", "1", "3", "7", "1e3", "1e-9", "1e400", "-0.0", "0.5", ".nan", ".inf", "-.inf", "0x1F", "0o17", "1_000",
    "1" + "0" * 30, "9" * 5000, "0x" + "f" * 5000, "true", "no", "null", "~", "''", "text", "'12'", "[]", "[1, 2]",
    "{}", "{a: 1}", "[[[[[[]]]]]]", "2001-01-01", "2001-99-99", "!!binary aGk=", "!!int x", "!!python/none", "&a 1",
    "*a", "bf16", "dense", "shards", "../../etc", "-rf", "~root", '"a\\nb"', '"\\x1b[2J"', '"\\0"', "x" * 3000, "é𝄞",
    "1:30", "12:30:45.5", "<<", "=", "|", "? a", "\t", "#", "@x", "%x", "2**64", "18446744073709551616",
]  # fmt: skip
NOISE = ["\0", "\xff", "\t", "[", "]", "{", "}", ":", "\n", "&a ", "*a ", "- ", "? ", "!!x ", "\u2028", "'", '"', "|\n"]


def failures_of(seed: int, folder: Path) -> list[str]:
    """Load one odd configuration; return what was wrong with the answer."""
    rng = random.Random(seed)
    make = [_single_key, _single_key, _several_keys, _odd_tree, _damaged_text, _bytes][seed % 6]
    path, overrides, key = make(rng, folder / f"{seed}.yaml")
    name = f"case {seed} ({make.__name__}, {str(overrides)[:80]})"
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        return [f"{name}: {problem}" for problem in _faults_of_message(str(error), path, key)]
    except BaseException as error:
        return [f"{name}: {type(error).__name__}: {error}"[:300]]
    return [f"{name}: {problem}" for problem in _faults_of(config)]


def _single_key(rng: random.Random, path: Path) -> tuple[Path | None, list[str], str | None]:
    key = rng.choice(known_keys())
    return None, [f"{key}={rng.choice(VALUES)}"], key


def _several_keys(rng: random.Random, path: Path) -> tuple[Path | None, list[str], str | None]:
    return None, [f"{rng.choice(known_keys())}={rng.choice(VALUES)}" for _ in range(rng.randint(2, 8))], None


def _odd_tree(rng: random.Random, path: Path) -> tuple[Path | None, list[str], str | None]:
    def value(depth: int) -> object:
        if depth and rng.random() < 0.5:
            size = rng.randint(0, 4)
            return [value(depth - 1) for _ in range(size)] if rng.random() < 0.5 else tree(depth - 1, size)
        return rng.choice([None, True, -1, 10**30, 1e300, "x", "a\nb", [], {}])

    def tree(depth: int, size: int) -> dict[str, object]:
        words = ["train", "model", "data", "steps", "lr", "x", "", "\x1b", *known_keys()]
        return {rng.choice(words): value(depth) for _ in range(size)}

    path.write_text(json.dumps(tree(rng.randint(1, 30), rng.randint(1, 6))), encoding="utf-8")
    return path, [], None


def _damaged_text(rng: random.Random, path: Path) -> tuple[Path | None, list[str], str | None]:
    text = list(Config().to_yaml())
    for _ in range(rng.randint(1, 12)):
        place = rng.randrange(len(text))
        text[place : place + rng.randint(0, 30)] = rng.choice([*NOISE, *VALUES]) * rng.choice([1, 1, 2, 2000])
    path.write_text("".join(text), encoding="utf-8", errors="replace")
    return path, [], None


def _bytes(rng: random.Random, path: Path) -> tuple[Path | None, list[str], str | None]:
    unit = rng.choice(
        [rng.randbytes(50), b"a: {", b"[", b"a: &a [*a]\n", b"- &x [*x, *x]\n", b"\n", b"#" * 90, b"k: v\n"]
    )
    path.write_bytes(unit * rng.choice([1, 10, 10_000]))
    return path, [], None


def _faults_of_message(message: str, path: Path | None, key: str | None) -> list[str]:
    lines, faults = message.splitlines(), []
    if not all(line.isprintable() and 10 < len(line) < 2000 for line in lines):
        faults.append(f"the message is not plain text: {message[:200]!r}")
    if path is not None and not all(str(path) in line for line in lines):
        faults.append(f"a line does not name the file: {message[:300]!r}")
    if key is not None and (len(lines) != 1 or key not in lines[0]):
        faults.append(f"the message is not one line with {key}: {message[:300]!r}")
    return faults


def _faults_of(config: Config) -> list[str]:
    figures = [parameter_count(config), flops_per_token(config), least_memory_bytes(config)]
    if not all(math.isfinite(figure) and figure > 0 for figure in figures):
        return [f"sizes are not finite: {figures}"]
    if "\n" in config.train.out_dir or config.train.out_dir[:1] in ("-", "~", ""):
        return [f"out_dir {config.train.out_dir!r} was accepted"]
    return []

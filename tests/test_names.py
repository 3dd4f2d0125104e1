"""One word per idea and one idea per word: names are unique across modules, and files and functions stay short."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT

PACKAGE = ROOT / "tamis"
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
KERNELS = ("tamis/attention/kernels/",)  # a kernel and its launch are one function each, as Triton compiles them
SAME_INTERFACE = {  # name: the interface that its modules share
    "main": "the entry of a program",
    "nsa_attention": "the public function, its specification",
    "select_blocks": "the public function, its specification and its torch operation",
    "forward": "a branch of attention",
    "backward": "a branch of attention",
}
CLEAR_PAIRS = {  # (shorter, longer): why the two are not confused
    ("cache", "cache_writes"): "the kernels that write the caches",
    ("check", "checksums"): "two different words",
    ("keys", "keys_on_hopper"): "the same kernel for Hopper",
    ("pairs", "pairs_on_hopper"): "the same kernel for Hopper",
    ("queries", "queries_on_hopper"): "the same kernel for Hopper",
    ("union", "union_on_hopper"): "the same kernel for Hopper",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def public_names(path: Path) -> Iterator[str]:
    """Yield the classes and public functions of a module, without verbs: each has the name of the function it runs."""
    is_cli = path.parent.name == "cli"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        is_verb = is_cli and isinstance(node, FUNCTIONS) and node.decorator_list
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_") and not is_verb:
            yield node.name


def test_no_two_classes_or_public_functions_share_a_name() -> None:
    modules = defaultdict(list)
    for path in sources("tamis"):
        for name in public_names(path):
            modules[name].append(name_of(path))
    shared = {name: paths for name, paths in modules.items() if len(paths) > 1 and name not in SAME_INTERFACE}
    assert shared == {}


def test_no_module_name_is_the_beginning_of_another() -> None:
    """`halt` and `halting`, or `watch` and `watcher`, cannot be remembered apart."""
    found = []
    for package in sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()):
        stems = sorted({path.stem for path in sources(f"tamis/{package}") if not path.stem.startswith("__")})
        pairs = itertools.combinations(stems, 2)
        found += [(a, b) for a, b in pairs if b.startswith(a) and (a, b) not in CLEAR_PAIRS]
    assert found == []


@pytest.mark.parametrize("folder", ["tamis", "tests", "scripts"])
def test_files_and_functions_stay_short(folder: str) -> None:
    long = []
    for path in sources(folder):
        text, name = path.read_text(encoding="utf-8"), name_of(path)
        if (lines := text.count("\n")) > LONGEST_FILE:
            long.append(f"{name}: {lines} lines")
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, FUNCTIONS)]
        for node in [] if name.startswith(KERNELS) else functions:
            if (lines := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
                long.append(f"{name}: {node.name}: {lines} lines")
    assert long == []

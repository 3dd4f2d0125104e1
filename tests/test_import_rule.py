"""The import rule of the house: rooms import downward only, and whatever supervises or reads data never loads torch."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tamis"
# They put the rooms together, and no room uses them.
ABOVE = ["job", *sorted(path.stem for path in PACKAGE.glob("cli*.py"))]
ROOT = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__", *ABOVE))
MAY_IMPORT = {  # room: the rooms and root modules it may use besides itself
    "attention": set(),
    "model": {"attention", *ROOT},
    "data": {*ROOT},
    "run": {*ROOT},
    "train": {"attention", "model", "data", "run", *ROOT},
    "generate": {"attention", "model", "data", "run", "train", *ROOT},
    "bench": {"attention", "model", "data", "run", "train", "generate", *ROOT},
}
# What a trainer writes into its run directory and answers to there; judging and watching are not its business.
RUN_AS_TRAIN_SEES_IT = {
    "checkpoints",
    "directory",
    "environment",
    "exit_codes",
    "halt",
    "hardware",
    "heartbeat",
    "live",
    "lock",
    "records",
    "signals",
    "stackdump",
    "timeline",
}
WITHOUT_TORCH = ["run", "data", *ROOT]


def sources(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py")) if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all a file imports, also inside functions, but not what only a type checker reads."""
    nodes = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            nodes.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        nodes.extend(ast.iter_child_nodes(node))


def house_imports(room: str) -> Iterator[tuple[Path, list[str]]]:
    """Each import of our own modules in a room, as (file, parts after `tamis`)."""
    for path in sources(room):
        for name in imported(path):
            package, *rest = name.split(".")
            if package == "tamis" and rest:
                yield path, rest


def test_every_room_has_a_rule() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms <= set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_downward_only(room: str) -> None:
    allowed = {room, "__version__", *MAY_IMPORT[room]}
    assert [
        f"{path.name}: tamis.{'.'.join(rest)}" for path, rest in house_imports(room) if rest[0] not in allowed
    ] == []


@pytest.mark.parametrize("module", ROOT)
def test_root_modules_import_no_room(module: str) -> None:
    upward = [rest for _, rest in house_imports(module) if rest[0] in (*MAY_IMPORT, *ABOVE)]
    assert upward == []


def test_train_uses_of_run_the_file_formats_alone() -> None:
    used = {rest[1] for _, rest in house_imports("train") if rest[0] == "run" and len(rest) > 1}
    assert used <= RUN_AS_TRAIN_SEES_IT


def test_generate_uses_of_train_the_reading_of_checkpoints_alone() -> None:
    used = {rest[1] for _, rest in house_imports("generate") if rest[0] == "train" and len(rest) > 1}
    assert used <= {"checkpoint"}


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_no_torch_is_named_where_none_may_be(room: str) -> None:
    torches = ("torch", "triton")
    assert [path.name for path in sources(room) for name in imported(path) if name.split(".")[0] in torches] == []


def test_importing_supervision_data_and_command_line_loads_no_torch() -> None:
    modules = [module_name(path) for room in [*WITHOUT_TORCH, *ABOVE] for path in sources(room) if path.exists()]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    if 'torch' in sys.modules: sys.exit(f'{name} loads torch')\n"
    modules = [name for name in modules if not name.endswith("__main__")]
    result = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, env=os.environ)
    assert result.returncode == 0, result.stderr

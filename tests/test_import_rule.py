"""The import rule: each package imports only the packages below it, and supervision, data and config never load torch.

`train` may import `run.files` and `run.worker`, nothing else of `run`.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.forking_trainer import tiny_real_config
from tests.faults.launched import as_operators_do

PACKAGE = Path(__file__).parents[1] / "tamis"
RUN_FOR_WORKERS = {"run.files", "run.worker"}
MAY_IMPORT = {  # package: the packages it may import besides itself
    "config": set(),
    "attention": set(),
    "model": {"attention", "config"},
    "data": {"config"},
    "run": {"config", "data"},
    "remote": {"run.files"},
    "checkpoint": {"config", *RUN_FOR_WORKERS},
    "train": {"attention", "model", "config", "data", "checkpoint", *RUN_FOR_WORKERS},
    "generate": {"attention", "model", "config", "data", "checkpoint", *RUN_FOR_WORKERS},
    "evaluate": {"model", "config", "data", "generate", *RUN_FOR_WORKERS},
    "serve": {"attention", "model", "data", "generate", *RUN_FOR_WORKERS},
    "bench": {"attention", "model", "config", "data", "generate", "train", *RUN_FOR_WORKERS},
    "cli": {
        *(
            "attention",
            "model",
            "config",
            "data",
            "checkpoint",
            "run",
            "remote",
            "train",
            "generate",
            "evaluate",
            "serve",
        ),
        "bench",
    },
}
WITHOUT_TORCH = ["config", "data", "run", "remote", "cli"]


def sources(package: str) -> list[Path]:
    return sorted((PACKAGE / package).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted name of each import, also inside functions, except under TYPE_CHECKING."""
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


def own_imports(package: str) -> Iterator[tuple[Path, str]]:
    """Yield each import of a Tamis module in a package, as (file, name after `tamis.`)."""
    for path in sources(package):
        for name in imported(path):
            root, _, rest = name.partition(".")
            if root == "tamis" and rest:
                yield path, rest


def is_within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def test_every_package_has_a_rule() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(MAY_IMPORT)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_downward_only(package: str) -> None:
    allowed = {package, "__version__", *MAY_IMPORT[package]}
    wrong = [f"{path.name}: tamis.{name}" for path, name in own_imports(package) if not is_within(name, allowed)]
    # A child process or a lazy import of the command line may name what its package may not load.
    assert wrong == []


@pytest.mark.parametrize("package", ["run.files", "run.worker"])
def test_what_workers_import_of_run_imports_nothing_else_of_run(package: str) -> None:
    allowed = {"config", *RUN_FOR_WORKERS}
    folder = package.replace(".", "/")
    assert [f"{path.name}: {name}" for path, name in own_imports(folder) if not is_within(name, allowed)] == []


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_no_torch_is_named_where_none_may_be(package: str) -> None:
    torches = ("torch", "triton")
    assert [path.name for path in sources(package) for name in imported(path) if name.split(".")[0] in torches] == []


def test_importing_supervision_data_and_command_line_loads_no_torch() -> None:
    modules = [module_name(path) for package in WITHOUT_TORCH for path in sources(package)]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    if 'torch' in sys.modules: sys.exit(f'{name} loads torch')\n"
    result = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_training_and_generation_on_a_cpu_do_not_load_the_compiler(tmp_path: Path) -> None:
    """It takes 1.6 s, wanted or not."""
    (tmp_path / "config.yaml").write_text(tiny_real_config(tmp_path / "out", steps=2, eval_every=0).to_yaml())
    code = "import sys, tamis.train.main, tamis.generate.sample\n"
    code += "assert tamis.train.main.main(['--config', sys.argv[1]]) == 0\n"
    code += "sys.exit('torch._dynamo' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path / "config.yaml")]
    assert subprocess.run(command, env=as_operators_do()).returncode == 0


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=str)
def test_no_folder_holds_more_than_fifteen_modules(folder: Path) -> None:
    modules = sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")
    assert len(modules) <= 15, modules

"""The commands and code of the README work, and every file, link and verb that a page names exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tamis.cli.main import app
from tamis.config import load_config
from tests.checkout import ROOT, Checkout, make_checkout, stamp
from tests.test_runbooks import command

README = (ROOT / "README.md").read_text()
COMMANDS = [line.partition("#")[0].strip() for line in README.split("```bash\n")[1].split("```")[0].splitlines()]


def test_there_are_two_commands_and_the_pilots_test_runs_the_first() -> None:
    assert [command(0, "train_m7c_prime.sh"), "bash scripts/test.sh"] == COMMANDS


@pytest.fixture
def project(tmp_path: Path) -> Checkout:
    """A checkout with one test of its own; mypy reads that test alone, because reading the package is slow."""
    checkout = make_checkout(tmp_path / "project")
    pyproject = checkout.path / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('packages = ["tamis"]', 'files = ["tests"]'))
    stamp(checkout.path)
    (checkout.path / "tests").mkdir()
    write_test(checkout, "2 + 2 == 4")
    return checkout


def write_test(checkout: Checkout, claim: str) -> None:
    text = f'"""One test."""\n\n\ndef test_it() -> None:\n    assert {claim}\n'
    (checkout.path / "tests" / "test_it.py").write_text(text)


def test_the_second_passes_only_when_style_types_and_tests_do(project: Checkout) -> None:
    passed = project.run(f"{COMMANDS[1]} -p no:cacheprovider", TEST_PROCESSES="1")
    assert passed.code == 0, passed
    assert "1 passed" in passed or ". " in passed
    write_test(project, "2 + 2 == 5")
    assert project.run(f"{COMMANDS[1]} -p no:cacheprovider", TEST_PROCESSES="1").code == 1
    write_test(project, "unknown == 5")
    assert "undefined" in (untidy := project.run(COMMANDS[1]).lower())
    assert "test session" not in untidy


def test_ci_runs_the_second() -> None:
    assert COMMANDS[1] in (ROOT / ".ci" / "run").read_text()


def test_the_librarys_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(README.split("```python\n")[1].split("```")[0], names)
    assert names["out"].shape == names["q"].shape
    assert names["out"].isfinite().all()


def test_the_client_of_the_serving_page_asks_for_the_model_that_the_page_serves() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    served = page.split("tamis serve artifacts/")[1].split()[0]
    assert f'model="{load_config(ROOT / "configs" / f"{served}.yaml").model.name}"' in page


def test_the_plots_show_the_figures_of_docs_data(tmp_path: Path) -> None:
    script = ROOT / "docs" / "plot_benchmarks.py"
    runpy.run_path(str(script))["draw"](tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(drawn) == 5
    for name, svg in drawn.items():
        assert svg == (ROOT / "docs" / "images" / name).read_text(), f"run python {script.relative_to(ROOT)}"


def pages() -> list[Path]:
    """Return the README, the other pages of the root, and docs/ without the notebook, whose names are historic."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if "notes" not in path.parts]
    return [*ROOT.glob("*.md"), *docs]


def test_every_link_leads_to_a_file() -> None:
    for page in [*pages(), *(ROOT / "docs" / "notes").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), flags=re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower())) for heading in headings}


def test_every_fragment_of_a_link_is_a_heading() -> None:
    for page in [*pages(), *(ROOT / "docs" / "notes").glob("*.md")]:
        for target, fragment in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text()):
            linked = (page.parent / target).resolve() if target else page
            assert linked.suffix != ".md" or fragment in anchors(linked), f"{page.name}: {target}#{fragment}"


def test_every_source_file_that_a_page_names_exists() -> None:
    runbooks = ROOT / "docs" / "runbooks"  # they also name what is deliberately absent
    for page in [page for page in pages() if page.parent != runbooks]:
        for name in re.findall(r"`((?:tamis|tests|scripts|configs|docs|examples)/[\w./-]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_every_verb_that_a_page_names_exists() -> None:
    verbs = get_command(app).commands
    for page in pages():
        for name in re.findall(r"`tamis ([a-z]+)[ `]", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
            assert name in verbs, f"{page.name}: tamis {name}"

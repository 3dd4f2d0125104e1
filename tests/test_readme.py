"""What the README tells a newcomer to type works, and what it points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from tamis.cli.main import app
from tests.checkout import ROOT, Checkout, make_checkout, stamp
from tests.test_runbooks import command

README = (ROOT / "README.md").read_text()
COMMANDS = [line.partition("#")[0].strip() for line in README.split("```bash\n")[1].split("```")[0].splitlines()]


def test_there_are_two_commands_and_the_pilots_test_runs_the_first() -> None:
    assert [command(0, "train_m7c_prime.sh"), "bash scripts/test.sh"] == COMMANDS


@pytest.fixture
def project(tmp_path: Path) -> Checkout:
    """A checkout with one test of its own; types are checked of that test alone, since checking all takes long."""
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


def test_every_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_verb_that_a_document_names_exists() -> None:
    verbs = get_command(app).commands
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"\btamis ([a-z]+)[ `]", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
            if f"`tamis {name}" in page.read_text():
                assert name in verbs, f"{page.name}: tamis {name}"

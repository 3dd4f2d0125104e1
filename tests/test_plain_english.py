"""Docstrings, comments, messages, test names and pages use plain words; these read as if translated."""

from __future__ import annotations

import re

from tests.checkout import ROOT

WORDS = [
    *("lest", "foretold", "told apart", "anew", "beside", "but for", "at hand", "nobody", "whoever", "takes long"),
    *("the one who", "is told", "are told", "were it only"),
    *("says", "speaks", "knows", "wants", "promises"),  # what a person does, and code does not
]
PATTERN = re.compile(rf"(?<![A-Za-z-])({'|'.join(WORDS).replace(' ', '[ _]')})(?![A-Za-z-])", re.IGNORECASE)
OWNERS_WORDS = [f"docs/runbooks/{n}-" for n in range(5)]
NOT_READ = (*OWNERS_WORDS, "docs/notes/", "tests/test_plain_english.py")
FOLDERS = ("tamis", "tests", "scripts", "docs", "examples", "configs")
SUFFIXES = {".py", ".md", ".sh", ".yaml", ".html"}


def test_no_page_or_source_uses_a_word_of_the_list() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found = []
    for path in sorted([*files, *ROOT.glob("*.md")]):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(NOT_READ):
            lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            found += [f"{name}:{n}: {match[0]}" for n, line in lines for match in PATTERN.finditer(line)]
    assert found == [], "\n".join(["", *found])

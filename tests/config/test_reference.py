"""docs/configuration.md matches the schema."""

from pathlib import Path

from tamis.config.load import sections
from tamis.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run: python -m tamis.config.reference > docs/configuration.md"


def test_every_key_has_one_sentence() -> None:
    texts = [field.description or "" for section in sections().values() for field in section.model_fields.values()]
    assert [text for text in texts if not text.endswith(".") or ". " in text] == []

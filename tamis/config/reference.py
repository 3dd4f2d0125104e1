"""Write docs/configuration.md from the schema: `python -m tamis.config.reference > docs/configuration.md`. No torch."""

from __future__ import annotations

import json
from typing import Any

from tamis.config.load import allowed_values, sections
from tamis.config.schema import Section

HEAD = """# Configuration

A run is described by one YAML file with a few sections. Every key has a default, so a file holds only what differs.
`configs/` has commented examples. On the command line, `section.key=value` sets one key:

```bash
tamis run configs/m7c_125m_80g.yaml train.steps=1000 train.out_dir=artifacts/try
```

`tamis config show` prints the resolved configuration, and `tamis config validate` checks files. An unknown key or a
value out of range is an error that names the key and what it may hold. The environment variables and flags of the
runbooks set the same keys; [variables.md](variables.md) lists them.

This page is generated from `tamis/config/schema.py` by `python -m tamis.config.reference > docs/configuration.md`.
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_section(name, section) for name, section in sections().items())


def _section(name: str, section: type[Section]) -> str:
    rows = [
        f"| `{key}` | {_default(field.default)} | {allowed_values(field)} | {field.description} |"
        for key, field in section.model_fields.items()
    ]
    table = ["| key | default | allowed | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([f"\n## {name}\n", f"{section.__doc__}\n", *table]) + "\n"


def _default(value: Any) -> str:
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{json.dumps(value)}`".replace('"', "")


if __name__ == "__main__":
    print(reference(), end="")

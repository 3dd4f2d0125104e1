"""Redact text that leaves the machine: values of variables with secret-looking names, and known token formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tamis.run.files.environment import RECORDED_VARIABLES

REDACTED = "[redacted]"
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|DSN|WEBHOOK", re.IGNORECASE)
SHORTEST_SECRET = 8  # a shorter value would match ordinary words
SECRET_SHAPES = {  # a literal that is quick to search for, and the pattern around it
    "hf_": r"\bhf_[A-Za-z0-9]{16,}",
    "sk-": r"\bsk-[A-Za-z0-9_-]{16,}",
    "gh": r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}",
    "glpat-": r"\bglpat-[\w-]{16,}",
    "AKIA": r"\bAKIA[0-9A-Z]{16}",
    "xox": r"\bxox[abprs]-[\w-]{10,}",
    "eyJ": r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}",
    "://": r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)",
    "Bearer ": r"(?<=Bearer )[\w.~+/-]{8,}",
    "PRIVATE KEY": r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
}


def redactor(environment: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces secrets in a text."""
    secrets = sorted({value for name, value in environment.items() if _is_secret(name, value)}, key=len, reverse=True)

    def redact(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, REDACTED)
        for word, shape in SECRET_SHAPES.items():
            if word in text:
                text = re.sub(shape, REDACTED, text)
        return text

    return redact


def _is_secret(name: str, value: str) -> bool:
    return bool(SECRET_NAME.search(name)) and len(value) >= SHORTEST_SECRET and name not in RECORDED_VARIABLES

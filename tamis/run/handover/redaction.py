"""Redact text that leaves the machine: values of variables with secret-looking names, and known token formats.

A value is found as it is and in its JSON, YAML, HTML and URL-escaped forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from urllib.parse import quote

from tamis.run.files.environment import RECORDED_VARIABLES

REDACTED = "[redacted]"
SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|_PWD|PWD_|KEY|CREDENTIAL|AUTH|COOKIE|DSN|WEBHOOK|NOTIFY|APPRISE", re.IGNORECASE
)
SHORTEST_SECRET = 8  # a shorter value would match ordinary words
NOTIFICATION_SCHEMES = "slack|discord|tgram|telegram|mailtos?|gotifys?|ntfys?|pover|msteams|matrixs?|pushover|apprises?"
ASSIGNED = (
    "TOKEN=",
    "_KEY=",
    "SECRET=",
    "PASSWORD=",
    "PASSWD=",
    "_PASS=",
    "_PWD=",
    "_DSN=",
    "WEBHOOK=",
    "WEBHOOK_URL=",
)
SECRET_FORMATS = {  # a literal that is quick to search for, and the pattern around it
    "hf_": r"\bhf_[A-Za-z0-9]{16,}",
    "sk-": r"\bsk-[A-Za-z0-9_-]{16,}",
    "gh": r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}",
    "glpat-": r"\bglpat-[\w-]{16,}",
    "AKIA": r"\bAKIA[0-9A-Z]{16}",
    "xox": r"\bxox[abprs]-[\w-]{10,}",
    "eyJ": r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}",
    "://": rf"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)|\b(?:{NOTIFICATION_SCHEMES})://[^\s\"'<>]+",
    "Bearer ": r"(?<=Bearer )[\w.~+/-]{8,}",
    "PRIVATE KEY": r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    "hook": r"https?://[^\s\"'<>]*hook[^\s\"'<>]*/[^\s\"'<>]+",  # Slack, Discord, Teams and others
    "=": rf"(?:{'|'.join(f'(?<={name})' for name in ASSIGNED)})[^\s\"']+",  # a variable set in a command
    "@": r"\b[\w.+-]+@(?:[\w-]+\.)*[\w-]*[A-Za-z0-9]\b",  # SSH hosts and mail addresses
}

Redact = Callable[[str], str]


def redactor(environment: Mapping[str, str]) -> Redact:
    """Return a function that replaces secrets in a text."""
    several = re.split(r"[\s,]+", environment.get("TAMIS_NOTIFY", ""))  # each address, besides all of them together
    values = [*environment.items(), *(("TAMIS_NOTIFY", one) for one in several)]
    secrets = sorted({value for name, value in values if _is_secret(name, value)}, key=len, reverse=True)
    patterns = [(_longest_plain_part(secret), re.compile(_any_form(secret))) for secret in secrets]
    patterns += [(literal, re.compile(pattern)) for literal, pattern in SECRET_FORMATS.items()]

    def redact(text: str) -> str:
        for literal, pattern in patterns:
            if literal in text:
                text = pattern.sub(REDACTED, text)
        return text

    return redact


def _is_secret(name: str, value: str) -> bool:
    return bool(SECRET_NAME.search(name)) and len(value) >= SHORTEST_SECRET and name not in RECORDED_VARIABLES


def _longest_plain_part(secret: str) -> str:
    """The longest run of characters that no escaping changes."""
    return max(re.findall(r"[A-Za-z0-9]+", secret), key=len, default="")


def _any_form(secret: str) -> str:
    """A pattern of the value with each character as it is or escaped, and YAML line breaks between them."""
    return r"(?:\\\n\s*)?".join(c if c.isascii() and c.isalnum() else f"(?:{'|'.join(_forms(c))})" for c in secret)


def _forms(character: str) -> list[str]:
    code = ord(character)
    utf16 = character.encode("utf-16-be", "surrogatepass")
    units = [utf16[i : i + 2].hex() for i in range(0, len(utf16), 2)]
    backslashed = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f", "\0": "0", "\\": r"\\"}.get(character)
    forms = [
        r"\\*" + re.escape(character),  # as it is; quotes and slashes also escaped once or more
        "".join(rf"\\+u(?i:{unit})" for unit in units),  # JSON
        rf"\\+x(?i:{code:02x})" if code < 256 else rf"\\+U(?i:{code:08x})",  # YAML
        rf"&#(?:0*{code}|[xX]0*(?i:{code:x}));",  # HTML
        rf"(?i:{re.escape(quote(character, safe='', errors='surrogatepass'))})" if character not in "-._~" else "",
        rf"(?i:%{code:02x})" if code < 128 else "",
        rf"\\+{backslashed}" if backslashed else "",
        {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;|''", " ": r"\+|\s+"}.get(character, ""),
        r"\s+" if character in "\n\r\t" else "",  # YAML folds lines
    ]
    return [form for form in forms if form]

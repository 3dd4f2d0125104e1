"""Addresses of notification services: which are valid, and how they are shown. Most hold a secret. No torch."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

HIDDEN = "…"
WEB = ("http", "https")


def address(text: str) -> str:
    """Return a valid address; a ValueError names the form, and not the address."""
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s,]", text) or re.search(r"[\s,]", text):
        raise ValueError("it must look like https://host/path or slack://…, without spaces and commas")
    if text.split("://")[0].lower() in WEB and not _host(text):
        raise ValueError("it must name a host, as https://host/path")
    return text


def shown_address(text: str) -> str:
    """The address without what may be secret: the host of a web address, and only the scheme of any other."""
    scheme = text.split("://")[0].lower()
    return f"{scheme}://{_host(text)}/{HIDDEN}" if scheme in WEB else f"{scheme}://{HIDDEN}"


def is_shown_form(text: str) -> bool:
    """True for an address out of a stored configuration, which lacks its secret part."""
    return text.endswith(HIDDEN)


def _host(text: str) -> str:
    """The host and port of a web address, without user and password; empty if there is none."""
    try:
        parts = urlsplit(text)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return ""
    return f"{parts.hostname}{port}" if parts.hostname else ""

"""Delivery of messages: a thread per address that tries again, and can hang, without delaying the run."""

from __future__ import annotations

import base64
import http.client
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from tamis import __version__
from tamis.config import ConfigError
from tamis.config.addresses import WEB, shown_address
from tamis.run.notify.messages import Message

TIMEOUT_S = 10.0  # for each answer of a service
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, *[300.0] * 11)  # then the message is given up
MOST_WAITING = 50  # messages per address; beyond it the oldest that may be dropped is
MAY_PASS = (408, 425, 429)  # answers below 500 after which another try can help
LOOPBACK = ("localhost", "127.0.0.1", "::1")
INSTALL_APPRISE = "needs the package apprise: pip install 'tamis[notify]'"


@dataclass(frozen=True)
class Problem:
    """Why a message was not accepted, in words without the address."""

    text: str
    is_lasting: bool = False  # another try would end the same way


class Outbox:
    """The messages that wait for one address, and the thread that sends them."""

    def __init__(self, address: str, report: Callable[[str], None]) -> None:
        self.address = address
        self._report = report
        self._waiting: deque[Message] = deque()
        self._change = threading.Condition()
        self._closing = threading.Event()
        self._is_failing = False
        self._is_sending = False
        self._thread = threading.Thread(target=self._send_all, daemon=True, name="notify")
        self._thread.start()

    def put(self, message: Message) -> None:
        with self._change:
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.remove(next((old for old in self._waiting if not old.must_arrive), self._waiting[0]))
            self._waiting.append(message)
            self._change.notify()

    def close(self) -> None:
        """Try what waits once more, the newest first, without back-off; `join` waits for it."""
        self._closing.set()
        with self._change:
            self._change.notify()

    def join(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))

    @property
    def is_empty(self) -> bool:
        with self._change:
            return not self._waiting and not self._is_sending

    def _send_all(self) -> None:
        while (message := self._next()) is not None:
            self._send(message)
            self._is_sending = False

    def _next(self) -> Message | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closing.is_set())
            if not self._waiting:
                return None
            self._is_sending = True
            return self._waiting.pop() if self._closing.is_set() else self._waiting.popleft()

    def _send(self, message: Message) -> None:
        for delay_s in BACK_OFF_S:
            is_last = self._closing.is_set()
            problem = send(self.address, message)
            if problem is None:
                self._is_failing = False
                return
            if not self._is_failing:
                self._is_failing = True
                self._report(f"{shown_address(self.address)}: {problem.text}")
            if problem.is_lasting or is_last:
                return
            self._closing.wait(delay_s)


def send(address: str, message: Message) -> Problem | None:
    """Send one message; None if it was accepted."""
    return _post(address, message) if _is_web(address) else _send_by_apprise(address, message)


def require_usable(address: str) -> None:
    """Raise a ConfigError when no installed package can send to this address."""
    if not _is_web(address):
        _service(address)


def _is_web(address: str) -> bool:
    return address.split("://")[0].lower() in WEB


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        """Refuse: a redirected POST would become a GET without the message."""
        return None


def _post(address: str, message: Message) -> Problem | None:
    """POST the message as JSON."""
    url = urlsplit(address)
    headers = {"Content-Type": "application/json", "User-Agent": f"tamis/{__version__}"}
    if url.username is not None:
        login = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    target = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
    proxies = ProxyHandler({}) if url.hostname in LOOPBACK else ProxyHandler()
    try:
        request = Request(target, data=json.dumps(message.payload()).encode(), headers=headers)
        with build_opener(proxies, _NoRedirects).open(request, timeout=TIMEOUT_S):
            return None
    except HTTPError as error:
        error.close()
        return Problem(f"it answered {error.code}", error.code < 500 and error.code not in MAY_PASS)
    except TimeoutError:
        return Problem(f"no answer within {TIMEOUT_S:g} s")
    except URLError as error:
        return Problem(f"no connection ({getattr(error.reason, 'strerror', None) or type(error.reason).__name__})")
    except (OSError, http.client.HTTPException) as error:
        return Problem(f"the connection was lost ({type(error).__name__})")
    except ValueError:  # its text would contain the address
        return Problem("it is not a valid address", is_lasting=True)


def _send_by_apprise(address: str, message: Message) -> Problem | None:
    try:
        accepted = _service(address).notify(body=message.text, title=message.title)
    except Exception as error:  # a plugin's own errors; their text may contain the address
        return Problem(f"apprise failed ({type(error).__name__})")
    return None if accepted else Problem("the service did not accept the message")


def _service(address: str) -> Any:
    """The apprise object of one address: one each, because apprise starts a pool of threads for several."""
    try:
        import apprise
    except ImportError:
        raise ConfigError(f"notify.to: {shown_address(address)} {INSTALL_APPRISE}") from None
    logging.getLogger("apprise").disabled = True  # it logs addresses
    service = apprise.Apprise()
    if not service.add(address):
        raise ConfigError(
            f"notify.to: apprise does not accept {shown_address(address)}; its documentation has the form"
        )
    return service

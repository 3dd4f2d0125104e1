"""`tamis serve RUN`: loads a model, opens the port, runs the server until Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tamis.generate.load import load_model
from tamis.run.files.console import announced, say
from tamis.run.files.records import read_problem
from tamis.serve.engine import Engine, rows_that_fit

KEY_VARIABLE = "TAMIS_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_ROWS = {"cuda": 64, "cpu": 8}
END_S = 30.0  # for running completions, at the end


def serve_model(
    checkpoint: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    rows: int | None = None,
    max_len: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    chat_template: Path | None = None,
) -> None:
    """Serve a checkpoint, run or exported folder; raises a ValueError that names what to change."""
    try:
        import uvicorn

        from tamis.serve.app import Server, build_app
    except ImportError as error:
        raise ValueError(f"tamis serve needs the package {error.name}: pip install 'tamis[serve]'") from None
    key = os.environ.get(KEY_VARIABLE) or None
    if host not in LOOPBACK and key is None:
        raise ValueError(
            f"--host {host} lets other machines in: set {KEY_VARIABLE} to a secret that clients must send, or keep "
            "127.0.0.1 and use an SSH tunnel"
        )
    template = None if chat_template is None else _read(chat_template)
    listener = _listen(host, port)
    with announced(f"loading {checkpoint}"):
        loaded = load_model(checkpoint, max_len=max_len, device=device, precision=precision)
    length, kind = max_len or loaded.model.max_len, loaded.model.embedding.weight.device.type
    engine = Engine(loaded.model, rows or rows_that_fit(loaded.model, length, MOST_ROWS[kind]), length)
    if kind == "cuda":
        with announced("compiling kernels (kept for the next start)"):
            engine.warm_up()
    name = loaded.config.model.name
    app = build_app(Server(loaded, engine, name, template), key, list(LOOPBACK) if host in LOOPBACK else None, END_S)
    shown = f"[{host}]" if ":" in host else host
    say(f"{loaded.source}: step {loaded.step}, {loaded.model.embedding.weight.dtype} on {kind}")
    say(f"{engine.cache.batch} completions at a time of up to {length:,} tokens, {engine.cache.bytes / 2**20:,.0f} MiB")
    say(f"serving {name} at http://{shown}:{listener.getsockname()[1]} (OpenAI's interface: /v1); Ctrl-C ends")
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(END_S))
    uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"port {port} on {host} cannot be opened ({reason}): choose another with --port") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the chat template {path} cannot be read: {read_problem(error)}") from None

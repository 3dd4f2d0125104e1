"""The HTTP application: routes, limits, authorisation, streams. It only passes requests to the engine and back."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib import resources
from typing import Any, TypeVar

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tamis.generate.load import LoadedModel
from tamis.generate.sample import check_prompts
from tamis.serve.completion import Completion, Piece
from tamis.serve.engine import Busy, Engine
from tamis.serve.protocol import MOST_CHOICES, Answer, ChatRequest, CompletionRequest, Parameters, error_body

MOST_BODY_BYTES = 16 << 20
DEFAULT_MAX_TOKENS = 16
OPEN_PATHS = ("/", "/health")  # need no key: they show nothing of the model
Body = TypeVar("Body", bound=Parameters)
Pieces = asyncio.Queue[tuple[int, Piece]]


class Refused(Exception):
    """An error whose message goes to the client."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", parameter: str | None = None):
        super().__init__(message)
        self.status, self.body = status, error_body(message, kind, parameter)


class Server:
    """The handlers of one served model."""

    def __init__(self, loaded: LoadedModel, engine: Engine, name: str, chat_template: str | None = None) -> None:
        self.loaded, self.engine, self.name = loaded, engine, name
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = None if chat_template is None else environment.from_string(chat_template)

    async def models(self, request: Request) -> Response:
        entry = {"id": self.name, "object": "model", "created": 0, "owned_by": "tamis", "max_len": self.engine.max_len}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def page(self, request: Request) -> Response:
        return HTMLResponse((resources.files("tamis.serve") / "page.html").read_text(encoding="utf-8"))

    async def metrics(self, request: Request) -> Response:
        counters, running = self.engine.counters, len(self.engine.running())
        gauges = {"running": running, "waiting": self.engine.waiting, "rows": self.engine.cache.batch}
        lines = [f"# TYPE tamis_{name} gauge\ntamis_{name} {value}" for name, value in gauges.items()]
        totals = vars(counters).items()
        lines += [f"# TYPE tamis_{name}_total counter\ntamis_{name}_total {value}" for name, value in totals]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        prompts = await run_in_threadpool(body.prompts, self.loaded.tokenizer)
        if not prompts:
            raise Refused(400, "prompt is an empty list: give at least one", parameter="prompt")
        return await self._answer(request, body, prompts, is_chat=False)

    async def chat(self, request: Request) -> Response:
        if self._template is None:
            raise Refused(
                404, "this model has no chat template: use /v1/completions, or start with --chat-template FILE"
            )
        body = await read_body(request, ChatRequest)
        try:
            text = self._template.render(messages=[m.model_dump() for m in body.messages], add_generation_prompt=True)
        except TemplateError as error:
            raise Refused(400, f"the chat template refused the messages: {error}", parameter="messages") from None
        prompt = [int(token) for token in self.loaded.tokenizer.encode(text)]
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        return await self._answer(request, body, [prompt], is_chat=True)

    async def _answer(self, request: Request, body: Parameters, prompts: list[list[int]], is_chat: bool) -> Response:
        if body.model not in (None, "", self.name):
            raise Refused(404, f"the model {body.model!r} is not served here: {self.name!r} is", parameter="model")
        if len(prompts) * body.n > MOST_CHOICES:
            raise Refused(400, f"at most {MOST_CHOICES} completions in one request, prompts times n", parameter="n")
        echo = self._echo(body, prompts)
        pieces: Pieces = asyncio.Queue()
        completions = self._submit(request, body, prompts, pieces)
        answer = Answer(self.name, self.loaded.tokenizer, is_chat)
        if body.stream:
            lines = stream_lines(answer, body, completions, pieces, echo)
            return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        texts, ends = await _gather(request, completions, pieces)
        if failed := next((end for end in ends if end.error), None):
            raise Refused(500, f"the completion failed: {failed.error}", "server_error")
        whole = [start + text for start, text in zip(echo, texts, strict=True)]
        return JSONResponse(answer.whole(completions, whole, ends))

    def _echo(self, body: Parameters, prompts: list[list[int]]) -> list[str]:
        """The beginning of every choice's text: its prompt if the client asked for it."""
        echo = isinstance(body, CompletionRequest) and body.echo
        texts = [self.loaded.tokenizer.to_bytes(p).decode(errors="replace") if echo else "" for p in prompts]
        return [text for text in texts for _ in range(body.n)]

    def _submit(self, request: Request, body: Parameters, prompts: list[list[int]], pieces: Pieces) -> list[Completion]:
        loop = asyncio.get_running_loop()

        def emit_as(index: int) -> Callable[[Piece], None]:
            def emit(piece: Piece) -> None:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(pieces.put_nowait, (index, piece))

            return emit

        client = body.user or (request.client.host if request.client else "")
        samplings = [sampling for _ in prompts for sampling in body.samplings(body.n)]
        made = [
            Completion(
                self.loaded.tokenizer,
                prompts[index // body.n],
                body.max_tokens or DEFAULT_MAX_TOKENS,
                sampling,
                emit_as(index),
                stop=body.stops,
                top_logprobs=body.top_logprobs_wanted,
                with_blocks=body.blocks and body.stream,
                client=client,
            )
            for index, sampling in enumerate(samplings)
        ]
        try:
            check_prompts(self.loaded.model, prompts, 1)
            for completion in made:
                self.engine.submit(completion)
        except ValueError as error:
            _cancel(made)
            raise Refused(400, str(error), parameter="prompt") from None
        except Busy as error:
            _cancel(made)
            raise Refused(503, f"{error}: try again later", "server_error") from None
        return made


async def stream_lines(
    answer: Answer, body: Parameters, completions: list[Completion], pieces: Pieces, echo: list[str]
) -> AsyncIterator[str]:
    """Server-sent events of all choices, as their pieces come. A client that leaves cancels them."""
    left = len(completions)
    begun = [False] * left
    try:
        while left:
            index, piece = await pieces.get()
            text = piece.text if begun[index] else echo[index] + piece.text
            begun[index] = True
            left -= piece.finish is not None
            if piece.error:
                yield _event(error_body(f"the completion failed: {piece.error}", "server_error"))
            else:
                yield _event(answer.chunk(index, piece, text))
        if body.stream_options and body.stream_options.include_usage:
            yield _event(answer.last_chunk(completions))
        yield "data: [DONE]\n\n"
    finally:
        _cancel(completions)


async def _gather(request: Request, completions: list[Completion], pieces: Pieces) -> tuple[list[str], list[Piece]]:
    """The texts and last pieces of all choices. A client that leaves cancels them."""
    texts, ends = [""] * len(completions), [Piece("")] * len(completions)
    left, gone = len(completions), asyncio.create_task(_disconnected(request))
    try:
        while left:
            take = asyncio.create_task(pieces.get())
            await asyncio.wait({take, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                take.cancel()
                raise ClientDisconnect
            index, piece = take.result()
            texts[index] += piece.text
            known = [*ends[index].logprobs, *piece.logprobs]
            ends[index] = Piece(piece.text, piece.finish, known, error=piece.error)
            left -= piece.finish is not None
    finally:
        gone.cancel()
        _cancel(completions)
    return texts, ends


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel(completions: list[Completion]) -> None:
    for completion in completions:
        if not completion.is_finished:
            completion.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The request's JSON as a checked type. Raises Refused with the parameter's name."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MOST_BODY_BYTES:
            raise Refused(413, f"the body is larger than {MOST_BODY_BYTES:,} bytes")
    try:
        return await run_in_threadpool(kind.model_validate_json, data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"][:1])
        unknown = first["type"] == "extra_forbidden"
        message = f"unknown parameter {place!r}" if unknown else f"{place or 'the body'}: {first['msg']}"
        raise Refused(400, message, parameter=place or None) from None


class RequireKey:
    """Refuses requests without the API key; `key` None lets all pass."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.key is not None and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self.key.encode()):
                body = error_body("the API key is missing or wrong: send Authorization: Bearer KEY", "invalid_api_key")
                return await JSONResponse(body, 401)(scope, receive, send)
        await self.app(scope, receive, send)


def build_app(server: Server, key: str | None, hosts: list[str] | None, end_s: float) -> Starlette:
    """The application. `hosts`: the names by which it may be addressed, which stops pages that rebind DNS."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await run_in_threadpool(server.engine.stop, end_s)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return JSONResponse(error.body, error.status)

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Route("/v1/models", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    guards = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)] if hosts else []
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[*guards, Middleware(RequireKey, key=key)],
        exception_handlers={Refused: refused, ClientDisconnect: left},
    )

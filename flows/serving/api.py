"""`infini api`: a model behind OpenAI's HTTP interface, for many clients at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from flows.serving.access import LOOPBACK_NAMES
from flows.serving.guard import guarded, with_authorization
from flows.serving.servers import api_lock, prefect_dir
from infini_model.config import Config
from infini_model.runtime.errors import UserError, describe_error
from infini_model.runtime.storage import lock, named_os_errors
from infini_model.serving.engine import Engine
from infini_model.serving.model import Model
from infini_model.serving.openai import Asked, ChatCompletion, Completion
from infini_model.serving.requests import Accepted, EngineError, Event, Piece, joined

if TYPE_CHECKING:
    from types import FrameType

    from starlette.types import ASGIApp

# For answers in progress when the server is stopped.
GRACE_SECONDS = 3
# Between two looks whether the client of a long prompt is still there.
POLL_SECONDS = 0.5


def refused(status: int, message: str) -> Response:
    """Return an error in OpenAI's form; a key at the beginning of the message is its `param`."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    key, colon, _ = message.partition(": ")
    param = key if colon and " " not in key else None
    error = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": error}, status)


def refused_for(error: Exception) -> Response:
    """Return an error in OpenAI's form: one line about the request, or a failure of the server."""
    if isinstance(error, HTTPException):
        return refused(error.status_code, error.detail)
    if isinstance(error, UserError):
        return refused(HTTPStatus.BAD_REQUEST, describe_error(error))
    if not isinstance(error, RequestValidationError):
        return refused(HTTPStatus.INTERNAL_SERVER_ERROR, describe_error(error))
    # Of a union, the form that came closest. Pydantic names the types as well.
    closest = max(error.errors(), key=lambda each: len(each["loc"]))
    if closest["type"] == "json_invalid":
        return refused(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {closest['ctx']['error']}")
    places = [str(part) for part in closest["loc"] if str(part).replace("_", "").isalnum()]
    key = ".".join(part for part in places if part not in ("body", "str", "int")) or "the body"
    message = closest["msg"].removeprefix("Value error, ")
    names_key = closest["type"] == "value_error"
    return refused(HTTPStatus.BAD_REQUEST, message if names_key else f"{key}: {message}")


class Answers:
    """The answers to a request, one for each of its choices, as they come from the engine."""

    def __init__(self, http: HttpRequest, asked: Asked, served: Model) -> None:
        self._http, self._asked, self._served = http, asked, served
        self._id, self._created = f"{asked.prefix}{uuid.uuid4().hex}", int(time.time())
        self._events = asyncio.Queue[tuple[int, Event]]()
        self._prompt_tokens = self._known_tokens = 0
        self._generated = dict[int, int]()

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece | None]]:
        """Yield pieces, each with the number of its choice; None when that has been accepted.

        Raises `UserError` before the first, `EngineError` at any time, and `ClientDisconnect`.
        Whenever it ends, so does the generation.
        """
        loop = asyncio.get_running_loop()

        def emit(row: int, event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self._events.put_nowait, (row, event))

        # To tokenise a long document takes a while, in which others are served.
        requests = await asyncio.to_thread(self._asked.requests, self._served, self._id, emit)
        try:
            for request in requests:
                self._served.engine.submit(request)
            going = len(requests)
            while going:
                row, event = await self._next()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Accepted):
                    if row % (self._asked.n or 1) == 0:  # once for all answers to a prompt
                        self._prompt_tokens += event.prompt_tokens
                        self._known_tokens += event.known_tokens
                    yield row, None
                    continue
                self._generated[row] = event.generated
                yield row, event
                going -= event.finish_reason is not None
        finally:
            for request in requests:
                request.is_cancelled = True

    async def _next(self) -> tuple[int, Event]:
        while not await self._http.is_disconnected():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    return await self._events.get()
        raise ClientDisconnect

    async def whole(self) -> dict[str, Any]:
        """Return the response with all choices. Raises as `_pieces` does."""
        pieces = dict[int, list[Piece]]()
        async for row, piece in self._pieces():
            pieces.setdefault(row, []).extend([] if piece is None else [piece])
        choices = [self._choice(row, joined(pieces[row]), begins=True) for row in sorted(pieces)]
        return self._response(choices) | {"usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield the response as server-sent events; empty ones first, for accepted choices."""
        options, begun, is_accepted = self._asked.stream_options, set[int](), False
        try:
            async for row, piece in self._pieces():
                if piece is None:
                    is_accepted = True
                    yield ""
                    continue
                yield _event(self._response([self._choice(row, piece, begins=row not in begun)]))
                begun.add(row)
            if options is not None and options.include_usage:
                yield _event(self._response([]) | {"usage": self._usage()})
            yield "data: [DONE]\n\n"
        except (ClientDisconnect, EngineError, UserError) as error:
            if not is_accepted:  # The response can still have a status of its own.
                raise
            if not isinstance(error, ClientDisconnect):
                yield _event(json.loads(bytes(refused_for(error).body)))

    def _choice(self, row: int, piece: Piece, *, begins: bool) -> dict[str, Any]:
        choice = self._asked.choice(piece, self._served, begins=begins)
        return {"index": row, **choice, "finish_reason": piece.finish_reason}

    def _response(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = self._asked.objects[bool(self._asked.stream)]
        known = {"id": self._id, "object": kind, "created": self._created}
        return known | {"model": self._served.name, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        generated = sum(self._generated.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": self._known_tokens},
        }


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def answer(http: HttpRequest, asked: Asked, served: Model) -> Response:
    """Respond to a request of either kind."""
    if asked.model != served.name:
        message = f"model: got {asked.model!r}; this server has {served.name!r}"
        return refused(HTTPStatus.NOT_FOUND, message)
    answers = Answers(http, asked, served)
    try:
        if not asked.stream:
            return JSONResponse(await answers.whole())
        events = answers.events()
        await anext(events)  # What is wrong with the request has a status of its own.
    except ClientDisconnect:
        return Response()  # which nobody reads
    return StreamingResponse(events, media_type="text/event-stream")


def create_app(served: Model, key: str | None = None, hosts: tuple[str, ...] = ()) -> ASGIApp:
    """Make the server's application; `key` is the API key that it requires.

    It answers under loopback names, unless it has other `hosts`, and no page of another origin.
    """
    app = FastAPI(openapi_url=None)

    async def refuse(_: HttpRequest, error: Exception) -> Response:
        return refused_for(error)

    for kind in (UserError, EngineError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    model = {"id": served.name, "object": "model", "created": int(time.time())}
    model |= {"owned_by": "infini-llama"}

    @app.get("/health")
    async def health() -> str:
        return "OK"

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name}")
    async def retrieve(name: str) -> dict[str, Any]:
        if name != served.name:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"model: this server has {served.name!r}")
        return model

    @app.post("/v1/completions")
    async def completions(asked: Completion, http: HttpRequest) -> Response:
        return await answer(http, asked, served)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatCompletion, http: HttpRequest) -> Response:
        return await answer(http, asked, served)

    checked: ASGIApp = app
    if key is not None:
        refusal = refused(HTTPStatus.UNAUTHORIZED, "the API key is missing or wrong")
        checked = with_authorization(app, f"Bearer {key}", refusal)
    return guarded(checked, hosts or LOOPBACK_NAMES)


class _Server(uvicorn.Server):
    """The server; a signal ends the answers in progress, too, so that their clients know."""

    def __init__(self, settings: uvicorn.Config, engine: Engine) -> None:
        super().__init__(settings)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the engine and the server."""
        self._engine.stop()
        super().handle_exit(sig, frame)


def serve_model(
    config: Config, folder: Path, *, host: str, port: int, key: str | None, cache_gigabytes: float
) -> None:
    """Serve the model of a run, a checkpoint or a Hugging Face folder until Ctrl-C.

    Raises `UserError` if the port cannot be had, or is open to other machines without an API key;
    and as `Model.from_checkpoint` does.
    """
    is_local = host in LOOPBACK_NAMES
    if not is_local and key is None:
        raise UserError(f"--host: {host} is open to other machines, so it needs an --api-key")
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"--host, --port: {error.strerror}") from error
    record, address = api_lock(prefect_dir(config), port), f"http://{host}:{port}/v1"
    with lock(record, wait=False) as is_free, contextlib.suppress(KeyboardInterrupt):
        if not is_free:
            raise UserError(f"--port: another infini api of this output folder has port {port}")
        with named_os_errors(record):
            record.write_text("", encoding="utf-8")
        import torch._dynamo  # noqa: F401 - the first request would wait seconds for it

        served = Model.from_checkpoint(config, folder, cache_gigabytes)
        engine = served.engine
        app = create_app(served, key, () if is_local else ("*",))
        settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
        with named_os_errors(record):
            record.write_text(f"{address}  {served.name}", encoding="utf-8")
        print(f"OpenAI API  {address}")
        print(f"Model       {served.name}")
        print("Ready. Ctrl-C stops it.", flush=True)
        with contextlib.closing(engine):
            _Server(settings, engine).run(sockets=[listener])

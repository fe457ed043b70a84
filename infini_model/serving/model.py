"""A model that is ready for use: it continues texts, holds conversations and scores texts."""

from __future__ import annotations

import functools
import logging
import queue
import re
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from infini_model.config import Config, SampleConfig, load_config
from infini_model.config.locations import expanded
from infini_model.data.sources.chat import (
    ASSISTANT,
    USER,
    ChatTemplate,
    Message,
    Messages,
)
from infini_model.data.tokenizers.load import load_dataset_tokenizer, tokenizer_of
from infini_model.data.tokenizers.tokenizer import Tokenizer, prompt_ids
from infini_model.model.generate import check_seed, sampling
from infini_model.model.llama import InfiniLlama
from infini_model.model.unmask import unmask
from infini_model.runtime.errors import CheckpointError, UserError
from infini_model.runtime.runs import (
    CHECKPOINTS,
    MODEL,
    is_started,
    newest_checkpoint,
    read_run,
    read_run_config,
)
from infini_model.runtime.stored_runs import refresh_runs
from infini_model.serving.engine import Engine
from infini_model.serving.known_texts import KnownTexts, SessionLostError
from infini_model.serving.requests import Answer, Event, Piece, Request
from infini_model.serving.scoring import score
from infini_model.training.export import load_model
from infini_model.training.initial_weights import fetch_folder

log = logging.getLogger(__name__)

GIGABYTE = 10**9
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.@-]+")
# Texts that `Model.loss` reads at once.
SCORED_AT_ONCE = 8


class Sampling(TypedDict, total=False):
    """How an answer is drawn, and when it ends.

    The first four are those of `infini_model.config.SampleConfig`. Answer i of a call is drawn with
    (`seed`, i); `seed` is 0 by default, so the same call gives the same answers. `stop` are strings
    that end an answer and are no part of it.
    """

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    stop: str | Sequence[str] | None


class Model:
    """A model with its tokenizer.

    Texts are read and written by a thread of its own, many at once. What has been read is kept: of
    a text that begins as an earlier one, little more than the rest is read. If you change the
    weights, create a new `Model`.

    Attributes:
        llama: The network.
        name: That of its run or folder.
        sampling: How tokens are drawn, unless a call says otherwise.
    """

    def __init__(
        self,
        llama: InfiniLlama,
        tokenizer: Tokenizer,
        *,
        name: str = "model",
        template: Callable[[], ChatTemplate] | None = None,
        sampling: SampleConfig | None = None,
        cache_gigabytes: float = 1.0,
    ) -> None:
        """`template` makes the form of conversations; that of the tokenizer by default."""
        self.llama, self.tokenizer, self.name = llama, tokenizer, name
        self.sampling = sampling or SampleConfig()
        self._make_template = template or tokenizer.chat
        self._engine: Engine | None = None
        if not llama.config.bidirectional:
            known = KnownTexts(int(cache_gigabytes * GIGABYTE))
            self._engine = Engine(llama, tokenizer, known)
            weakref.finalize(self, self._engine.close)

    @classmethod
    def load(cls, source: str | Path, *, device: str = "auto", precision: str = "auto") -> Model:
        """Load the model of a run, by its name or folder, or a Hugging Face folder.

        A run is looked for in `INFINI_OUTPUT_DIR`, by default in outputs/. An OWNER/NAME that is no
        folder is fetched from the hub.

        Args:
            source: The name or the folder.
            device: `auto`, the GPU with the most free memory if there is one; `cpu`, `cuda` or
                `cuda:N`.
            precision: As `training.precision`.

        Raises a one-line `UserError` if something is missing, damaged or not supported.
        """
        if not DEVICE.fullmatch(device := str(device)):
            raise UserError(f"device: got {device!r}; takes auto, cpu, cuda or cuda:N")
        gpus = "all" if device == "cuda" else device.removeprefix("cuda:")
        asked = {"launch": {"gpus": gpus}, "training": {"precision": precision}}
        config, folder = load_config(overrides=[asked]), expanded(source)
        if not folder.is_dir():
            refresh_runs(config.run.runs_dir, config.run.store)
            folder = config.run.runs_dir / folder
        if not folder.is_dir():
            if not REPOSITORY.fullmatch(str(source)):
                raise UserError(f"{source}: there is no such run or folder")
            folder, _ = fetch_folder(str(source), "Model.load")
        return cls.from_checkpoint(config, folder)

    @classmethod
    def from_checkpoint(
        cls, config: Config, checkpoint: Path, cache_gigabytes: float = 1.0
    ) -> Model:
        """Load the model of a run, a checkpoint or a model folder, as `config` says.

        Raises `CheckpointError` if there is no model or no tokenizer, and as `load_model`.
        """
        folder = checkpoint / MODEL if (checkpoint / MODEL).is_dir() else checkpoint
        if (checkpoint / CHECKPOINTS).is_dir():
            newest = newest_checkpoint(checkpoint)
            if newest is None:
                raise CheckpointError(
                    f"{checkpoint / CHECKPOINTS}: no checkpoint found; "
                    "infini runs lists the runs, --checkpoint names one"
                )
            folder = newest / MODEL
        run_dir = next(filter(is_started, folder.resolve().parents), None)
        tokenizer = tokenizer_of(folder, str(folder))
        if tokenizer is None:
            if run_dir is None:
                raise CheckpointError(f"{folder}: has no tokenizer.json and is not part of a run")
            tokenizer = load_dataset_tokenizer(read_run(run_dir).dataset)
        return cls(
            load_model(folder, config),
            tokenizer,
            name=(run_dir or folder).name,
            template=functools.partial(_template_of, config, folder, run_dir, tokenizer),
            sampling=config.evaluation.sample,
            cache_gigabytes=cache_gigabytes,
        )

    @overload
    def generate(self, prompts: str, **settings: Unpack[Sampling]) -> str: ...
    @overload
    def generate(self, prompts: list[str], **settings: Unpack[Sampling]) -> list[str]: ...
    def generate(self, prompts: str | list[str], **settings: Unpack[Sampling]) -> str | list[str]:
        """Return the continuation of a text, or of each, without the text.

        Texts that are given together are read and written together. Raises `UserError` for an empty
        prompt or a setting out of its range.
        """
        texts = _named("prompt", prompts)
        requests = [
            self._request(name, text, row, settings)
            for row, (name, text) in enumerate(texts.items())
        ]
        try:
            answers = [self.answer(request) for request in requests]
            new = ["".join(piece.text for piece in answer) for answer in answers]
        finally:
            for request in requests:
                request.is_cancelled = True
        return new[0] if isinstance(prompts, str) else new

    def stream(self, prompt: str | Messages, **settings: Unpack[Sampling]) -> Iterator[str]:
        """Yield the continuation of a text, or the answer to messages, as it is written.

        Errors are raised at the first piece.
        """
        request = self._request("prompt", prompt, 0, settings)
        try:
            for piece in self.answer(request):
                yield piece.text
        finally:
            request.is_cancelled = True

    def chat(self, messages: Messages, **settings: Unpack[Sampling]) -> str:
        """Return the model's answer to messages, such as `{"role": "user", "content": "Hello"}`.

        Raises `UserError` as `generate`, and if the chat template refuses the messages.
        """
        _check_messages(messages)
        return "".join(self.stream(messages, **settings))

    @overload
    def loss(self, texts: str) -> float: ...
    @overload
    def loss(self, texts: list[str]) -> list[float]: ...
    def loss(self, texts: str | list[str]) -> float | list[float]:
        """Return the mean loss of a text, or of each, in nats per token, as `transformers` does.

        Each token is scored but the first, which is the beginning-of-text token if there is one. A
        text may be of any length. Raises `UserError` for a text without a token to score, or a
        model of diffusion.
        """
        if self.llama.config.bidirectional:
            raise UserError("loss: needs a causal model; this one generates by diffusion")
        rows = list[list[int]]()
        for name, text in _named("text", texts).items():
            rows.append(prompt_ids(self.tokenizer, text))
            if len(rows[-1]) < 2:
                raise UserError(f"{name}: needs at least two tokens")
        scores = score(self.llama, [(ids[:1], ids[1:]) for ids in rows], SCORED_AT_ONCE)
        losses = [-total / (len(ids) - 1) for (total, _), ids in zip(scores, rows, strict=True)]
        return losses[0] if isinstance(texts, str) else losses

    @property
    def engine(self) -> Engine:
        """The thread that reads and writes. Raises `UserError` for a model of diffusion."""
        if self._engine is None:
            raise UserError("answers need a causal model; this one generates by diffusion")
        return self._engine

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The form of conversations."""
        return self._make_template()

    @functools.cached_property
    def answer_ends(self) -> tuple[int, ...]:
        """The tokens that end an answer. Raises `DataError` if the template does not render one.

        What closes an answer is among them if it is a token, as `<|eot_id|>` is.
        """
        closing = self.tokenizer.encode_batch([self.template.closing]).ids.tolist()
        return self.tokenizer.end_token_ids + (tuple(closing) if len(closing) == 1 else ())

    def turn_ids(self, messages: Messages, *, follows: bool) -> list[int]:
        """Return the ids of messages up to the answer; they begin or follow a conversation.

        Raises `UserError` if there are none, or the template refuses them.
        """
        _check_messages(messages)
        render = self.template.next_turn if follows else self.template.render
        return prompt_ids(self.tokenizer, render(messages), follows=follows)

    def answer(self, request: Request) -> Iterator[Piece]:
        """Submit a request and return the pieces of its answer as they come.

        The `emit` of the request is replaced.
        """
        if self.llama.config.bidirectional:
            return self._unmasked(request)
        events = queue.SimpleQueue[Event]()
        request.emit = events.put
        self.engine.submit(request)
        return self._received(events)

    def _received(self, events: queue.SimpleQueue[Event]) -> Iterator[Piece]:
        finish_reason = None
        while finish_reason is None:
            event = events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Piece):
                yield event
                finish_reason = event.finish_reason

    def _request(self, name: str, prompt: str | Messages, row: int, given: Sampling) -> Request:
        settings: dict[str, Any] = {**given}
        seed, stop = settings.pop("seed", 0), settings.pop("stop", None) or ()
        check_seed(seed)
        stop = [stop] if isinstance(stop, str) else stop
        if not all(isinstance(each, str) for each in stop):
            raise UserError(f"stop: got {stop!r}; takes a string or several")
        drawn = sampling(**self.sampling.model_dump() | settings)
        if isinstance(prompt, str):
            ids, ends = prompt_ids(self.tokenizer, prompt), self.tokenizer.end_token_ids
        else:
            ids, ends = self.turn_ids(prompt, follows=False), self.answer_ends
        if not ids and self._engine is not None:
            raise UserError(f"{name}: is empty")
        return Request(
            ids=ids,
            sampling=drawn,
            max_tokens=drawn.max_new_tokens,
            end_token_ids=ends,
            seed=(seed, row),
            stop=tuple(filter(None, stop)),
        )

    def _unmasked(self, request: Request) -> Iterator[Piece]:
        """Answer block by block, in this thread."""
        pieces = list[Piece]()
        request.emit = pieces.append  # type: ignore[assignment]
        answer = Answer(request, self.tokenizer)
        ids, ends, seed = list(request.ids), request.end_token_ids, sum(request.seed)
        for block in unmask(self.llama, ids, request.sampling, seed, ends):
            is_complete = any(answer.add(token, None) for token in block)
            yield from pieces
            if is_complete:
                return
            pieces.clear()
        answer.end("length")  # the context is full
        yield from pieces


def _check_messages(messages: Messages) -> None:
    if not messages or not all(isinstance(each, Mapping) for each in messages):
        raise UserError('messages: takes a list of {"role": ..., "content": ...}')


def _named(kind: str, texts: str | list[str]) -> dict[str, str]:
    """Name each text for error messages. Raises `UserError` if one is not a text."""
    named = {kind: texts}
    if not isinstance(texts, str):
        rows = texts if isinstance(texts, Sequence) else [texts]
        named = {f"{kind}s[{row}]": text for row, text in enumerate(rows)}
    for name, text in named.items():
        if not isinstance(text, str):
            raise UserError(f"{name}: got {text!r}; takes a text")
    return named  # type: ignore[return-value]


def _template_of(
    config: Config, folder: Path, run_dir: Path | None, tokenizer: Tokenizer
) -> ChatTemplate:
    """Choose the form of conversations with the model of a folder.

    It is `data.source.template`, that of its run where it is part of one, or else that of its
    tokenizer. Warns if nothing says that the model has seen conversations.
    """
    asked = config if run_dir is None else read_run_config(run_dir)
    is_new = run_dir is not None and asked.model.initial_weights is None
    chats = [source for source in asked.data.named_sources.values() if source.pairs]
    if not chats and (is_new or tokenizer.chat_template is None):
        log.warning(
            "%s: was not trained on conversations, as far as its files say; "
            "infini generate continues a text",
            folder,
        )
    sources = chats or asked.data.named_sources.values()
    return tokenizer.chat(next(iter(sources)).template)


class Conversation:
    """Turns of a user and a model, in the form that conversations had in its training.

    What was said is not read again, unless others have filled the model's cache since: the cost of
    a turn does not grow with the conversation. A reply that is not read to its end is forgotten.
    """

    def __init__(self, model: Model, seed: int = 0) -> None:
        """Begin without a message; equal seeds and turns give equal answers.

        Raises `UserError` for a model of diffusion, `DataError` as `Model.answer_ends`.
        """
        check_seed(seed)
        self._model, self._seed, self._ends = model, seed, model.answer_ends
        _ = model.engine
        self._messages, self._session = list[Message](), ""

    def reply(self, text: str) -> Iterator[str]:
        """Yield the model's answer to `text`, up to what closes it.

        Raises `DataError` in one line if the template refuses the conversation.
        """
        asked: list[Message] = [{"role": USER, "content": text}]
        try:
            yield from self._answer(asked, follows=bool(self._messages))
        except SessionLostError:
            yield from self._answer(asked, follows=False)

    def _answer(self, asked: list[Message], *, follows: bool) -> Iterator[str]:
        """Answer after the last answer, if `follows`, or else after a text with all messages.

        Raises `SessionLostError` before the first piece.
        """
        model, name = self._model, uuid.uuid4().hex
        request = Request(
            ids=model.turn_ids(asked if follows else [*self._messages, *asked], follows=follows),
            sampling=model.sampling,
            max_tokens=model.sampling.max_new_tokens,
            end_token_ids=self._ends,
            seed=(self._seed, len(self._messages) // 2),
            session=self._session if follows else None,
            name=name,
        )
        pieces = list[str]()
        try:
            for piece in model.answer(request):
                pieces.append(piece.text)
                if piece.finish_reason is not None:
                    said = {"role": ASSISTANT, "content": "".join(pieces)}
                    self._messages, self._session = [*self._messages, *asked, said], name
                yield piece.text
        finally:
            request.is_cancelled = True

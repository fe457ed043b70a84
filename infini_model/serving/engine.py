"""Generation for many clients at once: one thread reads their prompts and writes their answers.

In each turn some prompts are read by one chunk, then all answers grow by one token in one forward
pass, wherever each is in its text. A prompt is read from the end of the longest known text that it
begins with, or follows an earlier answer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infini_model.config import SampleConfig
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.model.generate import check_tokens, chunk_width, draw, read_prompts
from infini_model.model.llama import InfiniLlama
from infini_model.model.state import State
from infini_model.runtime.errors import UserError, describe_error
from infini_model.serving.known_texts import Known, KnownTexts, Text, borders
from infini_model.serving.requests import Accepted, Answer, EngineError, Request, ScoredToken

log = logging.getLogger(__name__)

# Texts that are read or written at once; more wait until one of them has ended.
MOST_ROWS = 64
# Tokens of prompts that are read between two tokens of answers.
READ_BESIDE = 512
# OpenAI's log-probability of what is next to impossible.
UNLIKELY = -9999.0


class _Row:
    """A request, how far it has been read, and its answer.

    Attributes:
        text: What `state` has read.
        left: The tokens of the prompt after that.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, text: Text, state: State) -> None:
        self.request, self.text, self.state = request, text, state
        self.left, self.answer = np.asarray(request.ids), Answer(request, tokenizer)
        self.generator = np.random.default_rng(request.seed)


class Engine:
    """The thread that reads and writes, and what it works on."""

    def __init__(self, model: InfiniLlama, tokenizer: Tokenizer, known: KnownTexts) -> None:
        """Start the thread; the model is a causal one."""
        self._model, self._tokenizer, self._known = model, tokenizer, known
        self._length = model.config.segment_length
        self._arrived, self._stops = queue.SimpleQueue[Request | None](), False
        self._reading, self._writing = list[_Row](), list[_Row]()
        # Of the rows that are written.
        self._state: State | None = None
        self._logits = model.lm_head.weight.new_empty(0, model.lm_head.out_features)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Have a request answered by calls of its `emit`.

        Raises `UserError` if its prompt is empty or has a token outside the vocabulary.
        """
        if not len(request.ids):
            raise UserError("prompt: is empty")
        check_tokens("prompt", torch.as_tensor(request.ids), self._model.lm_head.out_features)
        self._arrived.put(request)

    def stop(self) -> None:
        """End the thread after its turn; unfinished answers fail."""
        self._stops = True
        self._arrived.put(None)

    def close(self) -> None:
        """Stop the thread and wait for its end, unless it is this one."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        requests = list[Request]()
        while not self._stops:
            try:
                for request in self._arrivals():
                    requests = [request]
                    self._begin(request)
                requests = [row.request for row in (*self._reading, *self._writing)]
                self._read()
                self._write()
            except UserError as error:
                self._fail(requests, error)
            except Exception as error:  # such as a lack of memory; all who wait are to know
                log.exception("%d requests have failed", len(requests))
                self._fail(
                    requests, EngineError(f"the request has failed: {describe_error(error)}")
                )
        stopping = EngineError("the server is stopping")
        self._fail([row.request for row in (*self._reading, *self._writing)], stopping)
        while waiting := self._arrived.get() if self._arrived.qsize() else None:
            waiting.emit(stopping)

    def _fail(self, requests: list[Request], failure: Exception) -> None:
        """Report a failure to these requests, and drop their rows."""
        for request in requests:
            request.emit(failure)
        self._reading = [row for row in self._reading if row.request not in requests]
        if any(row.request in requests for row in self._writing):
            self._writing, self._state, self._logits = [], None, self._logits[:0]

    def _arrivals(self) -> Iterator[Request]:
        """Yield requests for which there is room; wait for one if there is nothing else to do."""
        while (rows := len(self._reading) + len(self._writing)) < MOST_ROWS:
            try:
                request = self._arrived.get(block=not rows)
            except queue.Empty:
                return
            if request is None:
                return
            yield request

    def _begin(self, request: Request) -> None:
        """Find out from where a request is to be read. Raises `UserError` for a lost session."""
        known: Known | None
        if request.session is not None:
            known = self._known.named(request.session)
            request.ids = np.concatenate((np.asarray(known.unread, dtype=np.int64), request.ids))
        elif known := self._known.longest(request.ids):
            request.ids = request.ids[known.text.length :]
        if known is None:
            text, state = Text(), self._model.empty_state(1)
        else:
            text, state = known.text, known.state.to(self._logits.device)
        request.emit(Accepted(text.length + len(request.ids), text.length))
        self._reading.append(_Row(request, self._tokenizer, text, state))

    def _read(self) -> None:
        """Read a chunk of the first prompt, and of those that fit into the same pass."""
        self._reading = [row for row in self._reading if not row.request.is_cancelled]
        if not self._reading:
            return
        chunks = self._chunks()
        rows, lengths = list(chunks), torch.tensor([len(ids) for ids in chunks.values()])
        padded = pad_sequence([torch.tensor(ids) for ids in chunks.values()], batch_first=True)
        state = State.joined([row.state for row in rows])
        logits, state = read_prompts(self._model, padded, lengths, state)
        # Those that go on come last, so that none waits for a long prompt.
        self._reading = [row for row in self._reading if row not in chunks]
        done = list[int]()
        for index, (row, ids) in enumerate(chunks.items()):
            places = self._places(row)
            row.text = row.text.followed_by(ids)
            row.left, row.state = row.left[len(ids) :], state.rows([index])
            if row.left.size:
                self._reading.append(row)
                if row.text.length in places:
                    self._known.keep(row.text, row.state)
            elif row.request.max_tokens:
                self._known.keep(row.text, row.state)
                done.append(index)
            else:
                self._known.keep(row.text, row.state, row.request.name)
                row.answer.emit("", "length")
        if done:
            self._writing += [rows[index] for index in done]
            before = [] if self._state is None else [self._state]
            self._state = State.joined([*before, state.rows(done)])
            self._logits = torch.cat((self._logits, logits[done]))

    def _places(self, row: _Row) -> set[int]:
        """Return where in its text the state of a row is kept; it is read up to there by itself."""
        end = row.text.length + len(row.left)
        return borders(end, self._length) if self._known.most_bytes else set()

    def _chunks(self) -> dict[_Row, np.ndarray]:
        """Choose the rows that are read in one pass, and what of each: no further than a border.

        They are in open segments that they do not leave, or begin as many whole segments.
        """
        width = chunk_width(len(self._reading), self._length)
        if self._writing:
            width = min(width, max(1, READ_BESIDE // self._length) * self._length)
        chunks = dict[int | _Row, dict[_Row, np.ndarray]]()
        for row in self._reading:
            start, open_tokens = row.text.length, row.text.length % self._length
            places = [place - start for place in self._places(row) if place > start]
            ids = row.left[: min(width, *places, len(row.left))]
            alike: int | _Row = len(ids) // self._length if not open_tokens else row
            if open_tokens + len(ids) <= self._length:
                alike = 0
            chunks.setdefault(alike, {})[row] = ids
        return next(iter(chunks.values()))

    def _write(self) -> None:
        """Draw a token of each answer, and read those that do not end one."""
        if self._state is None:
            return
        tokens = self._draw()
        scores, going = self._scores(tokens), list[int]()
        for index, (row, token) in enumerate(zip(self._writing, tokens, strict=True)):
            request = row.request
            if request.is_cancelled:
                continue
            if not row.answer.add(token, scores.get(index)):
                row.text = row.text.followed_by([token])
                going.append(index)
                continue
            unread = () if token in request.end_token_ids else (token,)
            self._known.keep(row.text, self._state.rows([index]), request.name, unread)
        if len(going) < len(tokens):
            self._writing = [self._writing[index] for index in going]
            self._state = self._state.rows(going) if going else None
            self._logits = self._logits[going]
        if self._state is not None:
            model, ids = self._model, torch.tensor([tokens[index] for index in going])
            with model.precision.autocast(self._logits.device):
                hidden, self._state = model.advance(
                    ids[:, None].to(self._logits.device), self._state, in_place=True
                )
                self._logits = model.lm_head(hidden[:, -1])

    def _draw(self) -> list[int]:
        """Draw the next token of each answer, together where the settings are equal."""
        drawn = torch.tensor([row.generator.random() for row in self._writing], dtype=torch.float64)
        alike = dict[SampleConfig, list[int]]()
        for index, row in enumerate(self._writing):
            alike.setdefault(row.request.sampling, []).append(index)
        tokens = torch.empty(len(drawn), dtype=torch.int64)
        for settings, rows in alike.items():
            tokens[rows] = draw(settings, self._logits[rows], drawn[rows]).cpu()
        drawn_tokens: list[int] = tokens.tolist()
        return drawn_tokens

    def _scores(self, tokens: list[int]) -> dict[int, ScoredToken]:
        """Score the tokens of those rows that ask for it."""
        scores = dict[int, ScoredToken]()
        for index, (row, token) in enumerate(zip(self._writing, tokens, strict=True)):
            if (count := row.request.likeliest) is not None:
                logprobs: Tensor = self._logits[index].float().log_softmax(-1)
                logprobs = logprobs.clamp(min=UNLIKELY)  # JSON has no infinity
                best = logprobs.topk(min(count, len(logprobs)))
                likeliest = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                scores[index] = ScoredToken(token, float(logprobs[token]), likeliest)
        return scores

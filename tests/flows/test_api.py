"""`infini api`, driven by OpenAI's own client."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import httpx
import pytest
import torch
from commands import PATIENCE, Running, infini, infini_here
from openai import APIError, APIStatusError, OpenAI
from ports import free_port
from real import smollm2
from templates import of_messages
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.serving.servers import prefect_dir, running_apis
from infini_model.config import load_config
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_tokenizer, tokenizer_of
from infini_model.data.tokenizers.tokenizer import Tokenizer, prompt_ids
from infini_model.model.generate import generate
from infini_model.model.llama import InfiniLlama
from infini_model.serving.engine import MOST_ROWS

KEY = "a-key"
PROMPT = "the stone under the river"
SIGNED_IN = {"Authorization": f"Bearer {KEY}"}
ENDLESS = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10**9}


class Server(NamedTuple):
    """A running server, and what it serves."""

    process: Running
    port: int
    output: Path
    model: InfiniLlama
    tokenizer: Tokenizer

    @property
    def client(self) -> OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return OpenAI(base_url=url, api_key=KEY, timeout=PATIENCE, max_retries=0)

    def answer(self, prompt: str, most: int) -> str:
        """What the model says, greedily."""
        ids, ends = prompt_ids(self.tokenizer, prompt), self.tokenizer.end_token_ids
        options = {"max_new_tokens": most, "temperature": 0, "eos_token_id": ends}
        (new,) = generate(self.model, [ids], **options)
        return self.tokenizer.decode([token for token in new if token not in ends])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("api")
    folder, output, port = root / "tiny", root / "output", free_port()
    definition = train_tokenizer([["the stone under the river is a stone"]], 300).text
    shape = {"vocab_size": 301, "initializer_range": 0.4, "window_segments": 1}
    model = tiny_model(dtype=torch.float32, **shape)
    (root / "tokenizer.json").write_text(definition)
    # It writes letters that no merge has.
    letters = load_tokenizer(str(root / "tokenizer.json")).encode_batch([*"fgjk"]).ids.tolist()
    others = [token for token in range(shape["vocab_size"]) if token not in letters]
    model.lm_head.weight.data[others] = 0.0
    model.save_pretrained(folder)
    (root / "tokenizer.json").rename(folder / "tokenizer.json")
    stated = {"chat_template": of_messages("<{role}>{content}"), "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    environment = os.environ | {"INFINI_API_KEY": KEY, "INFINI_OUTPUT_DIR": str(output)}
    settings = ("evaluation.sample.temperature=0", "training.precision=fp32", "launch.gpus=cpu")
    command = infini("api", folder, *settings, "--port", str(port))
    process = Running(command, root / "log", environment)
    try:
        process.wait_for("Ready.")
        tokenizer = tokenizer_of(folder, "here")
        assert tokenizer is not None
        yield Server(process, port, output, InfiniLlama.from_pretrained(folder), tokenizer)
    finally:
        process.end()


def test_completions_are_those_of_infini_generate(server: Server) -> None:
    client, ask = server.client, {"model": "tiny", "max_tokens": 12}
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.completions.create(prompt=PROMPT, **ask)
    (choice,), usage = whole.choices, whole.usage
    assert choice.text == server.answer(PROMPT, 12)
    assert (choice.finish_reason, usage.completion_tokens) == ("length", 12)
    assert usage.prompt_tokens == len(server.tokenizer.encode_batch([PROMPT]).ids)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = client.completions.create(prompt=PROMPT, **ask, **options)
    assert "".join(part.choices[0].text for part in parts) == choice.text
    assert (last.choices, last.usage.completion_tokens) == ([], 12)
    ids = server.tokenizer.encode_batch([PROMPT]).ids.tolist()
    several = client.completions.create(prompt=[ids, ids[:3]], n=2, **ask)
    assert [each.index for each in several.choices] == [0, 1, 2, 3]
    assert several.choices[1].text == choice.text != several.choices[2].text
    stop = choice.text[4:7]
    cut = client.completions.create(prompt=PROMPT, stop=[stop, "?!"], **ask).choices[0]
    assert (cut.text, cut.finish_reason) == (choice.text.partition(stop)[0], "stop")


def test_draws_have_seeds_and_tokens_scores(server: Server) -> None:
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "temperature": 1.0, "seed": 4}
    first, again, other = (
        server.client.completions.create(**ask | change, logprobs=2).choices[0]
        for change in ({}, {}, {"seed": 5})
    )
    assert first == again
    assert first.text != other.text
    assert len(first.logprobs.tokens) == len(first.logprobs.token_logprobs) == 9
    assert all(len(each) <= 2 for each in first.logprobs.top_logprobs)
    told = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "a river"}]}],
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=3,
        stream=True,
    )
    chunks = [chunk.choices[0] for chunk in told]
    assert [chunk.delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    scored = [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content]
    assert len(scored) == 9
    # Greedily, the token itself is the likeliest.
    assert all(each.logprob == each.top_logprobs[0].logprob for each in scored)


def test_a_session_costs_what_is_new_and_says_what_the_whole_conversation_does(
    server: Server,
) -> None:
    create, ask = server.client.chat.completions.create, {"model": "tiny", "max_tokens": 5}
    messages, session = list[Any](), None
    for said in ("the stone " * 200, "is it?", "and the river?"):
        new = [{"role": "user", "content": said}]
        messages += new
        extra = {"extra_body": {"session": session}} if session else {}
        turn = create(messages=new, **ask, **extra)
        whole = create(messages=messages, **ask)
        assert turn.choices[0].message == whole.choices[0].message
        assert turn.usage.prompt_tokens == whole.usage.prompt_tokens
        if session:
            fresh = turn.usage.prompt_tokens - turn.usage.prompt_tokens_details.cached_tokens
            assert fresh < 60
        messages.append({"role": "assistant", "content": turn.choices[0].message.content})
        session = turn.id


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "other"}, 404, "model: got 'other'; this server has 'tiny'"),
        ({"prompt": ""}, 400, "prompt: is empty"),
        ({"prompt": []}, 400, "prompt: got 0 prompts with 1 answers each"),
        ({"prompt": [2**63]}, 400, "prompt.0: Input should be less than 2147483648"),
        ({"prompt": {}}, 400, "prompt: Input should be a valid string"),
        ({"prompt": [9999]}, 400, "prompt: token 9999 is outside the vocabulary of 301"),
        ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"stop": ""}, 400, "stop: String should have at least 1 character"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty: is not supported"),
        ({"extra_body": {"session": "chatcmpl-1"}}, 400, "session: takes the id of a response"),
        ({"extra_body": {"session": "cmpl-1"}}, 400, "session: 'cmpl-1' is not the id of a resp"),
        ({"extra_body": {"session": "cmpl-1"}, "stream": True}, 400, "session: 'cmpl-1' is not"),
    ],
)
def test_a_mistake_is_refused_in_one_line(
    server: Server, change: dict[str, Any], status: int, message: str
) -> None:
    ask = {"model": "tiny", "prompt": PROMPT, "frequency_penalty": 0, "user": "me"}
    with pytest.raises(APIStatusError) as refused:
        server.client.completions.create(**ask | change)
    assert refused.value.status_code == status
    assert refused.value.body["message"].startswith(message)
    assert refused.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON: "),
        (b"null", "the body: Field required"),
        (b'{"model":"tiny","prompt":"\\ud800"}', "the text has half of a character"),
        (b'{"model":"tiny","prompt":["a","\\ud800"]}', "the text has half of a character"),
    ],
)
def test_a_body_that_no_client_sends_is_refused_in_one_line(
    server: Server, body: bytes, message: str
) -> None:
    url, headers = (
        f"http://127.0.0.1:{server.port}/v1/completions",
        {"Content-Type": "application/json"},
    )
    told = httpx.post(url, content=body, headers=SIGNED_IN | headers, timeout=PATIENCE)
    assert told.status_code == HTTPStatus.BAD_REQUEST
    assert told.json()["error"]["message"].startswith(message)


def test_settings_that_ask_for_nothing_are_accepted(server: Server) -> None:
    neutral = {"n": None, "stream": None, "max_tokens": 3, "max_completion_tokens": None}
    extra = {"response_format": {"type": "text"}, "tool_choice": "none", "seed": -1}
    messages = [{"role": "user", "content": "a river"}]
    said = server.client.chat.completions.create(
        model="tiny", messages=messages, extra_body=neutral | extra
    )
    assert said.usage.completion_tokens == 3


def test_only_programs_with_the_key_are_answered(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}"
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}

    def status(path: str = "/v1/completions", **headers: str) -> int:
        return httpx.post(url + path, json=ask, headers=headers, timeout=PATIENCE).status_code

    assert status(**SIGNED_IN) == HTTPStatus.OK
    assert status() == HTTPStatus.UNAUTHORIZED
    assert status(Authorization="Bearer guessed") == HTTPStatus.UNAUTHORIZED
    assert status(**SIGNED_IN, Origin="http://evil.example") == HTTPStatus.FORBIDDEN
    assert status(**SIGNED_IN, Host="evil.example") == HTTPStatus.BAD_REQUEST
    assert status("/v1/nothing", **SIGNED_IN) == HTTPStatus.NOT_FOUND
    assert httpx.get(f"{url}/health").status_code == HTTPStatus.OK


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_is_no_longer_answered(server: Server, stream: bool) -> None:
    body = json.dumps(ENDLESS | {"stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
    head += f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    for _ in range(MOST_ROWS):  # as many as are answered at once
        with closing(socket.create_connection(("127.0.0.1", server.port), PATIENCE)) as client:
            client.sendall(head.encode() + body)
            if stream:
                assert client.recv(9) == b"HTTP/1.1 "
    ask = ENDLESS | {"max_tokens": 3}
    assert server.client.completions.create(**ask).choices[0].finish_reason == "length"


def test_a_model_that_cannot_be_served_is_refused_in_one_line(
    server: Server, tmp_path: Path
) -> None:
    server.model.save_pretrained(tmp_path / "model")
    for option, value, message in (
        ("--port", str(server.port), "--host, --port: Address already in use"),
        (
            "--host",
            "0.0.0.0",
            "--host: 0.0.0.0 is open to other machines, so it needs an --api-key",
        ),
        ("--port", str(free_port()), "has no tokenizer.json and is not part of a run"),
    ):
        told = infini_here("api", tmp_path / "model", option, value, env={})
        assert told.returncode == 2
        assert message in told.stderr
        assert told.stderr.count("\n") == 1


def test_infini_serve_knows_it_while_it_runs(server: Server) -> None:
    home = prefect_dir(load_config(overrides=[{"run": {"output_dir": str(server.output)}}]))
    assert running_apis(home) == {f"http://127.0.0.1:{server.port}/v1  tiny"}
    # It ends also while it answers, and says so.
    pieces = iter(server.client.completions.create(**ENDLESS, stream=True))
    next(pieces)
    server.process.process.send_signal(signal.SIGINT)
    with pytest.raises(APIError, match="the server is stopping"):
        list(pieces)
    assert server.process.wait() == 0
    assert "Traceback" not in server.process.output
    assert running_apis(home) == set()


def test_a_real_llama_chats_as_in_transformers(tmp_path: Path) -> None:
    folder, port = smollm2(), free_port()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    settings = ("evaluation.sample.temperature=0", "training.precision=fp32", "launch.gpus=cpu")
    environment = os.environ | {"INFINI_OUTPUT_DIR": str(tmp_path)}
    command = infini("api", folder, *settings, "--port", str(port))
    process = Running(command, tmp_path / "log", environment)
    try:
        process.wait_for("Ready.")
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", timeout=PATIENCE)
        said = client.chat.completions.create(model=folder.name, messages=messages)
    finally:
        process.end()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = theirs.generate(**prompt, do_sample=False, max_new_tokens=200)
    new = ids[0, prompt["input_ids"].size(1) :]
    assert said.choices[0].message.content == tokenizer.decode(new, skip_special_tokens=True)
    assert said.choices[0].finish_reason == "stop"
    assert said.usage.completion_tokens == len(new)

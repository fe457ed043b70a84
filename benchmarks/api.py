"""`infini api` beside `transformers serve` with the same plain Llama, and a token after long texts.

Clients ask for the answers to different questions at the same time, each its next one when it has
an answer; all are streamed, by OpenAI's client. Then a model with a memory reads texts of growing
length once each, and is asked about them in a session.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from openai import OpenAI

from benchmarks.report import publish, spread
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.processes import bound, end_tree, wait_until

BIN = Path(sys.executable).parent
WORDS = "stone river house city war music science history people language ship tower king"


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api", description=__doc__)
    parser.add_argument("--llama", type=Path, help="folder of a Llama with a chat template")
    parser.add_argument("--memory", type=Path, help="run or folder of a model with a memory")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 32_000, 1_000_000])
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


@contextlib.contextmanager
def served(command: list[str], port: int) -> Iterator[OpenAI]:
    """A client of the server that `command` starts."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        env = os.environ | {"HF_HUB_OFFLINE": "1", "INFINI_OUTPUT_DIR": folder}
        process = subprocess.Popen(
            bound([*command, "--port", str(port)]), stdout=log, stderr=log, env=env
        )

        def is_up() -> bool:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                return True
            return process.poll() is not None

        try:
            wait_until(is_up, every_seconds=0.2, timeout_seconds=300)
            if process.poll() is not None:
                sys.exit((Path(folder) / "log").read_text())
            yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", timeout=3600)
        finally:
            end_tree(process, 5.0)


def question(seed: int) -> list[dict[str, Any]]:
    """A message of some fifty tokens."""
    words = " ".join(np.random.default_rng(seed).choice(WORDS.split(), 40))
    return [{"role": "user", "content": f"Write a long story with these words: {words}"}]


def first_and_all(client: OpenAI, model: str, seed: int, new_tokens: int) -> tuple[float, int]:
    """The seconds to the first token of an answer, and the pieces that came."""
    began, first, pieces = time.perf_counter(), 0.0, 0
    answer = client.chat.completions.create(
        model=model,
        messages=question(seed),
        max_tokens=new_tokens,
        temperature=0,
        stream=True,
    )
    for chunk in answer:
        if chunk.choices and chunk.choices[0].delta.content:
            first, pieces = first or time.perf_counter() - began, pieces + 1
    return first, pieces


def crowd(
    client: OpenAI, model: str, clients: int, options: argparse.Namespace
) -> dict[str, float]:
    """Requests per second, and the median of the seconds to the first token."""

    def one(number: int) -> list[float]:
        seeds = range(number * options.requests, (number + 1) * options.requests)
        told = [first_and_all(client, model, seed, options.new_tokens) for seed in seeds]
        return [first for first, _ in told]

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        firsts = [first for each in pool.map(one, range(clients)) for first in each]
    seconds = time.perf_counter() - began
    return {"requests/s": len(firsts) / seconds, "first token, s": statistics.median(firsts)}


def plain(llama: Path, folder: Path) -> str:
    """A copy of a Llama that has no memory, which both servers open."""
    InfiniLlama.from_pretrained(llama, memory="none").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (llama / name).is_file():
            shutil.copy(llama / name, folder)
    return str(folder)


def beside_transformers(options: argparse.Namespace, folder: str) -> None:
    """Compare the servers in turns, both idle while the other works."""
    ours = [str(BIN / "infini"), "api", folder, "training.precision=fp32", "launch.gpus=cpu"]
    theirs = [str(BIN / "transformers"), "serve", folder, "--dtype", "float32", "--device", "cpu"]
    with served(ours, 8301) as our, served(theirs, 8302) as their:
        peers = {"infini api": (our, Path(folder).name), "transformers serve": (their, folder)}
        for client, model in peers.values():
            first_and_all(client, model, 0, 4)
        rows, ratios = [], {}
        for clients in options.clients:
            turns = [
                {name: crowd(*peer, clients, options) for name, peer in peers.items()}
                for _ in range(options.turns)
            ]
            for name in peers:
                medians = {
                    key: statistics.median(turn[name][key] for turn in turns)
                    for key in turns[0][name]
                }
                rows.append({"clients": clients, "": name, **medians})
            speed = [
                t["infini api"]["requests/s"] / t["transformers serve"]["requests/s"] for t in turns
            ]
            ratios[f"requests per second, {clients} clients"] = spread(speed)
            wait = [
                t["transformers serve"]["first token, s"] / t["infini api"]["first token, s"]
                for t in turns
            ]
            ratios[f"time to the first token, {clients} clients"] = spread(wait)
    heading = f"{options.llama.name}, answers of {options.new_tokens} tokens, float32"
    publish("api", heading, rows, ratios, dict.fromkeys(ratios, 1.0))


def after_long_texts(options: argparse.Namespace) -> None:
    """Read a text once, and ask ten times about it."""
    ours = [str(BIN / "infini"), "api", str(options.memory), "launch.gpus=cpu"]
    rows = list[dict[str, Any]]()
    with served(ours, 8303) as client:
        (model,) = [each.id for each in client.models.list()]
        ask: dict[str, Any] = {"model": model, "temperature": 0}
        for length in options.lengths:
            ids = np.random.default_rng(length).integers(32, 120, length).tolist()
            began = time.perf_counter()
            read = client.completions.create(prompt=ids, max_tokens=0, **ask)
            reading, session = time.perf_counter() - began, {"session": read.id}
            first, token = list[float](), list[float]()
            for number in range(10):
                began, times = time.perf_counter(), list[float]()
                for _ in client.completions.create(
                    prompt=f"and what {number}?",
                    max_tokens=64,
                    stream=True,
                    extra_body=session,
                    **ask,
                ):
                    times.append(time.perf_counter() - began)
                first.append(times[0])
                token.append((times[-1] - times[0]) / (len(times) - 1) * 1000)
            rows.append(
                {
                    "context, tokens": length,
                    "read once, s": reading,
                    "first token, s": statistics.median(first),
                    "a token, ms": statistics.median(token),
                }
            )
    name = "a token after the longest / the shortest"
    ratio = {name: spread([rows[-1]["a token, ms"] / rows[0]["a token, ms"]])}
    heading = f"{options.memory.name}, asked ten times"
    publish("api_long", heading, rows, ratio, limits={name: 1.25})


def main() -> None:
    """Measure what the options name."""
    options = parse()
    if options.llama is not None:
        with tempfile.TemporaryDirectory() as root:
            beside_transformers(options, plain(options.llama, Path(root) / "llama"))
    if options.memory is not None:
        after_long_texts(options)


if __name__ == "__main__":
    main()

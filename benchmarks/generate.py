"""Tokens generated per second in bfloat16, relative to a peer that casts the weights in each pass.

The peer is the same model under autocast alone, which casts each float32 weight for every token.
The time is that of the tokens after the first: reading the prompt and casting once are not in it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch

from benchmarks.report import publish, speed_ratio, take_turns
from infini_model.config import ModelConfig, SampleConfig
from infini_model.model.generate import read_prompts, stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import PRECISIONS, cast_weights

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def parse() -> argparse.Namespace:
    """The options; defaults depend on whether there is a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=2048 if CUDA else 512)
    parser.add_argument("--layers", type=int, default=16 if CUDA else 4)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--segment", type=int, default=512, help="tokens")
    parser.add_argument("--prompt", type=int, default=700, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


def build(options: argparse.Namespace) -> InfiniLlama:
    """A model with random weights."""
    width = options.hidden_size
    shape = ModelConfig(
        vocab_size=options.vocabulary,
        hidden_size=width,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, width // 64),
        intermediate_size=width * 11 // 4,
        segment_length=options.segment,
    )
    torch.manual_seed(0)
    model = InfiniLlama(shape).to(DEVICE).eval()
    model.precision = PRECISIONS["bf16"]
    return model


def ours(model: InfiniLlama, prompt: torch.Tensor, new_tokens: int) -> tuple[list[int], float]:
    """The greedy tokens, and the seconds of all but the first."""
    tokens = stream(model, prompt, SampleConfig(max_new_tokens=new_tokens, temperature=0.0))
    found, began = [next(tokens)[0]], time.perf_counter()
    found += [each for (each,) in tokens]
    return [each for each in found if each is not None], time.perf_counter() - began


@torch.inference_mode()
def casting(model: InfiniLlama, prompt: torch.Tensor, new_tokens: int) -> tuple[list[int], float]:
    """As `ours`, with the casts of autocast in each pass."""
    logits, state = read_prompts(model, prompt, torch.tensor([prompt.size(1)]))
    found, began = [int(logits.argmax(-1))], time.perf_counter()
    with model.precision.autocast(DEVICE):
        while len(found) < new_tokens:
            token = torch.tensor([found[-1:]], device=DEVICE)
            hidden, state = model.advance(token, state, in_place=True)
            found.append(int(model.lm_head(hidden[:, -1]).argmax(-1)))
    return found, time.perf_counter() - began


def main() -> None:
    """Measure in turns and print the results."""
    options = parse()
    model = build(options)
    cast = copy.deepcopy(model)
    cast_weights(cast, model.precision)
    prompt = torch.randint(options.vocabulary, (1, options.prompt))
    both = {"ours": (ours, cast), "cast in each pass": (casting, model)}
    told = [way(given, prompt, options.new_tokens)[0] for way, given in both.values()]
    assert told[0] == told[1]
    peers = {
        name: lambda way=way, given=given: way(given, prompt, options.new_tokens)[1]
        for name, (way, given) in both.items()
    }
    seconds = take_turns(peers, options.turns)
    rows = [
        {"": name, "tokens/s": (options.new_tokens - 1) / statistics.median(each)}
        for name, each in seconds.items()
    ]
    ratio = speed_ratio(*seconds.values())
    name = "ours / cast in each pass"
    heading = f"{options.layers} layers of {options.hidden_size}, {options.vocabulary:,} entries"
    publish("generate", heading, rows, {name: ratio}, {name: 1.0})


if __name__ == "__main__":
    main()

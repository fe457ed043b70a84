"""A real pretrained Llama that is cut into segments: what its window and its sinks give back."""

import sysconfig
from pathlib import Path

import torch
from real import smollm2
from torch.nn import functional

from infini_model.data.tokenizers.load import tokenizer_of
from infini_model.model.llama import InfiniLlama

LENGTH, SEGMENT = 1536, 256


def test_a_window_with_sinks_gives_back_most_of_what_the_cut_costs_a_pretrained_llama():
    """Without sinks it is no better than the cut: the first tokens take the attention to spare."""
    folder = smollm2()
    tokenizer = tokenizer_of(folder, str(folder))
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    ids = torch.from_numpy(tokenizer.encode_batch([text]).ids[: LENGTH + 1].astype("int64"))

    def loss(**cut):
        """Of the tokens that no form sees whole, in nats."""
        model = InfiniLlama.from_pretrained(folder, **{"segment_length": SEGMENT} | cut)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(ids[None, :-1])[0, 2 * SEGMENT :]
            logits = model.lm_head(hidden).float()
        return functional.cross_entropy(logits, ids[2 * SEGMENT + 1 :]).item()

    whole, cut = loss(segment_length=LENGTH, memory="none"), loss(memory="none")
    window = loss(memory="none", window_segments=1, window_sinks=0)
    with_sinks = loss(window_segments=1)  # the default of a pretrained Llama, and a new memory
    assert whole < with_sinks < whole + 0.5 * (cut - whole)
    assert window > with_sinks + 0.1

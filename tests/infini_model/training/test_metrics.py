"""The FLOPs counted are those executed."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from infini_model.model.llama import InfiniLlama
from infini_model.training.metrics import flops_per_token, peak_flops

LENGTH = 8
CONFIG = tiny_config(segment_length=LENGTH)


def matrix_flops(model: InfiniLlama, tokens: torch.Tensor) -> int:
    """FLOPs of the products of activations with parameters, as counted by PyTorch at run time.

    It does not see into the operator that computes the loss, whose products are those of logits.
    """
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    return counter.get_flop_counts()["Global"][torch.ops.aten.mm]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("bidirectional", "attended"), [(False, LENGTH / 2), (True, LENGTH)])
def test_matrix_flops_match_those_executed(
    tied: bool, bidirectional: bool, attended: float
) -> None:
    config = CONFIG.model_copy(
        update={"memory": "none", "tie_word_embeddings": tied, "bidirectional": bidirectional}
    )
    model, tokens = InfiniLlama(config), torch.zeros(3, 2 * LENGTH, dtype=torch.int64)
    # A query attends to so many keys on average, in scores and values; times 3 with backward.
    local = 3 * 2 * 2 * config.hidden_size * attended * config.num_hidden_layers
    expected = (flops_per_token(model, 2 * LENGTH) - local) * tokens.numel()
    assert matrix_flops(model, tokens) == expected


def test_memory_flops_count_all_segments_but_one() -> None:
    with_memory, sharp, without = (
        InfiniLlama(CONFIG.model_copy(update={"memory": memory}))
        for memory in ("linear", "residual", "none")
    )
    head_dim = CONFIG.hidden_size // 4
    # Four heads read, two are written; a multiplication and an addition; times 3 with backward.
    a_token = 3 * 2 * head_dim * head_dim * (4 + 2) * CONFIG.num_hidden_layers
    for segments in (1, 2, 5):
        length = segments * LENGTH
        more = flops_per_token(with_memory, length) - flops_per_token(without, length)
        assert more * length == pytest.approx(a_token * (segments - 1) * LENGTH)
        # Features of twice the width, and two gates for each of two heads.
        more = flops_per_token(sharp, length) - flops_per_token(without, length)
        gates = 3 * 2 * 2 * 2 * CONFIG.hidden_size * CONFIG.num_hidden_layers
        expected = 2 * a_token * (segments - 1) * LENGTH + gates * length
        assert more * length == pytest.approx(expected)


def test_a_window_costs_the_keys_of_the_segments_that_are_there() -> None:
    near, far = (
        InfiniLlama(CONFIG.model_copy(update={"window_segments": count})) for count in (0, 2)
    )
    a_key = 3 * 2 * 2 * CONFIG.hidden_size * CONFIG.num_hidden_layers
    for segments, seen in ((1, 0), (2, 1), (5, 1 + 2 + 2 + 2)):
        length = segments * LENGTH
        more = flops_per_token(far, length) - flops_per_token(near, length)
        assert more * length == pytest.approx(a_key * LENGTH * LENGTH * seen)


def test_the_peak_of_a_gpu_is_known_by_its_name() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H200 NVL") == 835e12
    assert peak_flops("NVIDIA GB200") == 2500e12
    for unknown in ("NVIDIA RTX A4000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert peak_flops(unknown) is None

"""The parameters of a model by the groups that FSDP gathers, counted without building it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from infini_model.config import LoraConfig, ModelConfig

FLOAT, HALF = 4, 2

Group = Literal["root", "attention", "mlp"]


class Matrix(NamedTuple):
    """A linear layer of a decoder layer, with its width of input and of output."""

    group: Group
    name: str
    inputs: int
    outputs: int


class Parameters(NamedTuple):
    """A tensor, or several: how many numbers there are, and how they are held."""

    group: Group
    size: int
    is_matrix: bool
    trained: bool

    @property
    def nbytes(self) -> int:
        """A frozen matrix is bfloat16, everything else float32."""
        return self.size * (HALF if self.is_matrix and not self.trained else FLOAT)


def matrices(model: ModelConfig) -> list[Matrix]:
    """The linear layers of a decoder layer."""
    hidden, inner = model.hidden_size, model.intermediate_size
    width = model.num_attention_heads * model.head_dim
    kv_width = model.key_value_heads * model.head_dim
    return [
        Matrix("attention", "q_proj", hidden, width),
        Matrix("attention", "k_proj", hidden, kv_width),
        Matrix("attention", "v_proj", hidden, kv_width),
        Matrix("attention", "o_proj", width, hidden),
        Matrix("mlp", "gate_proj", hidden, inner),
        Matrix("mlp", "up_proj", hidden, inner),
        Matrix("mlp", "down_proj", inner, hidden),
    ]


def layer_parameters(model: ModelConfig, lora: LoraConfig | None) -> Iterator[Parameters]:
    """The parameters of one decoder layer."""
    for matrix in matrices(model):
        yield Parameters(matrix.group, matrix.inputs * matrix.outputs, True, lora is None)
        if is_adapted(matrix, lora):
            rank = lora.r if lora is not None else 0
            yield Parameters(matrix.group, rank * (matrix.inputs + matrix.outputs), True, True)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Parameters("attention", model.hidden_size, False, is_saved(name, lora))
    if model.memory != "none":
        heads, kv_heads = model.num_attention_heads, model.key_value_heads
        own = heads
        if model.memory == "residual":
            own = heads * model.head_dim + 2 * kv_heads * model.hidden_size
        own += heads * bool(model.memory_query_shift) + kv_heads * model.memory_key_shift
        yield Parameters("attention", own, False, True)


def root_parameters(model: ModelConfig, lora: LoraConfig | None) -> Iterator[Parameters]:
    """The parameters outside the layers; `model.vocab_size` is known."""
    table = (model.vocab_size or 0) * model.hidden_size
    yield Parameters("root", model.hidden_size, False, is_saved("norm", lora))
    if model.tie_word_embeddings:
        trained = is_saved("embed_tokens", lora) or is_saved("lm_head", lora)
        yield Parameters("root", table, True, trained)
        return
    for name in ("embed_tokens", "lm_head"):
        yield Parameters("root", table, True, is_saved(name, lora))


def output_is_trained(model: ModelConfig, lora: LoraConfig | None) -> bool:
    """Whether the output layer has a gradient."""
    tied = model.tie_word_embeddings and is_saved("embed_tokens", lora)
    return tied or is_saved("lm_head", lora)


def is_adapted(matrix: Matrix, lora: LoraConfig | None) -> bool:
    """Whether LoRA puts a trained product beside a matrix."""
    return lora is not None and matrix.name in lora.target_modules


def keeps_input(matrix: Matrix, lora: LoraConfig | None) -> bool:
    """Whether the backward pass needs the input of a linear layer, as that of a frozen does not."""
    return lora is None or is_adapted(matrix, lora)


def is_saved(name: str, lora: LoraConfig | None) -> bool:
    """Whether a module without adapters is trained."""
    return lora is None or name.endswith(tuple(lora.modules_to_save))

"""Settings of the model: the section `model`, named after Hugging Face's `LlamaConfig`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from infini_model.config.section import Section


class RopeScaling(Section):
    """Llama 3.1 scaling of the rotary frequencies, for contexts longer than in pretraining.

    Wavelengths above original_max_position_embeddings / low_freq_factor are multiplied by `factor`,
    those below original_max_position_embeddings / high_freq_factor are unchanged, and those in
    between are interpolated.
    """

    rope_type: Literal["llama3"] = Field("llama3", description="Scaling method; only llama3.")
    factor: Annotated[float, Field(ge=1.0)] = Field(
        description="Factor by which the longest wavelengths are multiplied."
    )
    low_freq_factor: PositiveFloat = Field(
        description="Below this ratio of original length to wavelength, scaling is full."
    )
    high_freq_factor: PositiveFloat = Field(
        description="Above this ratio of original length to wavelength, nothing is scaled."
    )
    original_max_position_embeddings: PositiveInt = Field(
        description="Context length in pretraining, in tokens."
    )

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be below "
                f"high_freq_factor {self.high_freq_factor:g}"
            )
        return self


def _default_head_dim(fields: dict[str, Any]) -> int:
    return int(fields["hidden_size"] // fields["num_attention_heads"])


class ModelConfig(Section):
    """Shape of the model."""

    decides_weights = True

    vocab_size: PositiveInt | None = Field(
        None, description="Vocabulary size; null (default) uses the tokenizer's."
    )
    hidden_size: PositiveInt = Field(128, description="Width of the residual stream.")
    num_hidden_layers: PositiveInt = Field(2, description="Number of decoder layers.")
    num_attention_heads: PositiveInt = Field(4, description="Query heads per layer.")
    num_key_value_heads: PositiveInt | None = Field(
        None, description="Key-value heads per layer; null (default) is one per query head."
    )
    head_dim: PositiveInt = Field(
        default_factory=_default_head_dim,
        description="Width of a head; the default is hidden_size / num_attention_heads.",
    )
    intermediate_size: PositiveInt = Field(
        384, description="Width of the SwiGLU feed-forward layer."
    )
    rope_theta: PositiveFloat = Field(10_000.0, description="Base period of the rotary embedding.")
    rope_scaling: RopeScaling | None = Field(
        None, description="Llama 3.1 scaling of the rotary frequencies; null (default) is off."
    )
    rms_norm_eps: PositiveFloat = Field(1e-5, description="Epsilon of RMSNorm.")
    tie_word_embeddings: bool = Field(
        False, description="Whether the output layer shares the weights of the embedding."
    )
    initializer_range: PositiveFloat = Field(
        0.02, description="Standard deviation of the initial weights."
    )
    segment_length: PositiveInt = Field(
        128,
        description="Tokens in a segment: attention is exact within it, earlier segments are read "
        "from the compressive memory.",
    )
    memory: Literal["linear", "delta", "none"] = Field(
        "linear",
        description="Update rule of the compressive memory: linear adds new values, delta first "
        "removes the values stored under the same keys; none turns the memory off, so that no "
        "segment sees an earlier one.",
    )
    memory_key_shift: bool = Field(
        True,
        description="Whether the memory stores a value under a learned mix of its own and the "
        "previous token's key, so that it can recall what followed a token; false is the form in "
        "the paper.",
    )

    @property
    def key_value_heads(self) -> int:
        """Key-value heads per layer, with the default resolved."""
        return self.num_key_value_heads or self.num_attention_heads

    @model_serializer(mode="wrap")
    def _without_the_default_head_dim(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Omit a default `head_dim`: the fields it is computed from may be overridden later."""
        tree = serialize(self)
        if "head_dim" not in self.model_fields_set:
            tree.pop("head_dim", None)
        return tree

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, not {self.head_dim}")
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.key_value_heads}"
            )
        return self

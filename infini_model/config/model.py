"""The shape of a model: the section `model`. Names follow Hugging Face's `LlamaConfig`."""

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
    """Rotary frequencies as Llama 3.1 stretches them, for contexts longer than the pretraining's.

    Wavelengths longer than original_max_position_embeddings / low_freq_factor become `factor` times
    as long, those shorter than … / high_freq_factor stay, and between them the change is gradual.
    """

    rope_type: Literal["llama3"] = Field("llama3", description="How frequencies are changed.")
    factor: Annotated[float, Field(ge=1.0)] = Field(
        description="How many times longer the longest wavelengths become."
    )
    low_freq_factor: PositiveFloat = Field(
        description="Where the full change ends: original length / wavelength."
    )
    high_freq_factor: PositiveFloat = Field(
        description="Where the change has faded out: original length / wavelength."
    )
    original_max_position_embeddings: PositiveInt = Field(
        description="Context length of the pretraining, in tokens."
    )

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be below "
                f"high_freq_factor {self.high_freq_factor:g}"
            )
        return self


def _share_of_a_head(fields: dict[str, Any]) -> int:
    return int(fields["hidden_size"] // fields["num_attention_heads"])


class ModelConfig(Section):
    """The shape of an Infini-Llama."""

    decides_weights = True

    vocab_size: PositiveInt | None = Field(
        None, description="Entries of the embedding; None takes the tokenizer's."
    )
    hidden_size: PositiveInt = Field(128, description="Width of the residual stream.")
    num_hidden_layers: PositiveInt = Field(2, description="Decoder layers.")
    num_attention_heads: PositiveInt = Field(4, description="Query heads of a layer.")
    num_key_value_heads: PositiveInt | None = Field(
        None, description="Key-value heads of a layer; None is one for each query head."
    )
    head_dim: PositiveInt = Field(
        default_factory=_share_of_a_head,
        description="Width of one head; the default is hidden_size / num_attention_heads.",
    )
    intermediate_size: PositiveInt = Field(384, description="Width of the SwiGLU feed-forward.")
    rope_theta: PositiveFloat = Field(10_000.0, description="Base of the rotary embedding.")
    rope_scaling: RopeScaling | None = Field(
        None, description="Change of the rotary frequencies as in Llama 3.1; None leaves them."
    )
    rms_norm_eps: PositiveFloat = Field(1e-5, description="Epsilon of RMSNorm.")
    tie_word_embeddings: bool = Field(
        False, description="Whether the output layer is the embedding itself."
    )
    initializer_range: PositiveFloat = Field(
        0.02, description="Standard deviation of the first weights."
    )
    segment_length: PositiveInt = Field(
        128, description="Tokens of a segment: exact attention inside, memory beyond."
    )
    memory: Literal["linear", "delta", "none"] = Field(
        "linear",
        description="Update rule of the compressive memory: linear adds, delta overwrites what "
        "stands under the same keys; none keeps segments apart.",
    )
    memory_key_shift: bool = Field(
        True,
        description="Whether values are filed under a learned mix of their own key and the one "
        "before, so that the memory can answer what came after; false is the paper's form.",
    )

    @property
    def key_value_heads(self) -> int:
        """Key-value heads of a layer, resolved."""
        return self.num_key_value_heads or self.num_attention_heads

    @model_serializer(mode="wrap")
    def _without_the_default_head_dim(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Leave out what follows from other fields: they may be overridden in a written tree."""
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

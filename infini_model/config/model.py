"""Settings of the model: the section `model`, named after Hugging Face's `LlamaConfig`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, SerializerFunctionWrapHandler, model_serializer

from infini_model.config.section import NonEmpty, NonNegativeInt, PositiveInt, Section

Width = Annotated[int, Field(gt=0, le=1 << 20)]


class RopeScaling(Section):
    """Scaling of the rotary frequencies, for contexts longer than in pretraining.

    `linear` multiplies all wavelengths by `factor`. `llama3` multiplies those above
    original_max_position_embeddings / low_freq_factor and leaves those below
    original_max_position_embeddings / high_freq_factor; `yarn` (arXiv 2309.00071) does so by the
    number of turns in the original length, and makes the attention sharper. Both interpolate in
    between. Names and results are those of Hugging Face's `rope_parameters`.
    """

    rope_type: Literal["llama3", "linear", "yarn"] = "llama3"
    """Scaling method."""
    factor: Annotated[float, Field(ge=1.0)]
    """Factor by which the longest wavelengths are multiplied."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: below this ratio of original length to wavelength, scaling is full."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: above this ratio of original length to wavelength, nothing is scaled."""
    original_max_position_embeddings: PositiveInt | None = None
    """llama3 and yarn: context length in pretraining, in tokens."""
    beta_fast: PositiveFloat | None = None
    """yarn: with this many turns or more, nothing is scaled; null (default) is 32."""
    beta_slow: PositiveFloat | None = None
    """yarn: with this many turns or fewer, scaling is full; null (default) is 1."""
    attention_factor: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """yarn: factor of rotated queries and of rotated keys; null (default) is 0.1 ln(factor) + 1."""

    def conflicts(self) -> Iterator[str]:
        required, optional = _SCALINGS[self.rope_type]
        given = self.model_dump(exclude_none=True).keys() - {"rope_type", "factor"}
        for name in sorted(given - {*required, *optional}):
            yield f"{name}: not with rope_type={self.rope_type}"
        for name in required:
            if name not in given:
                yield f"{name}: missing, and rope_type={self.rope_type} needs it"
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            yield f"low_freq_factor {low:g} must be below high_freq_factor {high:g}"


# What each kind of scaling needs, and what it takes, beside the factor.
_LENGTH = "original_max_position_embeddings"
_SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama3": (("low_freq_factor", "high_freq_factor", _LENGTH), ()),
    "linear": ((), ()),
    "yarn": ((_LENGTH,), ("beta_fast", "beta_slow", "attention_factor")),
}


# What may be set beside `initial_weights`; the rest of the shape comes from there.
BESIDE_INITIAL_WEIGHTS = {
    "initial_weights",
    "segment_length",
    "memory",
    "memory_key_shift",
    "memory_query_shift",
    "read_weight_start",
    "window_segments",
    "window_sinks",
    "mask_token_id",
    "ignore_tokenizer",
}

# Names, in config.json, a tokenizer that has no file; `transformers` preserves and ignores it.
TOKENIZER_NAME = "infini_tokenizer"
READ_WEIGHT_START = -2.0


class ModelConfig(Section):
    """Shape of the model, or the pretrained weights that it comes from.

    With `initial_weights`, the fields that do not stand in `BESIDE_INITIAL_WEIGHTS` have no meaning
    until `infini_model.training.initial_weights` has resolved them, and are not dumped.
    """

    initial_weights: NonEmpty | None = None
    """Pretrained model to begin from, a Llama or another of its kind (Mistral, Qwen2, Qwen3,
    SmolLM3, OLMo 2, LLaDA): a Hugging Face folder, or a name on the Hub, such as
    meta-llama/Llama-3.2-1B, optionally with @revision. The shape comes from there; only
    segment_length, which is then required, window_segments, window_sinks, memory,
    memory_key_shift, memory_query_shift, read_weight_start, mask_token_id and ignore_tokenizer may
    be set beside it. null (default) draws the weights from run.seed."""
    ignore_tokenizer: bool = False
    """Whether initial_weights may be trained on a dataset whose tokenizer gives other ids than
    theirs."""
    vocab_size: Annotated[int, Field(gt=0, le=1 << 24)] | None = None
    """Vocabulary size; null (default) uses the tokenizer's."""
    hidden_size: Width = 128
    """Width of the residual stream."""
    num_hidden_layers: Annotated[int, Field(gt=0, le=1 << 12)] = 2
    """Number of decoder layers."""
    num_attention_heads: Width = 4
    """Query heads per layer."""
    num_key_value_heads: Width | None = None
    """Key-value heads per layer; null (default) is one per query head."""
    head_dim: Width = Field(
        default_factory=lambda fields: fields["hidden_size"] // fields["num_attention_heads"]
    )
    """Width of a head; the default is hidden_size / num_attention_heads."""
    intermediate_size: Width = 384
    """Width of the SwiGLU feed-forward layer."""
    rope_theta: PositiveFloat = 10_000.0
    """Base period of the rotary embedding."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; null (default) is off."""
    no_rope_layer_interval: NonNegativeInt = 0
    """n, if every n-th layer has no rotary embedding, as in SmolLM3; 0 (default) is none."""
    attention_bias: bool = False
    """Whether the four projections of the attention have biases."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases, but not the output's, as in
    Qwen2."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMSNorm of queries and keys: head norms each head by itself, as Qwen3 does, projection all
    heads together, as OLMo 2 does."""
    post_norm: bool = False
    """Whether a layer norms the outputs of attention and feed-forward, as OLMo 2 does, not their
    inputs."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    tie_word_embeddings: bool = False
    """Whether the output layer shares the weights of the embedding."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    segment_length: PositiveInt = 128
    """Tokens in a segment: attention is exact within it, earlier segments are read from the
    compressive memory. For masked_diffusion it is the longest window; the default is that of
    initial_weights, or packing.context_length."""
    window_segments: NonNegativeInt = 0
    """Earlier segments of its document that a token sees exactly, beside its own and the memory; 0
    (default) is the form in the paper."""
    window_sinks: NonNegativeInt = 0
    """First tokens of a document that stay in sight, just before the window; the default is 0, or 4
    where window_segments is given to a pretrained model, which needs them."""
    memory: Literal["linear", "delta", "residual", "none"] = "residual"
    """Compressive memory: residual adds new values under sharp features, and what it reads to the
    attention, by a weight that starts at 0; linear is that of the paper, and delta first removes
    the values stored under the same keys; none turns the memory off, so that no segment knows
    what is older than its window."""
    memory_key_shift: bool = True
    """Whether the memory stores a value under a learned mix of its own and the previous token's
    key, so that it can recall what followed a token; false is the form in the paper."""
    memory_query_shift: bool | None = None
    """Whether the memory is read with a learned mix of a token's own and the previous token's
    query, so that a masked token can be asked for by the one before it; null (default) is true with
    training.objective=block_diffusion, false otherwise."""
    read_weight_start: float = READ_WEIGHT_START
    """Initial read weight of every head, where memory is linear or delta; its sigmoid is the share
    of the memory in the head's output, 12% at the default of -2. With
    training.objective=block_diffusion and new weights the default is 0. initial_weights with such
    a memory keep theirs; a residual memory starts at 0."""

    bidirectional: bool = False
    """Whether a position sees its whole segment, not only what precedes it; training.objective sets
    it."""
    mask_token_id: NonNegativeInt | None = None
    """Token that stands for a masked one in diffusion; null (default) takes that of
    initial_weights, or adds one to the vocabulary."""

    @property
    def has_past(self) -> bool:
        """True if a segment knows anything of those before it."""
        return self.memory != "none" or self.window_segments + self.window_sinks > 0

    @property
    def key_value_heads(self) -> int:
        """Key-value heads per layer, with the default resolved."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def beside_initial_weights(self) -> dict[str, Any]:
        """The fields that were set to change what `initial_weights` has or lacks."""
        of_weights = {"initial_weights", "ignore_tokenizer"}
        names = BESIDE_INITIAL_WEIGHTS & self.model_fields_set - of_weights
        return {name: getattr(self, name) for name in sorted(names)}

    @model_serializer(mode="wrap")
    def _without_derived_fields(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Omit a default `head_dim`: the fields it is computed from may be overridden later.

        With `initial_weights`, omit everything that was not set: it comes from there.
        """
        tree = serialize(self)
        if self.initial_weights is not None:
            kept = BESIDE_INITIAL_WEIGHTS & self.model_fields_set
            return {name: value for name, value in tree.items() if name in kept}
        if "head_dim" not in self.model_fields_set:
            tree.pop("head_dim", None)
        return tree

    def conflicts(self) -> Iterator[str]:
        # The default may come from the file of a run with another memory.
        if self.memory == "residual" and self.read_weight_start != READ_WEIGHT_START:
            yield "read_weight_start: memory=residual starts at 0; leave it out"
        if self.rope_theta <= 1 and self.rope_scaling and self.rope_scaling.rope_type == "yarn":
            yield f"rope_theta must be above 1 for yarn, not {self.rope_theta:g}"
        size, mask = self.vocab_size, self.mask_token_id
        if size is not None and mask is not None and mask >= size:
            yield f"mask_token_id {mask} is outside the vocabulary of {size} tokens"
        if self.attention_bias and self.qkv_bias:
            yield "qkv_bias: attention_bias includes it; leave it out"
        if self.window_sinks > self.segment_length:
            yield (
                f"window_sinks {self.window_sinks} is more than segment_length "
                f"{self.segment_length}"
            )
        width, heads, groups = self.hidden_size, self.num_attention_heads, self.key_value_heads
        if width % heads and "head_dim" not in self.model_fields_set:
            yield f"hidden_size {width} is not a multiple of num_attention_heads {heads}"
        if self.head_dim % 2:
            yield f"head_dim must be even for the rotary embedding, not {self.head_dim}"
        if heads % groups:
            yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"

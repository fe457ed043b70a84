"""The window: exact softmax attention of a segment to itself and to what stays in sight before it.

A segment of L tokens sees itself, the n segments before it and the first k tokens of its document,
the sinks that pretrained Llamas need (StreamingLLM, arXiv 2309.17453). It sees them in blocks, so
that the state is n · L + k keys and values. Rotary positions are relative to the segment: its own
keys are at 0 … L − 1, those of the segment before it at −L … −1, and so on, and the sinks, once
their own segment is out of sight, at the k positions before the window. Up to n + 1 segments of a
document this is plain causal attention. n = k = 0 is the paper's local attention (arXiv 2404.07143,
equation 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.kernels.attention import local_attention
from infini_model.model.rotary import Rope, rotate


def segmented(x: Tensor, length: int) -> Tensor:
    """[B, H, T, D] as [B, S, H, length, D], padded with zeros after the last token."""
    missing = -x.size(2) % length
    if missing:
        x = functional.pad(x, (0, 0, 0, missing))
    return x.reshape(*x.shape[:2], -1, length, x.size(3)).transpose(1, 2)


class Sight(NamedTuple):
    """The older tokens that the segments of a pass see, the same in all layers.

    Attributes:
        ages: The number of segments of the same document before each segment, and before the one
            that follows the last full segment, [B, S or S + 1] int64.
        mask: True where a token of a segment sees a key, [B, S, L, K]; the keys are those of
            `Window.attend`, in order.
    """

    ages: Tensor
    mask: Tensor


class Earlier(NamedTuple):
    """The keys and values, from before a pass, that stay in sight.

    Each is [B, H_kv, k + n · L, D]: the sinks, then the n segments before. Zeros where a document
    is younger.

    Attributes:
        keys: The keys before the rotation.
        values: Their values.
        rotated: The keys as a state holds them.
    """

    keys: Tensor
    values: Tensor
    rotated: Tensor


class Window(NamedTuple):
    """The exact attention of a model.

    Attributes:
        segment_length: L, tokens of a segment.
        segments: n, the segments before its own that a token sees.
        sinks: k, the first tokens of a document that stay in sight, at most L.
        causal: Whether a token sees of its own segment only what precedes it.
        backend: Kernel of the attention; one of `LaunchConfig.attention_backend`.
    """

    segment_length: int
    segments: int = 0
    sinks: int = 0
    causal: bool = True
    backend: str = "auto"

    @property
    def kept(self) -> int:
        """Keys and values of older tokens that a segment sees."""
        return self.sinks + self.segments * self.segment_length

    def sight(self, starts: Tensor | None, before: Tensor, tokens: int) -> Sight | None:
        """Return what the segments of a pass over `tokens` see; None if that is only themselves.

        Args:
            starts: [B, ceil(T / L)] bool, true where a segment starts a document; None is nowhere.
            before: Full segments of its document that each row has seen before the pass, [B] int64.
            tokens: T.
        """
        if not self.kept:
            return None
        length = self.segment_length
        count = -(-tokens // length)
        numbers = torch.arange(tokens // length + 1, device=before.device)
        ages = numbers + before[:, None]
        if starts is not None:
            starts = functional.pad(starts, (0, len(numbers) - count))
            origins = torch.where(starts, numbers, -1).cummax(1).values
            ages = torch.where(origins < 0, ages, numbers - origins)
        own = torch.ones(length, length, dtype=torch.bool, device=before.device)
        own = own.tril() if self.causal else own
        older = self.older(ages[:, :count])
        mask = torch.cat(
            (older.unsqueeze(2).expand(-1, -1, length, -1), own.expand(*older.shape[:2], -1, -1)), 3
        )
        if not self.causal and tokens % length:  # no position may see the padding
            mask[:, -1, :, self.kept + tokens % length :] = False
        return Sight(ages, mask)

    def older(self, ages: Tensor) -> Tensor:
        """The mask of the older keys that a segment sees, [..., k + n · L], from its age [...]."""
        ages, n = ages.unsqueeze(-1), self.segments
        distances = torch.arange(n, 0, -1, device=ages.device)
        distances = distances.repeat_interleave(self.segment_length)
        # Until they are out of sight, the sinks are among the keys of their segment.
        return torch.cat(((ages > n).expand(*ages.shape[:-1], self.sinks), distances <= ages), -1)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Rope | None,
        *,
        tokens: int,
        sight: Sight | None = None,
        earlier: Earlier | None = None,
    ) -> Tensor:
        """The attention of segments, [n · B, S, H, L, D].

        Args:
            q: Queries [n · B, S, H, L, D] from `segmented`; L may be less for a single segment.
            k: Keys [n · B, S, H_kv, L, D]; query head h reads key-value head h // (H / H_kv).
            v: Values, of the shape of `k`.
            rope: (cos, sin), each [k + n · L + L, D], at positions from −(k + n · L).
            tokens: T; what follows is padding.
            sight: Of B rows; None if each segment sees itself only. Row i sees the older tokens of
                row i mod B, as the streams of block diffusion do.
            earlier: What is in sight from before the first segment; None is nothing.
        """
        if sight is None or (earlier is None and q.size(1) == 1):
            return self._inside_segments(q, k, v, rope, tokens)
        rows, ages = len(sight.ages), sight.ages
        streams, known = len(q) // rows, earlier or self._nothing(k[:rows])

        def with_older(own: Tensor, known: Tensor) -> Tensor:
            older = self._older(own[:rows], known, ages[:, : q.size(1)])
            return torch.cat((older if streams == 1 else older.repeat(streams, 1, 1, 1, 1), own), 3)

        keys, values = with_older(k, known.keys), with_older(v, known.values)
        if rope is not None:
            keys = rotate(keys, rope)
            q = rotate(q, (rope[0][self.kept :], rope[1][self.kept :]))
        mask = sight.mask if streams == 1 else sight.mask.repeat(streams, 1, 1, 1)
        out = local_attention(
            *(x.flatten(0, 1) for x in (q, keys, values)),
            backend=self.backend,
            mask=mask.flatten(0, 1).unsqueeze(1),
        )
        return out.view(q.shape)

    def _inside_segments(
        self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None, tokens: int
    ) -> Tensor:
        """The attention of each segment to itself alone, without a mask."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            shape, (q, k, v) = q.shape, (x.flatten(0, 1) for x in (q, k, v))
            if rope is not None:
                first = len(rope[0]) - self.segment_length
                tables = (rope[0][first:][: q.size(2)], rope[1][first:][: q.size(2)])
                q, k = rotate(q, tables), rotate(k, tables)
            out = local_attention(q, k, v, backend=self.backend, causal=self.causal)
            return out.reshape(shape)

        padding = q.size(1) * q.size(3) - tokens
        if self.causal or not padding:
            return attend(q, k, v)
        # Only a causal mask hides the padding: else the last segment is attended to by itself.
        full = attend(*(x[:, :-1] for x in (q, k, v)))
        last = attend(*(x[:, -1:, :, :-padding] for x in (q, k, v)))
        return torch.cat((full, functional.pad(last, (0, 0, 0, padding))), dim=1)

    def _nothing(self, k: Tensor) -> Earlier:
        """Zeros, for a pass over segments of keys [B, S, H_kv, L, D] with no token before it."""
        zeros = k.new_zeros(k.size(0), k.size(2), self.kept, k.size(4))
        return Earlier(zeros, zeros, zeros)

    def _older(self, x: Tensor, earlier: Tensor, ages: Tensor, first: int = 0) -> Tensor:
        """The keys or values that some segments see before themselves, [B, N, H_kv, k + n · L, D].

        Args:
            x: Of the segments of the pass, [B, S, H_kv, L, D].
            earlier: Of the tokens before it, [B, H_kv, k + n · L, D].
            ages: Those in `Sight` of the N segments, [B, N].
            first: Number of the first of them in the pass, counted from 0.
        """
        (rows, count), k, length = ages.shape, self.sinks, self.segment_length
        history = torch.cat((segmented(earlier[:, :, k:], length), x), 1) if self.segments else x
        parts = [history[:, first + at :][:, :count] for at in range(self.segments)]
        if k:
            # The first tokens of each document, which may have begun before the pass.
            flat = torch.cat((earlier[:, :, :k], x.transpose(1, 2).flatten(2, 3)), 2)
            origins = torch.arange(first, first + count, device=x.device) - ages
            starts = torch.where(origins < 0, 0, k + origins * length)
            index = (starts[..., None] + torch.arange(k, device=x.device)).view(rows, 1, -1, 1)
            index = index.clamp(max=flat.size(2) - 1).expand(-1, flat.size(1), -1, flat.size(3))
            parts.insert(0, segmented(flat.gather(2, index), k))
        return torch.cat(parts, 3)

    def carried(
        self, k: Tensor, v: Tensor, rope: Rope, sight: Sight | None, earlier: Earlier | None
    ) -> tuple[Tensor, Tensor]:
        """The keys, rotated, and values of the state after a pass; see `LayerState`.

        `k` [B, H_kv, T, D] are the keys of the pass before the rotation, `v` its values; all else
        is as in `attend`.
        """
        number, sinks = k.size(2) // self.segment_length, self.sinks
        # A copy: a view would keep the whole sequence in the state.
        keys, values = (x[:, :, number * self.segment_length :].clone() for x in (k, v))
        if sight is not None:
            cut_keys, cut_values = (segmented(x, self.segment_length) for x in (k, v))
            known, age = earlier or self._nothing(cut_keys), sight.ages[:, -1:]
            older_keys = self._older(cut_keys, known.keys, age, number).squeeze(1)
            older_values = self._older(cut_values, known.values, age, number).squeeze(1)
            keys, values = torch.cat((older_keys, keys), 2), torch.cat((older_values, values), 2)
        keys = rotate(keys, (rope[0][: keys.size(2)], rope[1][: keys.size(2)]))
        if sinks and sight is not None and earlier is not None:
            # To be turned back and forth in every pass would wear them down in 16 bits.
            are_old = (sight.ages[:, -1] > number).view(-1, 1, 1, 1)
            first = torch.where(are_old, earlier.rotated[:, :, :sinks], keys[:, :, :sinks])
            keys = torch.cat((first, keys[:, :, sinks:]), 2)
        return keys, values

    def earlier(self, keys: Tensor, values: Tensor, rope: Rope) -> Earlier | None:
        """The part of a state's keys and values that a pass sees; None if that is nothing."""
        if not self.kept:
            return None
        inverse = (rope[0][: self.kept], -rope[1][: self.kept])
        rotated = keys[:, :, : self.kept]
        return Earlier(rotate(rotated, inverse), values[:, :, : self.kept], rotated)

    def shifted(
        self, keys: Tensor, values: Tensor, rope: Rope, completes: Tensor, is_first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of a state when an open segment is full: it is now an earlier one.

        That is so in rows that `completes`; in those that `is_first` it is the first of its
        document, both [B] bool. `keys`, rotated, and `values` are [B, H_kv, k + n · L + L + 1, D].
        """
        k, length, kept = self.sinks, self.segment_length, self.kept

        def step(x: Tensor, *, turns: bool) -> Tensor:
            sinks, earlier = x[:, :, kept : kept + k], x[:, :, k + length : kept + length]
            if turns and k:  # to the first positions in sight
                sinks = rotate(sinks, (rope[0][0], rope[1][0]))
            if turns and self.segments:  # back by L
                earlier = rotate(earlier, (rope[0][kept - length], rope[1][kept - length]))
            sinks = torch.where(is_first.view(-1, 1, 1, 1), sinks, x[:, :, :k])
            moved = torch.cat((sinks, earlier, x[:, :, kept:]), 2)
            return torch.where(completes.view(-1, 1, 1, 1), moved, x)

        return (step(keys, turns=True), step(values, turns=False)) if kept else (keys, values)

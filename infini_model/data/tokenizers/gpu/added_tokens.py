"""Finding added and special tokens in text on a device, before it is split into words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from infini_model.data.tokenizers.gpu.pretokens import TextBytes


class Matches(NamedTuple):
    """Tokens found in a text, in order, without overlaps.

    `starts` and `lengths` in bytes and `ids`, each int64 [M].
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    ids: torch.Tensor


class AddedTokens:
    """Finds tokens as `tokenizers` does: from left to right, the longest match first.

    `added` are the entries of a `tokenizer.json`. Those with `normalized: false` are searched
    first, the others in the rest of the text, which is the same since there is no normalizer.
    """

    def __init__(self, added: Iterable[Mapping[str, Any]], device: torch.device) -> None:
        raw: list[tuple[bytes, int]] = []
        normalized: list[tuple[bytes, int]] = []
        for token in added:
            content = token["content"].encode()
            if content:
                (normalized if token["normalized"] else raw).append((content, token["id"]))
        self._passes = [_Literals(group, device) for group in (raw, normalized) if group]
        # bool [65536]: whether a token starts with bytes b and c, for b * 256 + c.
        self.prefixes = torch.zeros(1 << 16, dtype=torch.bool, device=device)
        for literals in self._passes:
            self.prefixes |= literals.prefixes.flatten()

    def find(self, text: TextBytes, candidates: torch.Tensor, bounds: torch.Tensor) -> Matches:
        """The tokens in a text; none crosses a bound.

        `candidates` int32 [C], ascending, are all places where the first two bytes are in
        `prefixes`. `bounds` int64 [D + 1] ascend from 0 to `text.size`.
        """
        candidates = candidates.long()
        nothing = bounds.new_zeros(0)
        found = Matches(nothing, nothing, nothing)
        if not len(candidates):
            return found
        for literals in self._passes:
            matches = literals.find(text, candidates, bounds)
            if len(matches.starts):
                taken = _outside(matches, found)
                found = _merge(found, _leftmost(Matches(*(part[taken] for part in matches))))
                ends = found.starts + found.lengths
                bounds = torch.cat([bounds, found.starts, ends]).sort().values
        return found


class _Literals:
    """Byte strings with ids, searched for all at once."""

    def __init__(self, tokens: list[tuple[bytes, int]], device: torch.device) -> None:
        # The first byte, and the first two, rule out most places of a text.
        prefixes = torch.zeros(256, 256, dtype=torch.bool)
        by_length: dict[int, list[tuple[bytes, int]]] = {}
        for content, number in tokens:
            prefixes[content[0], content[1] if len(content) > 1 else slice(None)] = True
            by_length.setdefault(len(content), []).append((content, number))
        self.prefixes = prefixes.to(device)
        self._groups = [_SameLength(group, device) for _, group in sorted(by_length.items())]

    def find(self, text: TextBytes, at: torch.Tensor, bounds: torch.Tensor) -> Matches:
        """The longest match at each of `at`, possibly overlapping; none crosses a bound."""
        one, two = (text.padded[at + place].long() for place in (0, 1))
        at = at[self.prefixes[one, two]]
        room = bounds[torch.searchsorted(bounds, at, right=True)] - at
        lengths, ids = torch.zeros_like(at), torch.zeros_like(at)
        for group in self._groups:
            here = torch.nonzero(room >= group.length).squeeze(1)
            same, numbers = group.match(text, at[here])
            lengths[here[same]], ids[here[same]] = group.length, numbers[same]
        found = lengths > 0
        return Matches(at[found], lengths[found], ids[found])


class _SameLength:
    """Byte strings of the same length, found by their hash and then compared."""

    def __init__(self, tokens: list[tuple[bytes, int]], device: torch.device) -> None:
        self.length = len(tokens[0][0])
        contents = torch.tensor([list(content) for content, _ in tokens], dtype=torch.uint8)
        draw = torch.Generator().manual_seed(0)
        distinct = 0
        while distinct < len(tokens):  # almost always once
            weights = torch.randint(-(1 << 62), 1 << 62, (self.length,), generator=draw)
            hashes, order = (contents * weights).sum(1).sort()
            distinct = len(set(hashes.tolist()))
        numbers = torch.tensor([number for _, number in tokens])
        self._weights, self._hashes = weights.to(device), hashes.to(device)
        self._contents, self._numbers = contents[order].to(device), numbers[order].to(device)

    def match(self, text: TextBytes, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether one of them is at each of the offsets `at` int64 [n], and its id."""
        read = text.padded[at[:, None] + torch.arange(self.length, device=at.device)]
        place = torch.searchsorted(self._hashes, (read * self._weights).sum(1))
        place = place.clamp(max=len(self._hashes) - 1)
        return (read == self._contents[place]).all(1), self._numbers[place]


def _outside(matches: Matches, others: Matches) -> torch.Tensor:
    """Which matches start outside all of `others`: bool [M]."""
    if not len(others.starts):
        return torch.ones_like(matches.starts, dtype=torch.bool)
    other = torch.searchsorted(others.starts, matches.starts, right=True) - 1
    ends = (others.starts + others.lengths)[other.clamp(min=0)]
    return (other < 0) | (matches.starts >= ends)


def _leftmost(matches: Matches) -> Matches:
    """Matches without those that overlap an earlier match that is kept."""
    ends = matches.starts + matches.lengths
    if bool((matches.starts[1:] >= ends[:-1]).all()):
        return matches
    kept, free = [], 0
    for index, (start, end) in enumerate(zip(matches.starts.tolist(), ends.tolist(), strict=True)):
        if start >= free:
            kept.append(index)
            free = end
    places = torch.tensor(kept, device=ends.device)
    return Matches(*(part[places] for part in matches))


def _merge(one: Matches, other: Matches) -> Matches:
    both = Matches(*(torch.cat(parts) for parts in zip(one, other, strict=True)))
    order = both.starts.argsort()
    return Matches(*(part[order] for part in both))

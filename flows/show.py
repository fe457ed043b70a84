"""`infini show`: what a training will see, by the functions that the training itself uses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.segment import Segments
from rich.table import Column, Table
from rich.text import Text

from infini_model.config import Config
from infini_model.data.downloads import download_shards
from infini_model.data.loading.coverage import measure_coverage
from infini_model.data.loading.loader import Loader, make_phases
from infini_model.data.loading.stream import count_duplicates
from infini_model.data.loading.windows import Batch, Windows
from infini_model.data.lookup import finished_dataset
from infini_model.data.manifest import SPLITS, Manifest, read_manifest
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer
from infini_model.objectives import make_objective
from infini_model.training.launch.recovery import Recovery
from infini_model.training.setup import resolve

# Without `--all`: how many windows are printed, and how many characters of each end of one.
WINDOWS, HEAD, TAIL = 4, 2000, 500
# What would command a terminal, or turn the order of what it shows: escaped as in Python.
_UNSAFE = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
ESCAPES = {number: repr(chr(number))[1:-1] for number in _UNSAFE if chr(number) not in "\n\t"}


def show(config: Config, *, every: bool) -> None:
    """Print the sizes of a dataset and the first global batch of a training; `every`: all of it.

    Raises `UserError` as a training would: dataset and settings do not match, or there is less than
    a batch.
    """
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    plan = finished_dataset(config)
    download_shards(plan.folder, tell=Console(stderr=True, markup=False).print)
    manifest = read_manifest(plan.folder)
    processes = (config.launch.processes or 1) * config.launch.num_nodes
    config, windows, batches, _ = resolve(
        config, manifest, plan.folder, None, Recovery(), None, processes
    )
    console.print(f"Dataset: {plan.place}")
    _print_sizes(console, manifest, windows)
    train, segment, size = windows("train"), config.model.segment_length, batches.global_batch
    phases = make_phases(train, config.packing, segment, config.training, global_batch=size)
    # One process has the batch of all, in the same order.
    with Loader(train, batch_size=size, seed=config.run.seed, phases=phases) as loader:
        numbers, (batch,) = loader.numbers(0).reshape(-1).tolist(), next(loader)
    coverage = measure_coverage(phases[-1], segment)
    memory = config.model.memory
    warnings = coverage.warnings(config.packing.mode, memory)
    console.print(*coverage.describe(memory), *warnings, sep="\n")
    counted = make_objective(config).inputs(batch).counted.numpy()
    console.print(
        f"First batch: {len(numbers):,} windows of {counted.shape[1]:,} tokens, of which "
        f"{counted.mean():.0%} are learned{', the rest is dim' * console.is_terminal}"
    )
    tokenizer, shift = load_dataset_tokenizer(plan.folder), config.training.objective == "causal"
    shown = numbers if every else numbers[:WINDOWS]
    for place, number in enumerate(shown):
        text = _window(batch, counted, place, tokenizer, int(shift))
        if not every and len(text) > HEAD + TAIL:
            more = f"\n── {len(text) - HEAD - TAIL:,} characters more ──\n"
            text = text[:HEAD].append(more, "bold").append(text[-TAIL:])
        # As segments, for a console makes spaces of tabs.
        whole = Text.assemble((f"\n── window {number:,} ──\n", "bold"), text, "\n")
        console.print(Segments(whole.render(console)))
    if len(shown) < len(numbers):
        console.print(f"\n{len(numbers) - len(shown):,} more windows; --all prints them")


def _print_sizes(console: Console, manifest: Manifest, windows: Callable[[str], Windows]) -> None:
    tokenizer, kind = manifest.tokenizer, "conversations" if manifest.conversations else "texts"
    vocabulary = f"{tokenizer.spec}, {tokenizer.vocab_size:,} tokens"
    console.print(f"Documents: {kind}", f"Tokenizer: {vocabulary}", sep="\n")
    titles = ("Documents", "Tokens", "Tokens a document", "Windows")
    table = Table("Split", *(Column(title, justify="right") for title in titles))
    splits: dict[str, Windows] = {split: windows(split) for split in SPLITS}
    for split, each in splits.items():
        rows = [(split, each.stream.tokens, each.stream.documents, len(each))]
        for name, shards in each.stream.sources.items():
            sizes = each.stream.sizes(shards)
            rows += [(f"  {name}", *sizes, len(each.sources[name]))] if name else []
        for title, tokens, documents, count in rows:
            mean = tokens / max(1, documents)
            table.add_row(title, f"{documents:,}", f"{tokens:,}", f"{mean:,.1f}", f"{count:,}")
    console.print(table)
    again, is_estimate = count_duplicates([each.stream for each in splits.values()])
    found = f"{'about ' * is_estimate}{again:,} ({again / manifest.corpus.documents:.1%})"
    console.print(f"Exact duplicates: {found}")


def _window(
    batch: Batch, counted: np.ndarray, place: int, tokenizer: Tokenizer, shift: int
) -> Text:
    """The text of a window. `counted` bool [B, T] is for targets `shift` tokens ahead."""
    rows, length = batch.tokens[place].numpy(), batch.tokens.size(2) - 1
    learned = np.pad(counted[place].reshape(-1, length), ((0, 0), (shift, 1 - shift)))
    last = np.full(len(rows), length) if batch.valid is None else batch.valid[place].numpy()
    begins = np.arange(len(rows)) == 0
    if batch.document_starts is not None:
        begins |= batch.document_starts[place].numpy()
    within = np.arange(length + 1) <= np.minimum(last, length - 1 + shift)[:, None]
    # The last target of a row is the first token of one that continues it.
    within[:, :shift] &= begins[:, None]
    text = Text()
    for first, end in pairwise([*np.flatnonzero(begins).tolist(), len(rows)]):
        if first:
            text.append(f"\n── segment {first + 1} begins a document ──\n", "bold")
        here = within[first:end]
        text.append(_decoded(rows[first:end][here], learned[first:end][here], tokenizer))
    return text


def _decoded(ids: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer) -> Text:
    """The text of ids [N], dim where they are not `learned` [N], special tokens spelt out."""
    # `decode` leaves out one token at each end.
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
    spelt = [tokenizer.decode([*begin, *ids[:edge], tokenizer.eos_token_id]) for edge in edges]
    # A character that two runs share is in the second.
    ends = [*(len(each.rstrip(REPLACEMENT)) for each in spelt[:-1]), len(spelt[-1])]
    text = Text()
    for edge, (first, end) in zip(edges, pairwise(ends), strict=False):
        style = None if learned[edge] else "dim"
        text.append(spelt[-1][first:end].translate(ESCAPES), style)
    return text

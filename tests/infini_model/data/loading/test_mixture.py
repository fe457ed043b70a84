"""A mixture of sources has exact shares and no state, and each source keeps its own windows."""

from itertools import accumulate, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streams import numbered_stream

from infini_model.config import PackingConfig, TrainingConfig
from infini_model.data.loading.coverage import measure_coverage
from infini_model.data.loading.loader import Loader, Origin, Phase, make_phases, read_by_source
from infini_model.data.loading.mixture import Mixture, mix
from infini_model.data.loading.packing import pack
from infini_model.data.loading.windows import Windows, validation_batches
from infini_model.runtime.errors import ConfigError, DataError

SEGMENT, SEGMENTS = 4, 3
CONTEXT = SEGMENT * SEGMENTS
# The lengths of the documents of three sources, in two shards each.
SHAPES = {
    "books": [[200, 150], [300]],
    "chats": [[3, 5, 2] * 20, [9, 30, 4] * 10],
    "web": [[40, 70] * 4, [25] * 20],
}
TOKENS = [sum(map(sum, shape)) for shape in SHAPES.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module", params=["packed", "document", "aligned"])
def config(request):
    return PackingConfig(mode=request.param, context_length=CONTEXT)


def windows_of(stream, config):
    packing = pack(stream, config, SEGMENT)
    return Windows(stream, packing, config.mode == "aligned", "the split")


@pytest.fixture(scope="module")
def mixed(folder):
    """The stream of all sources, whose tokens are 1, 2, 3 …"""
    sources = {name: slice(2 * n, 2 * n + 2) for n, name in enumerate(SHAPES)}
    shape = [lengths for shards in SHAPES.values() for lengths in shards]
    return numbered_stream(folder, shape, sources=sources)


@pytest.fixture(scope="module")
def windows(mixed, config):
    return windows_of(mixed, config)


def test_each_source_has_the_windows_that_it_has_alone(folder, windows, config):
    firsts = accumulate(TOKENS, initial=1)
    for (name, shape), first in zip(SHAPES.items(), firsts, strict=False):
        alone = windows_of(numbered_stream(folder, shape, first), config)
        numbers = windows.sources[name]
        assert len(alone) == len(numbers) > 0
        ours = windows.gather(np.array(numbers))
        theirs = alone.gather(np.arange(len(alone)))
        assert torch.equal(ours.tokens, theirs.tokens)
        assert (ours.valid is None) == (theirs.valid is None)
        assert ours.valid is None or torch.equal(ours.valid, theirs.valid)
        if config.mode == "aligned":
            assert torch.equal(ours.document_starts, theirs.document_starts)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.decimals(0, 5, places=2)), min_size=1, max_size=9),
    st.integers(0, 2000),
)
def test_shares_are_exact_and_each_epoch_of_a_source_is_a_permutation(sources, count):
    sizes, weights = zip(*sources, strict=True)
    if not any(weights):
        return
    starts = [0, *accumulate(sizes)]
    total = sum(weights)
    mixture = Mixture(starts, [int(100 * weight) for weight in weights])
    positions = np.arange(count)
    owners, before = mixture.locate(positions)
    read = mixture.windows_at(positions, 3, 1)
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        own = owners == source
        assert before[own].tolist() == list(range(int(own.sum())))
        # After any number of positions.
        excess = np.cumsum(own) - (positions + 1) * float(weight / total)
        assert np.abs(excess).max(initial=0) < 2
        assert mixture.read_in(count)[source] == own.sum()
        mine, all_of_it = read[own], set(range(starts[source], starts[source + 1]))
        epochs = [mine[first : first + size] for first in range(0, len(mine), size)]
        for epoch in epochs:
            assert len(set(epoch.tolist()) & all_of_it) == len(epoch)


def test_positions_far_away_have_the_same_shares():
    mixture = Mixture([0, 10, 20], [7, 3])
    owners, before = mixture.locate(10**15 + np.arange(1000))
    assert np.bincount(owners).tolist() == [700, 300]
    assert before[owners == 1][0] == 3 * 10**14


def test_without_weights_every_window_is_read_once_an_epoch(windows):
    count = len(windows)
    mixture = mix(windows, None)
    for epoch in range(3):
        read = mixture.windows_at(np.arange(epoch * count, (epoch + 1) * count), 0, 0)
        assert sorted(read.tolist()) == list(range(count))
    assert mixture.read_in(count) == [len(part) for part in windows.sources.values()]


def test_weights_are_as_they_are_written(windows):
    weights = [{"books": 0.1, "chats": 0.7, "web": 0.2}, {"books": 1, "chats": 7, "web": 2}]
    assert mix(windows, weights[0]) == mix(windows, weights[1])
    tiny = mix(windows, {"books": 1e-9, "chats": 1e9, "web": 0})
    assert tiny.shares[0] == 1
    assert tiny.shares[2] == 0


WEIGHTS = {"books": [1, 0], "chats": [1, 5], "web": [2, 5]}
STEPS, BATCH = 12, 12


@pytest.fixture(scope="module")
def begin(windows, config):
    """Begins to load windows that grow, with other weights from half of the steps on."""
    growing = {"context_schedule": {0: 1, 0.5: SEGMENTS}, "weights": WEIGHTS}
    packing = PackingConfig.model_validate(config.model_dump() | growing)
    training = TrainingConfig(max_steps=STEPS)
    phases = make_phases(windows, packing, SEGMENT, training, global_batch=BATCH)

    def make(world_size=1, **options):
        return Loader(
            windows,
            phases=phases,
            batch_size=BATCH // world_size // 2,
            gradient_accumulation_steps=2,
            world_size=world_size,
            seed=5,
            **options,
        )

    return make


def test_any_number_of_ranks_reads_the_same_batches_from_any_step_on(begin):
    def rows(batches):
        return torch.cat([batch.tokens.flatten(1) for batch in batches])

    with begin() as loader:
        whole = [rows(next(loader)) for _ in range(STEPS + 2)]
    for done in (0, 3, 6, 9):
        for world_size in (1, 2, 3):
            ranks = [
                begin(world_size, rank=r, windows_read=done * BATCH) for r in range(world_size)
            ]
            for expected in islice(whole, done, None):
                assert torch.equal(torch.cat([rows(next(rank)) for rank in ranks]), expected)
            for rank in ranks:
                rank.close()


def test_weights_change_with_the_phases_and_the_epochs_are_counted(begin):
    with begin() as loader:
        read = dict.fromkeys(SHAPES, 0.0)
        for step in range(STEPS):
            windows = loader.windows_at(step * BATCH)
            numbers = loader.numbers(step * BATCH).reshape(-1).tolist()
            counts = {
                name: sum(map(part.__contains__, numbers)) for name, part in windows.sources.items()
            }
            weights = [WEIGHTS[name][step >= STEPS // 2] for name in counts]
            shares = [len(numbers) * weight / sum(weights) for weight in weights]
            assert list(counts.values()) == pytest.approx(shares, abs=1.5)
            for name, count in counts.items():
                read[name] += count / len(windows.sources[name])
            assert loader.epochs((step + 1) * BATCH) == pytest.approx(read)


@given(st.integers(0, 14), st.sampled_from([3, 6, 12]), st.sampled_from([10, 12, 30]))
def test_a_branch_reads_every_source_on_from_where_its_parent_was(
    windows, config, begin, at, batch, steps
):
    """Also with other weights, another batch and another length."""
    growing = {"context_schedule": {0: 1, 0.5: SEGMENTS}}
    weights = {"weights": {"books": [3, 7], "chats": [0, 1], "web": [1, 1]}}
    packing = PackingConfig.model_validate(config.model_dump() | growing | weights)
    read = [[[] for _ in SHAPES] for _ in growing["context_schedule"]]

    def note(loader, first, count):
        for step in range(count):
            place = first + step * loader.global_batch
            number = [phase.windows for phase in loader.phases].index(loader.windows_at(place))
            for window in loader.numbers(place).reshape(-1).tolist():
                parts = loader.windows_at(place).sources.values()
                source = next(n for n, part in enumerate(parts) if window in part)
                read[number][source].append(window)

    with begin() as parent:
        note(parent, 0, at)
        taken = read_by_source(parent.phases, at * BATCH)
    assert taken == [[len(windows) for windows in sources] for sources in read]
    origin = Origin(at, at * BATCH, 10**6, taken)
    phases = make_phases(
        *(windows, packing, SEGMENT, TrainingConfig(max_steps=steps)),
        global_batch=batch,
        origin=origin,
    )
    more = {"batch_size": batch, "seed": 5, "windows_read": origin.windows_read}
    with Loader(windows, phases=phases, **more) as branch:
        note(branch, origin.windows_read, 6)
        after = origin.windows_read + 6 * batch
        assert read_by_source(phases, after) == [[*map(len, sources)] for sources in read]
        keys = [key for _ in range(6) for key in next(branch)[0].noise_keys.tolist()]
        assert len({*keys}) == len(keys)
    for number, (phase, sources) in enumerate(zip(phases, read, strict=True)):
        for source, found in enumerate(sources):
            alone = Mixture(phase.windows.packing.window_starts, [n == source for n in range(3)])
            assert found == alone.windows_at(np.arange(len(found)), 5, number).tolist()


def test_coverage_is_that_of_what_is_read(mixed):
    windows = windows_of(mixed, PackingConfig(mode="aligned", context_length=CONTEXT))

    def recalled(name):
        weights = {source: float(source == name) for source in SHAPES}
        return measure_coverage(Phase(windows, weights=weights), SEGMENT).recalled

    assert recalled("books") > 0.6 > 0.5 > recalled("chats")


def test_as_many_windows_of_each_source_are_scored_and_stand_for_the_whole_split(windows):
    parts = windows.sources.values()
    everything, few = windows.sample(None), windows.sample(30)
    assert everything.tolist() == list(range(len(windows)))
    assert [sum(number in part for number in few) for part in parts] == [10, 10, 10]
    assert set(few.tolist()) < set(windows.sample(60).tolist())

    def mean(max_windows):
        totals = 0
        for batch in validation_batches(windows, 7, max_windows=max_windows):
            worth = windows_worth(windows, batch.noise_keys)
            totals = totals + windows.sum_by_source(worth, batch)
        sums, counts = windows.add_sources(totals, max_windows)
        return float(sums.sum() / counts.sum())

    assert mean(30) == pytest.approx(mean(None), rel=1e-12)


def windows_worth(windows, numbers):
    """A loss sum of each window that is the same for all windows of a source, and a count."""
    parts = list(windows.sources.values())
    worth = [
        next(n for n, part in enumerate(parts) if number in part) for number in numbers.tolist()
    ]
    sums = torch.tensor(worth, dtype=torch.float64) + 1.5
    return torch.stack([sums, torch.full_like(sums, 2)], 1)[..., None]


def test_what_a_source_cannot_give_is_named(folder, mixed, windows):
    weighed = r"packing\.weights: weighs books, wiki, but the sources of the split are books, chats"
    with pytest.raises(ConfigError, match=weighed):
        mix(windows, {"books": 1, "wiki": 1})
    with pytest.raises(ConfigError, match=r"packing\.weights: all are 0$"):
        mix(windows, dict.fromkeys(SHAPES, 0))
    short = numbered_stream(folder, [[5], [900]], sources={"a": slice(0, 1), "b": slice(1, 2)})
    cut = windows_of(short, PackingConfig(context_length=CONTEXT))
    with pytest.raises(DataError, match=r"packing\.weights\.a: the split has no window of this"):
        mix(cut, {"a": 1, "b": 1})
    assert mix(cut, {"a": 0, "b": 1}).shares == [0, 1]
    nameless = windows_of(numbered_stream(folder, [[900]]), PackingConfig(context_length=CONTEXT))
    with pytest.raises(ConfigError, match=r"are one without a name$"):
        mix(nameless, {"web": 1})

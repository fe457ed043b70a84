"""Intervals of 95% hold what they promise, by simulation, and agree with published values."""

import math

import numpy as np
import pytest

from infini_model.evaluation import statistics
from infini_model.evaluation.statistics import bootstrap, wilson
from infini_model.evaluation.tasks.task import TaskResult

DRAWS = 200


def coverage(covers):
    """The share of simulations, each with a generator of its own, in which `covers` is true."""
    return sum(covers(np.random.default_rng(seed)) for seed in range(DRAWS)) / DRAWS


def test_wilson_gives_the_published_intervals():
    """Newcombe (1998), Statistics in Medicine 17, table I, method 3."""
    published = [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]
    for successes, trials, low, high in published:
        found = wilson(successes, trials)
        assert found.estimate == successes / trials
        assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_wilson_is_symmetric_and_holds_its_estimate():
    for trials in range(1, 200):
        for successes in {0, 1, trials // 2, trials}:
            found, mirrored = wilson(successes, trials), wilson(trials - successes, trials)
            assert 0.0 <= found.low <= found.estimate <= found.high <= 1.0
            assert found.low < found.high
            assert found.low == pytest.approx(1.0 - mirrored.high, abs=1e-12)


def ragged(generator, documents):
    """Losses of documents of 1 to 8 segments of 1 to 50 tokens, [documents, 8], that depend on each
    other within a document; the mean loss of a segment is its number."""
    counts = generator.integers(1, 51, (documents, 8))
    counts[np.arange(8) >= generator.integers(1, 9, documents)[:, None]] = 0
    of_document = generator.normal(size=(documents, 1))
    losses = np.arange(8) + of_document + generator.normal(size=counts.shape) / 5
    return losses * counts, counts


def test_a_bootstrap_covers_the_ratio_of_ragged_documents():
    """Percentiles of 40 documents are known to cover a little less than they say."""

    def covers(generator):
        sums, counts = ragged(generator, 40)
        found = bootstrap(sums[:, :3], counts[:, :3])
        return sum(each.low <= mean <= each.high for mean, each in enumerate(found)) / 3

    assert 0.90 <= coverage(covers) <= 0.97


def test_documents_and_not_tokens_are_the_sample():
    """A hundred equal tokens of a document say no more than one."""
    sums, counts = ragged(np.random.default_rng(0), 30)
    one, many = bootstrap(sums, counts), bootstrap(100 * sums, 100 * counts)
    for few_tokens, many_tokens in zip(one, many, strict=True):
        assert many_tokens == pytest.approx(few_tokens)


def test_the_estimate_is_the_ratio_of_all_and_inside_its_interval():
    sums, counts = ragged(np.random.default_rng(1), 30)
    for column, found in enumerate(bootstrap(sums, counts)):
        assert found.estimate == pytest.approx(sums[:, column].sum() / counts[:, column].sum())
        assert found.low < found.estimate < found.high
    assert bootstrap(sums, counts) == bootstrap(sums, counts)
    assert bootstrap(sums, counts) != bootstrap(sums, counts, seed=1)


def test_many_documents_are_drawn_in_blocks_with_the_same_result(monkeypatch):
    sums, counts = ragged(np.random.default_rng(3), 30)
    whole = bootstrap(sums, counts)
    monkeypatch.setattr(statistics, "DRAWN_AT_ONCE", 1000)
    assert bootstrap(sums, counts) == [pytest.approx(each) for each in whole]


def test_what_a_single_document_reaches_has_no_interval():
    sums = [[1.0, 2.0, 9.0], [2.0, 5.0, 0.0], [3.0, 4.0, 0.0]]
    counts = [[1, 2, 3], [1, 2, 0], [1, 2, 0]]
    first, second, third = bootstrap(sums, counts)
    assert third == (3.0, -math.inf, math.inf)
    assert all(math.isfinite(end) for each in (first, second) for end in each)
    assert bootstrap(sums[:1], counts[:1])[0] == (1.0, -math.inf, math.inf)


def test_a_result_is_the_same_after_json_where_an_interval_is_infinite() -> None:
    (alone,) = bootstrap([[1.0]], [[2.0]])
    result = TaskResult(
        section="",
        metrics={"a": alone.estimate, "b": 1.0},
        intervals={"a": (alone.low, alone.high), "b": (0.0, 2.0)},
    )
    assert result.intervals == {"b": (0.0, 2.0)}
    assert TaskResult.model_validate_json(result.model_dump_json()) == result

"""Intervals of 95% hold what they promise, by simulation, and agree with published values."""

import math

import numpy as np
import pytest

from infini_model.evaluation import statistics
from infini_model.evaluation.statistics import Interval, bootstrap, wilson
from infini_model.evaluation.task import TaskResult


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
    covered = []
    for seed in range(200):
        sums, counts = ragged(np.random.default_rng(seed), 40)
        found = bootstrap(sums[:, :3], counts[:, :3])
        covered += [each.low <= mean <= each.high for mean, each in enumerate(found)]
    assert 0.90 <= np.mean(covered) <= 0.97


def test_the_estimate_is_the_ratio_of_all_and_inside_its_interval(monkeypatch):
    sums, counts = ragged(np.random.default_rng(1), 30)
    whole = bootstrap(sums, counts)
    for column, found in enumerate(whole):
        assert found.estimate == pytest.approx(sums[:, column].sum() / counts[:, column].sum())
        assert found.low < found.estimate < found.high
    # Many documents are drawn in blocks, with the same result.
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
    result = TaskResult.of({"a": alone, "b": Interval(1.0, 0.0, 2.0)}, section="")
    assert result.intervals == {"b": (0.0, 2.0)}
    assert TaskResult.model_validate_json(result.model_dump_json()) == result

"""A training that ends once its validation loss no longer improves."""

import pytest
from curves import curve, repeatable, weights
from stopping import StopAfter

from infini_model.config import validate
from infini_model.data.manifest import read_manifest
from infini_model.evaluation.report import evaluate_run
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.runs import is_finished, newest_checkpoint, read_run
from infini_model.training.run_status import read_status
from infini_model.training.train import train
from infini_model.training.validation import validations_since_best


@pytest.mark.parametrize(
    ("losses", "min_delta", "expected"),
    [
        ([], 0.0, 0),
        ([3.0], 0.0, 0),
        ([3.0, 2.0, 2.0, 2.5], 0.0, 2),
        ([3.0, 2.0, 2.5, 1.9], 0.0, 0),
        # A slow improvement counts once it is large enough, from the last one that was.
        ([3.0, 2.9, 2.8, 2.7, 2.6], 0.25, 1),
        ([3.0, 2.99, 2.98], 0.25, 2),
    ],
)
def test_an_improvement_is_what_is_far_enough_below_the_best(losses, min_delta, expected):
    by_step = {10 * number: loss for number, loss in enumerate(losses)}
    newest_first = dict(reversed(by_step.items()))
    assert validations_since_best(newest_first, min_delta) == expected


def test_a_training_ends_early_with_its_model_and_counts_as_finished(dataset, make_config):
    """Also when it was interrupted, at the same step and with the same bits."""
    asked = make_config(
        training={"early_stopping": {"patience": 2, "min_delta": 100.0}},
        logging={"eval_steps": 3},
        evaluation={"tasks": ["loss"]},
    )
    runs = []
    for name, interruptions in (("whole", []), ("resumed", [StopAfter(5)])):
        config = asked.updated(run={"name": name})
        with claim_run(config, read_manifest(dataset).key, dataset) as run_dir:
            runs.append(run_dir)
            for callback in interruptions:
                train(config, dataset, run_dir, [callback])
                assert read_run(run_dir).max_steps == 12
            assert train(config, dataset, run_dir).step == 6
            assert newest_checkpoint(run_dir).name == "step-6"
            assert list(curve(run_dir, "validation/loss")) == [0, 3, 6]
            assert list(curve(run_dir, "test/loss")) == [6]
            assert (read_status(run_dir).state, read_status(run_dir).total) == ("running", 6)
            # As when an evaluation fails, and the run is resumed for it.
            assert train(config, dataset, run_dir).step == 6
            evaluate_run(run_dir, dataset, config)
            assert is_finished(run_dir)
        assert "trained for 6 steps of 12 (stopped early)" in (run_dir / "report.md").read_text()
    assert repeatable(runs[0]) == repeatable(runs[1])
    assert weights(runs[0]) == weights(runs[1])


def test_patience_is_a_number_of_validations():
    with pytest.raises(ConfigError, match=r"training\.early_stopping\.patience"):
        validate({"training": {"early_stopping": {"patience": 0}}})

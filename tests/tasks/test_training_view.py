"""The table of a running training's newest steps."""

from tasks.training_view import table_rows

LINES = [
    {"step": 3, "train/loss": 2.5, "train/step_seconds": 2.0, "train/tokens_per_second": 1234.5},
    {"step": 3, "validation/loss": 2.75},
]
MEASURED = {"loss": "2.5000", "validation loss": "2.7500", "tokens/s": "1,234"}


def test_a_step_and_its_validation_are_one_row() -> None:
    assert list(table_rows(LINES, 10)) == [{"step": "3 of 10", **MEASURED, "ETA": "0:00:14"}]


def test_without_a_known_number_of_steps_there_is_no_total() -> None:
    assert list(table_rows(LINES, None)) == [{"step": "3", **MEASURED, "ETA": ""}]

"""What is said of a memory follows the interval of its gain as it is shown."""

import pytest

from infini_model.model.inspection import effect


@pytest.mark.parametrize(
    ("gain", "error", "expected"),
    [
        (0.05, 0.02, 0.05),
        (0.05, 0.03, 0.0),
        # As they are shown, these are 0, or their intervals hold it.
        (-4e-5, 5e-6, 0.0),
        (-2e-4, 8e-5, 0.0),
        (-0.05, 0.02, -0.05),
        (-0.05, float("inf"), 0.0),  # of a single window
    ],
)
def test_only_what_is_certain_has_an_effect(gain, error, expected):
    assert effect(gain, gain - 2 * error, gain + 2 * error) == expected

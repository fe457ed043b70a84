"""Messages from a stage to its parent, among its log lines."""

import pytest

from infini_model.runtime.stage_protocol import (
    ERROR,
    PROGRESS,
    RESULT,
    parse_line,
    rate_limited,
    write_message,
    write_progress,
)


@pytest.mark.parametrize(
    ("mark", "body"),
    [(PROGRESS, [3, 10]), (RESULT, {"folder": "a b\nc"}), (ERROR, {"message": "größer"})],
)
def test_a_message_is_one_line_and_parses_back(capsys, mark, body):
    write_message(mark, body)
    (line,) = capsys.readouterr().out.splitlines()
    assert parse_line(line) == (mark, body)


@pytest.mark.parametrize(
    "line",
    ["", "GPU0:INFO | Step [3/10]", "::progress", "::progress [3, ", "::progressing [3, 10]"],
)
def test_any_other_line_is_a_log_line(line):
    assert parse_line(line) is None


def test_progress_is_reported_at_most_once_per_interval_and_at_the_end(capsys):
    report = rate_limited(write_progress, interval_seconds=60.0)
    for step in range(1, 11):
        report(step, 10)
    messages = map(parse_line, capsys.readouterr().out.splitlines())
    assert [message.body for message in messages] == [[1, 10], [10, 10]]

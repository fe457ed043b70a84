"""Settings of sources."""

import pytest

from infini_model.config import load_config


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.source={kind: hub, repository: ag_news, column: text}"],
        ["data.source.kind=hub", "data.source.repository=ag_news"],
    ],
)
def test_a_source_of_another_kind_replaces_the_previous_one(overrides: list[str]) -> None:
    hub = load_config(overrides=overrides).data.source
    assert hub.kind == "hub"
    assert hub.model_dump(exclude_defaults=True) == {"repository": "ag_news"}
    back = [*overrides, "data.source={kind: files, column: body}"]
    files = load_config(overrides=back).data.source
    assert files.model_dump(exclude_defaults=True) == {"column": "body"}
    # A partial source of the same kind is merged.
    limited = load_config(overrides=[*overrides, "data.source.limit=5"]).data.source
    assert limited == hub.model_copy(update={"limit": 5})

"""A store that ignores conditional writes is found out before any work: ownership rests on them."""

from pathlib import Path

import pytest

from infini_model.config import load_config
from infini_model.runtime.errors import StoreError
from infini_model.runtime.object_store import ObjectStore
from tasks import checks
from tasks.checks import check_stores


@pytest.mark.parametrize(
    ("ignored", "setting"), [("create", "run.output_dir"), ("replace", "run.data_dir")]
)
def test_a_store_is_asked_once_and_refused_in_one_line_if_it_ignores_a_condition(
    ignored: str, setting: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path))
    address = f"{bucket}/team"
    run = load_config(overrides=[f"run.output_dir={tmp_path}", f"{setting}={address}"]).run
    check_stores(run, builds_dataset=True)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "create", pytest.fail)
        check_stores(run, builds_dataset=True)
    # Another server, whatever this machine remembers of that one.
    monkeypatch.setattr(checks, "endpoint_of", lambda _: "another")
    monkeypatch.setattr(ObjectStore, ignored, lambda store, key, text, *_: store.write(key, text))
    message = f"^{setting}: {address}: the store ignores conditional writes, .*If-Match$"
    for _ in range(2):
        with pytest.raises(StoreError, match=message):
            check_stores(run, builds_dataset=True)
    assert ObjectStore(bucket).list_below() == []

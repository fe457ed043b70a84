"""A store that ignores conditional writes is found out before any work: ownership rests on them."""

from pathlib import Path

import pytest

from infini_model.config import load_config
from infini_model.runtime.errors import StoreError
from infini_model.runtime.object_store import ObjectStore, Version
from tasks.checks import check_stores


@pytest.mark.parametrize(
    ("is_there", "setting"),
    [(False, "run.output_dir"), (True, "run.data_dir")],
    ids=["If-None-Match", "If-Match"],
)
def test_a_store_that_ignores_a_condition_is_refused_in_one_line(
    is_there: bool, setting: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path))
    address = f"{bucket}/team"
    run = load_config(overrides=[f"run.output_dir={tmp_path}", f"{setting}={address}"]).run
    check_stores(run, builds_dataset=True)
    write_if = ObjectStore.write_if

    def ignore(
        store: ObjectStore, key: str, text: bytes, expected: Version | None
    ) -> Version | None:
        if is_there is (expected is not None):
            return store.write(key, text)
        return write_if(store, key, text, expected)

    monkeypatch.setattr(ObjectStore, "write_if", ignore)
    message = f"^{setting}: {address}: the store ignores conditional writes, .*If-Match$"
    with pytest.raises(StoreError, match=message):
        check_stores(run, builds_dataset=True)
    assert ObjectStore(bucket).list_below() == []

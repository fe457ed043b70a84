"""A store that ignores conditional writes is found out before anything is written there."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from s3_server import CREDENTIALS, careless_s3

from infini_model.config import load_config
from infini_model.runtime.errors import StoreError
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.stored.conditions import check_stores


def reach(patch: pytest.MonkeyPatch, url: str) -> None:
    """Have this process reach the server, which gets a bucket."""
    for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}).items():
        patch.setenv(name, value)
    patch.setenv("AWS_ALLOW_HTTP", "true")
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
@pytest.mark.parametrize(
    ("setting", "address"),
    [("run.output_dir", "s3://bucket/team"), ("run.data_dir", "s3://bucket/data")],
)
def test_a_store_that_ignores_a_condition_is_refused_in_one_line(
    ignored: str, setting: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path))
    run = load_config(overrides=[f"run.output_dir={tmp_path}", f"{setting}={address}"]).run
    with careless_s3(ignored) as (url, _):
        reach(monkeypatch, url)
        message = f"^{setting}: {address}: the store ignores conditional writes, .*If-Match$"
        for _ in range(2):
            with pytest.raises(StoreError, match=message):
                check_stores(run, builds_dataset=True)
        assert ObjectStore("s3://bucket").list_below() == []


def test_a_store_is_checked_once_on_a_machine_by_five_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path))
    run = load_config(overrides=["run.output_dir=s3://bucket/team"]).run
    with careless_s3() as (url, methods):
        reach(monkeypatch, url)
        methods.clear()
        check_stores(run, builds_dataset=True)
        assert methods == ["PUT"] * 4 + ["POST"]
        check_stores(run, builds_dataset=True)
        assert len(methods) == 5
        assert ObjectStore("s3://bucket").list_below() == []
    with careless_s3("If-Match") as (url, _):
        reach(monkeypatch, url)
        with pytest.raises(StoreError, match="ignores conditional writes"):
            check_stores(run, builds_dataset=False)


def test_nothing_is_asked_for_without_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStore, "create", pytest.fail)
    run = load_config(overrides=[f"run.output_dir={tmp_path}"]).run
    check_stores(run, builds_dataset=True)
    data = load_config(overrides=[f"run.output_dir={tmp_path}", "run.data_dir=s3://bucket/d"]).run
    check_stores(data, builds_dataset=False)

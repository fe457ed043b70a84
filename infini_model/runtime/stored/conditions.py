"""Whether a store honours conditional writes, on which leases and tokenizers of machines rest.

Amazon S3, Google Cloud Storage and Azure do. Some servers that speak like S3 ignore the conditions:
with them two machines could train in one run, and neither would notice.
"""

from __future__ import annotations

import uuid

from infini_model.config.tree import RunConfig
from infini_model.runtime.errors import StoreError
from infini_model.runtime.fact_cache import fact_cache_here
from infini_model.runtime.object_stores.object_store import ObjectStore, split_address
from infini_model.runtime.object_stores.requests import endpoint_of


def check_stores(run: RunConfig, *, builds_dataset: bool) -> None:
    """Check the store of runs and, if a dataset is built, that of datasets.

    It takes five requests for each bucket, once on this machine. Raises `StoreError` if a store
    ignores conditions, and as `ObjectStore` does.
    """
    if run.store is not None:
        _check("run.output_dir", run.store, "from using one run", run)
    if builds_dataset and run.datasets_store is not None:
        setting = "run.output_dir" if run.data_store is None else "run.data_dir"
        _check(setting, run.datasets_store, "from making different tokenizers", run)


def _check(setting: str, address: str, kept: str, run: RunConfig) -> None:
    """Check one store, whose conditions keep two machines `kept`."""
    bucket = split_address(address)[0]
    facts = fact_cache_here(run.output_dir)
    fact = f"conditional writes: {bucket} {endpoint_of(bucket)}"
    if facts.get(fact) is None:
        if not _honours_conditions(ObjectStore(address)):
            raise StoreError(
                f"{setting}: {address}: the store ignores conditional writes, which keep two "
                f"machines {kept}; use one that honours If-None-Match and If-Match"
            )
        facts.put(fact, value=True)
    facts.save()


def _honours_conditions(store: ObjectStore) -> bool:
    key = f".conditions-{uuid.uuid4().hex}"
    try:
        first = store.create(key, b"1")
        if first is None or store.create(key, b"2") is not None:
            return False
        return (
            store.replace(key, b"3", first) is not None and store.replace(key, b"4", first) is None
        )
    finally:
        store.delete([key])

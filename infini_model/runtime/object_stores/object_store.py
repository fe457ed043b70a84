"""The former place of `infini_model.runtime.object_store`, for those who still import it."""

from infini_model.runtime.object_store import ObjectStore, StoredObject, Version, split_address

__all__ = ["ObjectStore", "StoredObject", "Version", "split_address"]

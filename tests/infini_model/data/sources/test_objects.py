"""Objects are source files: listed by what the store says, and read in place."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infini_model.data.sources.files import SourceFile, open_source
from infini_model.data.sources.objects import list_objects
from infini_model.runtime.errors import DataError
from infini_model.runtime.object_stores.object_store import ObjectStore


@pytest.fixture
def texts(bucket) -> ObjectStore:
    store = ObjectStore(f"{bucket}/texts")
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "d.md"):
        store.write(name, name.encode())
    return store


def test_objects_are_listed_by_address_with_the_fingerprints_of_their_content(texts, bucket):
    listed = list_objects(f"{bucket}/texts/**/*.txt")
    names = ["a.txt", "b.txt", "deep/er/c.txt"]
    assert [file.address for file in listed] == [f"{bucket}/texts/{name}" for name in names]
    assert [file.bytes for file in listed] == [len(name) for name in names]
    assert list_objects(f"{bucket}/texts/a.txt") == listed[:1]
    ObjectStore(bucket).write("copy/of/a.txt", b"a.txt")
    (copy,) = list_objects(f"{bucket}/copy/**")
    assert copy.fingerprint == listed[0].fingerprint
    texts.write("a.txt", b"A.txt")
    again = list_objects(f"{bucket}/texts/**/*.txt")
    assert again[1:] == listed[1:]
    assert again[0].fingerprint != listed[0].fingerprint
    assert SourceFile.model_validate_json(again[0].model_dump_json()) == again[0]


def test_objects_are_read_in_place(texts, bucket, tmp_path):
    for file in list_objects(f"{bucket}/texts/**"):
        with open_source(file) as opened:
            assert opened.read().decode() == file.address.removeprefix(f"{bucket}/texts/")
    table = pa.table({"text": [f"document {number}" for number in range(1000)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    texts.upload("t.parquet", tmp_path / "t.parquet")
    (file,) = list_objects(f"{bucket}/texts/*.parquet")
    with open_source(file) as opened:
        assert pq.ParquetFile(opened).read_row_groups([3, 4]) == table.slice(300, 200)


def test_an_object_that_changed_or_went_is_named(texts, bucket):
    (file,) = list_objects(f"{bucket}/texts/a.txt")
    texts.write("a.txt", b"other")
    with pytest.raises(DataError, match=rf"{file.address}: changed while it was read; run again"):
        read(file)
    texts.delete(["a.txt"])
    with pytest.raises(DataError, match=rf"{file.address}: not found"):
        read(file)
    texts.write("empty.txt", b"")
    (file,) = list_objects(f"{bucket}/texts/empty.txt")
    assert read(file) == b""
    texts.write("empty.txt", b"no longer")
    with pytest.raises(DataError, match=r"empty\.txt: changed while it was read"):
        read(file)


def read(file):
    with open_source(file) as opened:
        return opened.read()


def test_parquet_that_changed_raises_through_arrow(texts, bucket, tmp_path):
    table = pa.table({"text": [f"document {number}" * 40 for number in range(20_000)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=1000, use_dictionary=False)
    texts.upload("t.parquet", tmp_path / "t.parquet")
    (file,) = list_objects(f"{bucket}/texts/*.parquet")
    with open_source(file) as opened:
        parquet = pq.ParquetFile(opened)
        texts.write("t.parquet", b"something else")
        with pytest.raises(DataError, match=r"t\.parquet: changed while it was read"):
            parquet.read()


def test_what_cannot_be_listed_is_one_line(texts, bucket, s3):
    wrong = {
        f"{bucket}/texts/*.zip": r"data\.source\.paths: '.*zip' matches no object",
        f"{bucket}/texts": rf"matches no object; it is a folder: write {bucket}/texts/\*\*/\*\.txt",
        f"{bucket}/text": "/text' matches no object$",
        "s3://no-such-bucket/*": "s3://no-such-bucket: there is no such bucket",
        "foo://bucket/*": "foo://bucket/.*: unknown kind of address; takes s3:// gs:// az://",
    }
    for pattern, complaint in wrong.items():
        with pytest.raises(DataError, match=complaint) as caught:
            list_objects(pattern)
        assert "\n" not in str(caught.value)
    with s3.refusing(), pytest.raises(DataError, match=f"{bucket}/texts: access denied"):
        list_objects(f"{bucket}/texts/*")

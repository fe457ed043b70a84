"""The partitions of a source are a pure function of the set of its files."""

import base64
import hashlib
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from corpora import local_file, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from infini_model.data.partitions import plan_partitions
from infini_model.data.sources.files import SourceFile
from infini_model.data.sources.formats import read_documents, whole_file
from infini_model.data.sources.rows import Reading
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import FactCache

TARGET = 1000
KINDS = st.sampled_from(["txt", "md", "jsonl", "jsonl.gz", "csv"])


def source_file(content: int, size: int, kind: str, folder: str = "a") -> SourceFile:
    fingerprint = hashlib.sha256(f"{content} {size}".encode()).hexdigest()
    address = f"/{folder}/{content}.{kind}"
    return SourceFile(address=address, bytes=size, fingerprint=fingerprint, version="1")


FILES = st.lists(
    st.builds(source_file, st.integers(0, 10_000), st.integers(0, 3 * TARGET), KINDS),
    max_size=60,
    unique_by=lambda file: file.fingerprint,
)


def divided(files, tmp_path, reading=None):
    ranges = list(map(whole_file, files))
    return plan_partitions(ranges, reading or Reading(), TARGET, FactCache(tmp_path / "facts.json"))


def contents(partitions):
    """The partitions without names: what each holds."""
    return sorted(
        sorted((part.file.fingerprint, part.start, part.stop or -1) for part in partition.ranges)
        for partition in partitions
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("remembered")


@given(FILES, st.randoms())
def test_neither_names_nor_order_matter(folder, files, rng):
    moved = [
        file.model_copy(update={"address": file.address.replace("/a/", "/b/"), "version": "2"})
        for file in files
    ]
    rng.shuffle(moved)
    assert contents(divided(moved, folder)) == contents(divided(files, folder))


@given(FILES, st.sampled_from([None, "\n\n"]))
def test_every_byte_is_in_one_partition_of_bounded_size(folder, files, separator):
    partitions = divided(files, folder, Reading(separator=separator))
    covered = {}
    for partition in partitions:
        assert partition.bytes <= TARGET or len(partition.ranges) == 1
        for part in partition.ranges:
            covered.setdefault(part.file.fingerprint, []).append((part.start, part.stop))
    assert covered.keys() == {file.fingerprint for file in files}
    for parts in covered.values():
        parts.sort()
        assert (parts[0][0], parts[-1][1]) == (0, None)
        assert all(stop == start for (_, stop), (start, _) in pairwise(parts))


@given(FILES)
def test_a_file_more_touches_its_own_partitions_or_one(folder, files):
    if not files:
        return
    before, after = (contents(divided(part, folder)) for part in (files[1:], files))
    lost = [partition for partition in before if partition not in after]
    assert len(lost) <= 1
    kept = sum(partition in after for partition in before)
    assert kept + len(lost) == len(before)
    made = [partition for partition in after if partition not in before]
    # What joins a group that has no room for it divides the group, and moves nothing else.
    assert {part[0] for parts in made for part in parts} == {
        files[0].fingerprint,
        *(part[0] for parts in lost for part in parts),
    }


def test_equal_files_do_not_divide_for_ever(folder):
    (partition,) = divided([source_file(1, 900, "txt", str(n)) for n in range(5)], folder)
    assert len(partition.ranges) == 5


def test_a_parquet_file_is_cut_at_row_groups_and_its_footer_is_read_once(tmp_path):
    texts = [f"{number} " + "x" * 30 for number in range(300)]
    path = write_parquet(tmp_path / "a.parquet", texts, row_group_size=10, use_dictionary=False)
    part, facts = whole_file(local_file(path)), FactCache(tmp_path / "kept.json")
    partitions = plan_partitions([part], Reading(), TARGET, facts)
    assert 5 < len(partitions) < 30
    parts = [partition.ranges[0] for partition in partitions]
    assert (parts[0].start, parts[-1].stop) == (0, 30)
    assert all(a.stop == b.start for a, b in pairwise(parts))
    facts.save()
    path.unlink()
    facts = FactCache(tmp_path / "kept.json")
    assert plan_partitions([part], Reading(), TARGET, facts) == partitions


class Keys(encryption.KmsClient):
    """Wraps keys in nothing."""

    def __init__(self, _config):
        super().__init__()

    def wrap_key(self, key_bytes, _name):
        return base64.b64encode(key_bytes)


def test_an_encrypted_column_is_named_and_no_other_matters(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"body": ["a"], "text": ["b"]})
    secret = encryption.EncryptionConfiguration(
        "k", column_keys={"k": ["body"]}, plaintext_footer=True
    )
    properties = encryption.CryptoFactory(Keys).file_encryption_properties(
        encryption.KmsConnectionConfig(), secret
    )
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    (partition,) = divided([local_file(path)], tmp_path)
    (batch,) = read_documents(partition.ranges, Reading())
    assert batch.texts.to_pylist() == ["b"]
    with pytest.raises(DataError, match=r"a\.parquet: column 'body': cannot be read: .*decrypt"):
        divided([local_file(path)], tmp_path, Reading(column="body"))


def test_a_file_without_row_groups_makes_no_partition_and_a_damaged_one_is_named(tmp_path):
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("text", pa.string())])):
        pass
    assert divided([local_file(tmp_path / "a.parquet")], tmp_path) == []
    (tmp_path / "b.parquet").write_text("no")
    for name, reading, complaint in (
        ("a.parquet", Reading(column="body"), "has no column 'body'; it has: text"),
        ("b.parquet", Reading(), "cannot be read"),
    ):
        with pytest.raises(DataError, match=f"{name}: {complaint}"):
            divided([local_file(tmp_path / name)], tmp_path, reading)

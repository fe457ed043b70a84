"""A file of ranges reads as the bytes would, and asks for no more than it may."""

import io
import os
import random

import pytest

from infini_model.runtime.object_stores.ranged_file import RangedFile


@pytest.mark.parametrize("ahead", [(0, 0), (1, 1), (40, 40), (3, 500)])
def test_any_sequence_of_reads_is_that_of_the_bytes(ahead):
    data = os.urandom(300)
    fetched = []

    def fetch(start, stop):
        assert 0 <= start < stop <= len(data)
        fetched.append(stop - start)
        return data[start:stop]

    reader, plain = RangedFile(fetch, len(data), ahead), io.BytesIO(data)
    rng = random.Random(ahead[1])
    for _ in range(500):
        if rng.random() < 0.4:
            offset, whence = rng.choice([(rng.randrange(350), 0), (-rng.randrange(99), 2), (7, 1)])
            assert reader.seek(offset, whence) == plain.seek(offset, whence)
        size = rng.choice([rng.randrange(10), rng.randrange(200), -1])
        before = plain.tell()
        assert reader.read(size) == plain.read(size)
        assert reader.tell() == plain.tell()
        if fetched and plain.tell() > before:
            assert fetched[-1] <= max(plain.tell() - before, 0) + ahead[1]
        fetched.clear()

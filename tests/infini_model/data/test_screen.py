"""Screening: what datatrove drops is dropped, by any partitions, and nothing is done twice."""

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import eventually

from infini_model.config import DataConfig
from infini_model.data import screen
from infini_model.data.screen import FOLDER, KEPT, screen_sources
from infini_model.data.sources.listing import list_sources
from infini_model.runtime.errors import DataError

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeiou"]
FILES = 4
# Beside each text: without it, all would be one partition, and texts of megabytes take long.
PADDING = "x" * 40_000


def sentence(draw: random.Random) -> str:
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(2, 4))) for _ in range(9)]
    return f"The {' '.join(words[:5])} of that {' '.join(words[5:])}."


def texts() -> list[str]:
    """Prose, copies of some of it, near copies of others, and what no filter likes."""
    draw = random.Random(7)
    prose = [" ".join(sentence(draw) for _ in range(20)) for _ in range(60)]
    near = [f"{text} {sentence(draw)}" for text in prose[10:20]]
    junk = ["### ... " * 80, "buy now", "{ } " * 100, "1 2 3 4 5 6 7 8 9 0 " * 20]
    found = [*prose, *prose[:10], *near, *junk]
    draw.shuffle(found)
    return found


def write(folder: Path, documents: list[str], name: str = "part") -> None:
    folder.mkdir(exist_ok=True)
    for number in range(FILES):
        rows = [{"text": text, "padding": PADDING} for text in documents[number::FILES]]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}-{number}.jsonl").write_text(lines, encoding="utf-8")


def config(folder: Path, **settings) -> DataConfig:
    source = {"paths": f"{folder}/*.jsonl", "screen": settings}
    return DataConfig(source=source, partition_megabytes=1, workers=2)


def run(settings: DataConfig, root: Path):
    """The texts that are left, the counts and the listing."""
    listing, found = screen_sources(
        list_sources(settings, root), settings, root / "datasets", lambda _done, _total: None
    )
    tables = [pq.read_table(part.file.address) for part in listing.ranges]
    return [text for table in tables for text in table["text"].to_pylist()], found[""], listing


def made(root: Path) -> dict[Path, int]:
    """The texts kept by partitions, by file, and when they were written."""
    files = (root / "datasets" / FOLDER).glob(f"*/{KEPT}")
    return {path: path.stat().st_mtime_ns for path in files}


def test_the_texts_and_counts_are_those_of_datatroves_own_pipeline(tmp_path):
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.filters import C4QualityFilter, GopherQualityFilter

    write(tmp_path / "raw", texts())
    filters = {
        "GopherQualityFilter": {"min_doc_words": 20},
        "C4QualityFilter": {"min_num_sentences": 3},
    }
    kept, found, _ = run(config(tmp_path / "raw", filters=filters, minhash=None), tmp_path)

    expected = []
    steps = [GopherQualityFilter(min_doc_words=20), C4QualityFilter(min_num_sentences=3)]
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts())]
    gather = lambda data, *_: expected.extend(each.text for each in data)  # noqa: E731
    logs = str(tmp_path / "logs")
    LocalPipelineExecutor([documents, *steps, gather], workers=1, logging_dir=logs).run()
    assert Counter(kept) == Counter(expected)
    assert len(made(tmp_path)) >= FILES
    assert (found.documents, found.kept) == (len(texts()), len(expected))
    assert found.dropped["GopherQualityFilter: gopher_short_doc"] >= 1
    assert sum(found.dropped.values()) == len(texts()) - len(expected)


def test_one_of_each_group_of_near_duplicates_is_left_whatever_files_are_called(tmp_path):
    write(tmp_path / "raw", texts())
    kept, found, listing = run(config(tmp_path / "raw"), tmp_path)
    beginnings = Counter(text[:200] for text in kept)
    assert beginnings == {text[:200]: 1 for text in texts()}
    assert found.dropped == {screen.DUPLICATES: 20}

    (tmp_path / "other").mkdir()
    for number, path in enumerate(sorted((tmp_path / "raw").iterdir(), reverse=True)):
        path.rename(tmp_path / "other" / f"{number}.jsonl")
    before = made(tmp_path)
    _, _, again = run(config(tmp_path / "other"), tmp_path)
    assert again == listing
    assert made(tmp_path) == before


def test_a_file_more_or_a_damaged_one_costs_its_own_partitions(tmp_path):
    write(tmp_path / "raw", texts())
    settings = config(tmp_path / "raw", filters={"FineWebQualityFilter": {"line_punct_thr": 0.0}})
    kept, _, _ = run(settings, tmp_path)
    before = made(tmp_path)

    damaged = min(before)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert run(settings, tmp_path)[0] == kept
    after = made(tmp_path)
    assert {path for path in before if after[path] != before[path]} == {damaged}

    new = json.dumps({"text": texts()[0], "padding": "x" * (2 << 20)})
    (tmp_path / "raw" / "new.jsonl").write_text(f"{new}\n", encoding="utf-8")
    found = run(settings, tmp_path)[1]
    assert {path: made(tmp_path)[path] for path in after} == after
    assert len(made(tmp_path)) > len(after)
    assert found.documents == len(texts()) + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"filters": {"GopherQualityFilter": {"min_words": 3}}},
            r"data\.source\.screen: GopherQualityFilter.*'min_words'",
        ),
        ({"language": "klingon"}, r"data\.source\.screen: .*klingon"),
        (
            {"filters": {"GopherQualityFilter": {"min_doc_words": ["many"]}}},
            r"data\.source\.screen\.filters\.GopherQualityFilter: .* not supported between",
        ),
        (
            {"filters": {"GopherQualityFilter": {"min_doc_words": 1000}}},
            r"data\.source\.screen: none of 84 documents is left; Goph\w+: gopher_short_doc: 84",
        ),
    ],
)
def test_a_mistake_is_named_in_one_line(tmp_path, settings, message):
    write(tmp_path / "raw", texts())
    with pytest.raises(DataError, match=f"^{message}") as raised:
        run(config(tmp_path / "raw", **settings), tmp_path)
    assert "\n" not in str(raised.value)


def test_a_text_that_cannot_be_read_names_its_file_not_the_filter(tmp_path):
    (tmp_path / "latin.txt").write_bytes("süß".encode("latin-1"))
    screening = {"filters": {"FineWebQualityFilter": {}, "C4QualityFilter": {}}}
    settings = DataConfig(source={"paths": f"{tmp_path}/*.txt", "screen": screening})
    with pytest.raises(DataError, match=rf"^{tmp_path}/latin\.txt: .*UTF-8"):
        run(settings, tmp_path)


def test_a_source_without_documents_is_refused(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    settings = DataConfig(source={"paths": f"{tmp_path}/*.parquet", "screen": {}})
    with pytest.raises(DataError, match=r"^data\.source\.screen: none of 0 documents is left"):
        run(settings, tmp_path)


def test_conversations_are_refused():
    with pytest.raises(ValueError, match="screen takes texts; leave it out beside pairs"):
        DataConfig(source={"paths": "x.jsonl", "pairs": True, "screen": {}})


def test_without_datatrove_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    write(tmp_path / "raw", texts()[:4])
    monkeypatch.setitem(sys.modules, "datatrove.utils.word_tokenizers", None)
    with pytest.raises(DataError, match=r"^data\.source\.screen: .*: pip install .*\[screen\]"):
        run(config(tmp_path / "raw"), tmp_path)


@pytest.mark.story
def test_a_killed_screening_goes_on_after_the_partitions_that_are_finished(tmp_path):
    write(tmp_path / "raw", texts() * 4)
    settings = config(tmp_path / "raw")
    expected = run(settings, tmp_path / "whole")[2]
    file = tmp_path / "config.json"
    output = tmp_path / "killed"
    file.write_text(json.dumps({"run": {"output_dir": str(output)}, "data": settings.model_dump()}))
    command = [sys.executable, "-m", "infini_model", "screen", "--config", str(file)]
    listing = tmp_path / "listing.json"
    listing.write_text(list_sources(settings, output).model_dump_json())
    process = subprocess.Popen([*command, "--listing", str(listing)], stdout=subprocess.PIPE)
    eventually(lambda: bool(made(output)), "a screened partition")
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = made(output)
    found = run(settings, output)[2]
    assert [each.file.fingerprint for each in found.ranges] == [
        each.file.fingerprint for each in expected.ranges
    ]
    assert {path: made(output)[path] for path in before} == before

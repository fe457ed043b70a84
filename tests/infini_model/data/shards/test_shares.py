"""Shares of a dataset: disjoint, made anywhere and in any order; the last one assembles it."""

import multiprocessing
import random

import pytest
from corpora import build, files_config, make_texts, write_files

from infini_model.data.shards.dataset import build_dataset, make_share
from infini_model.data.shards.partition_store import LocalPartitions
from infini_model.data.sources.download import download
from infini_model.data.verification import verify_dataset

SHARES = 3


def config_of(tmp_path):
    raw = write_files(tmp_path / "raw", [text * 200 for text in make_texts(30)])
    return files_config(raw / "*", partition_megabytes=1, workers=1)


def share(config, output_dir, number, count=SHARES):
    """What the share stage does: how many partitions are missing then."""
    config = config.model_copy(update={"share": f"{number}/{count}"})
    return make_share(download(config, output_dir), config, output_dir / "datasets")


def made(output_dir):
    return LocalPartitions(output_dir / "datasets").keys()


def shards(output_dir):
    return {
        str(path.relative_to(output_dir)): path.read_bytes() for path in output_dir.rglob("*.arrow")
    }


@pytest.mark.parametrize("seed", range(2))
def test_shares_in_any_order_make_each_partition_once_and_the_same_dataset(tmp_path, seed, caplog):
    caplog.set_level("INFO")
    config = config_of(tmp_path)
    expected, _ = build(config, tmp_path / "whole")
    total, output = len(set(expected.partitions)), tmp_path / "shares"
    assert total > 2 * SHARES
    order = random.Random(seed).sample(range(1, SHARES + 1), SHARES)
    for number in order:
        before = made(output)
        missing = share(config, output, number)
        new = made(output) - before
        assert len(new) in (total // SHARES, total // SHARES + 1)
        assert f"share {number}/{SHARES}: {len(new)} partitions to make, 0 present" in caplog.text
        assert missing == total - len(made(output))
    assert missing == 0
    assert not list((output / "datasets").glob("corpus-*"))
    manifest = build_dataset(download(config, output), config, output)
    assert shards(output) == shards(tmp_path / "whole")
    assert manifest.splits == expected.splits


def test_what_stands_is_not_made_again_and_changes_no_other_share(tmp_path, caplog):
    caplog.set_level("INFO")
    config = config_of(tmp_path)
    share(config, tmp_path, 1)
    first = made(tmp_path)
    share(config, tmp_path, 1)
    assert f"share 1/{SHARES}: 0 partitions to make, {len(first)} present" in caplog.text
    share(config, tmp_path, 2)
    second = made(tmp_path) - first
    assert second
    # Those of the second share are the same, whatever stands of the first.
    elsewhere = tmp_path / "elsewhere"
    share(config, elsewhere, 2)
    assert made(elsewhere) == second


def test_more_shares_than_partitions_leave_nothing_over(tmp_path):
    config = config_of(tmp_path)
    missing = [share(config, tmp_path, number, 20) for number in range(1, 21)]
    assert missing == sorted(missing, reverse=True)
    assert missing[-1] == 0


def _make_and_assemble(config, output_dir, number):
    if share(config, output_dir, number) == 0:
        build_dataset(download(config, output_dir), config, output_dir)


def test_shares_at_the_same_time_end_with_one_dataset(tmp_path):
    config = config_of(tmp_path)
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_make_and_assemble, args=(config, tmp_path / "shares", number))
        for number in range(1, SHARES + 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * SHARES
    build(config, tmp_path / "whole")
    (folder,) = (tmp_path / "shares" / "datasets").glob("corpus-*")
    verify_dataset(folder)
    assert shards(tmp_path / "shares") == shards(tmp_path / "whole")

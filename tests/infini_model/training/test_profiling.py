"""A profile of a few steps, and what a training says of its memory and its garbage."""

import gc
import gzip
import json
import logging
import weakref
from types import SimpleNamespace

import pytest
from curves import curve, repeatable, weights
from stopping import StopAfter

from infini_model.training.garbage_collection import STEPS, GarbageCollection
from infini_model.training.profiling import OPERATORS, profile_files
from infini_model.training.train import train


def operators(run_dir):
    """The lines of the table of operators."""
    return (run_dir / OPERATORS).read_text().splitlines()


def test_the_steps_that_are_named_are_traced_and_the_training_is_the_same(
    dataset, make_config, tmp_path
):
    profiled = make_config(logging={"profile": {"start": 6, "steps": 2}})
    train(profiled, dataset, tmp_path / "profiled")
    train(make_config(), dataset, tmp_path / "plain")
    assert weights(tmp_path / "profiled") == weights(tmp_path / "plain")
    assert repeatable(tmp_path / "profiled") == repeatable(tmp_path / "plain")

    title, _, heads, *table = operators(tmp_path / "profiled")
    assert title == "Steps 6 to 7, rank 0"
    # Which operators are the dearest is up to the machine; long names are cut.
    assert heads.rstrip().endswith("# of Calls")
    rows = [row.split() for row in table if row.startswith((" ", "aten::"))]
    calls = {row[0]: int(row[-1]) for row in rows if row and row[0].startswith("aten::")}
    calls = {name: count for name, count in calls.items() if not name.endswith("...")}
    assert calls
    assert [path.name for path in profile_files(tmp_path / "profiled")] == [
        "operators.txt",
        "rank-0.json.gz",
    ]
    events = json.loads(
        gzip.decompress((tmp_path / "profiled/profile/rank-0.json.gz").read_bytes())
    )
    names = [each.get("name", "") for each in events["traceEvents"] if each.get("ph") == "X"]
    assert sum(name.startswith("ProfilerStep") for name in names) == 2
    # The table leaves out the calls that an operator makes of itself.
    assert all(0 < count <= names.count(name) for name, count in calls.items())
    # The products of the layers: each step has as many.
    products = names.count("aten::mm")
    assert products > 0
    assert products % 2 == 0
    assert calls.get("aten::mm", products) == products
    assert not profile_files(tmp_path / "plain")


def test_a_profile_ends_before_a_checkpoint_and_one_that_is_too_late_is_warned_of(
    dataset, make_config, tmp_path, caplog
):
    late = make_config(logging={"profile": {"start": 6, "steps": 50}})
    step = train(late, dataset, tmp_path, [StopAfter(9)]).step
    assert operators(tmp_path)[0] == "Steps 6 to 8, rank 0"
    with caplog.at_level(logging.WARNING):
        train(late, dataset, tmp_path)
    assert f"nothing is profiled, since the training resumes from step {step};" in caplog.text
    assert f"set logging.profile.start to {step + 2} or more" in caplog.text
    assert operators(tmp_path)[0] == "Steps 6 to 8, rank 0"


def test_a_profile_that_cannot_be_written_costs_a_warning(dataset, make_config, tmp_path, caplog):
    (tmp_path / "profile").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        train(make_config(logging={"profile": {"start": 2}}), dataset, tmp_path)
    assert "cannot write the profile" in caplog.text
    assert list(curve(tmp_path, "train/loss")) == list(range(1, 13))


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def collection():
    """A training whose garbage is collected by steps."""
    callback = GarbageCollection()
    callback.on_start(0)
    yield callback
    callback.on_end("FINISHED")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_after_whole_numbers_of_steps_alone(collection):
    left = weakref.ref(Cycle())
    _ = [[] for _ in range(100_000)]  # enough for Python to collect, left to itself
    collection.after_step(SimpleNamespace(number=STEPS - 1), {})
    assert left() is not None
    collection.after_step(SimpleNamespace(number=STEPS), {})
    assert left() is None

"""Which dataset is meant, and which one is the newest, in a folder and in an object store."""

import shutil
from pathlib import Path

import pytest
from builds import Machine
from corpora import files_config, write_files

from infini_model.config.tree import RunConfig
from infini_model.data.lookup import check_holds_datasets, finished_dataset, resolve_dataset
from infini_model.runtime.errors import ConfigError, DataError


@pytest.fixture(params=["folder", "store"])
def machine(request, tmp_path):
    is_stored = request.param == "store"
    address = f"{request.getfixturevalue('bucket')}/team/datasets" if is_stored else None
    return Machine(tmp_path / "outputs" / "datasets", address)


@pytest.fixture
def raw(tmp_path):
    return write_files(tmp_path / "raw", [f"a text {number} " * 50 for number in range(20)])


def named(spec, run):
    place = resolve_dataset(spec, run)
    name = place.rpartition("/")[2]
    return (run.datasets_dir / name).resolve().name


def test_a_dataset_is_meant_by_its_name_its_place_or_a_place_above(machine, raw, tmp_path):
    output = machine.folder.parent
    run = RunConfig(output_dir=output, data_dir=machine.folder, data_store=machine.address)
    with pytest.raises(DataError, match="there is no finished dataset yet"):
        resolve_dataset(None, run)
    data = files_config(raw / "*", name="mine")
    old = machine.build(data).folder_name
    (raw / "more.txt").write_text("another text " * 50)
    new = machine.build(data).folder_name
    other = machine.build(files_config(raw / "*", name="mine-too")).folder_name
    machine.plan(data.model_copy(update={"source": files_config(raw / "0*").source}))

    own = machine.address or str(machine.folder)
    above = own.removesuffix("/datasets")
    newest = {None, "latest", own, above, f"{own}/", output, "datasets"}
    for spec, meant in {
        **dict.fromkeys(newest, old),
        "mine-too": other,
        **dict.fromkeys((new, f"{own}/{new}", f"datasets/{new}", machine.folder / new), new),
        # A store tells times in seconds, and knows the folders of other machines by their names.
        **({"mine": new} if machine.address is None else {Path("/elsewhere") / new: new}),
    }.items():
        assert named(spec, run) == meant, spec

    before = sorted(tmp_path.rglob("*"))
    wrong = (f"{tmp_path}/raw", f"{own}/mine", f"{above}/none", str(tmp_path))
    for spec in ("elsewhere", "mine-", *wrong):
        with pytest.raises(DataError) as caught:
            finished_dataset(machine.config(data.model_copy(update={"folder": spec})))
        beginning, _, listed = str(caught.value).partition(" has ")
        assert beginning == f"{spec}: is no dataset; {own}"
        assert set(listed.split(", ")) == {old, new, other}
    assert sorted(tmp_path.rglob("*")) == before

    if machine.address is None:
        shutil.copytree(machine.folder / new, tmp_path / "copy" / new)
        copy = machine.finished(data.model_copy(update={"folder": tmp_path / "copy" / new}))
        assert copy.folder == tmp_path / "copy" / new
        assert not (tmp_path / "copy" / ".locks").exists()

    inside = {"output_dir": output, "data_dir": f"{own}/{new}"}
    with pytest.raises(ConfigError, match=f"run.data_dir: {own}/{new} is a finished dataset"):
        check_holds_datasets(RunConfig(**inside))


def test_the_dataset_that_was_asked_for_last_is_the_newest(machine, raw):
    data, theirs = (files_config(raw / "*", name=name) for name in ("nightly", "theirs"))

    def newest():
        return machine.finished(data).folder.name

    first, chosen = (machine.build(each).folder_name for each in (data, theirs))
    for asked in (machine.plan, machine.build):
        assert newest() == chosen
        asked(data)
        assert newest() == first
        asked(theirs)
    (raw / "more.txt").write_text("another text " * 50)
    machine.plan(data)
    assert newest() == chosen  # of one that does not exist yet there is only a plan
    second = machine.build(data).folder_name
    assert newest() == second != first
    assert (machine.folder / "latest").resolve().name == second

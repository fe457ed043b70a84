"""Claims: one holder, one configuration; an interrupted run is resumed, a finished one is not."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
from claiming import NIGHT, UI, claim, config_of
from commands import PATIENCE, eventually

from flows.evaluate import _as_trained
from infini_model.config import Section, load_config
from infini_model.runtime import claims
from infini_model.runtime.claims import claim_run, resume_config
from infini_model.runtime.errors import ConfigError, DataError
from infini_model.runtime.holders import Owner
from infini_model.runtime.runs import find_run, is_finished, is_started, owner_of, run_holder


def test_an_interrupted_run_is_resumed_and_a_finished_one_is_not(tmp_path: Path) -> None:
    first = claim(config_of(tmp_path))
    assert first.name == "debug-1"
    assert claim(config_of(tmp_path), finish=True) == first
    assert is_finished(first)
    second = claim(config_of(tmp_path))
    assert second.name == "debug-2"
    assert (tmp_path / "runs" / "latest").resolve() == second


def test_other_settings_or_data_start_another_run(tmp_path: Path) -> None:
    first = claim(config_of(tmp_path))
    assert claim(config_of(tmp_path, "training.learning_rate=1e-4")) != first
    assert claim(config_of(tmp_path), "k2") != first
    free = ("checkpoint.save_steps=3", "run.log_level=info", "launch.processes=2")
    assert claim(config_of(tmp_path, *free)) == first


SPLITS = "data.splits={train: 0.8, validation: 0.1, test: 0.1}"


NODES = ("launch.num_nodes=2", "launch.rdzv_endpoint=first:29500", "run.name=debug-1")


SCALING = (
    "{factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 8192}"
)


DIFFUSION = (
    "training.objective=masked_diffusion",
    "model.memory=none",
    "model.segment_length=4096",
)
# Values other than the debug preset's, for keys where none can be derived from its value.
OTHER: dict[str, tuple[str, ...]] = {
    "data.name": ("data.name=other",),
    "data.source.kind": ("data.source={kind: hub, repository: ag_news}",),
    "data.source.paths": ("data.source.paths=[a.txt]",),
    "data.source.column": ("data.source.column=body",),
    "data.source.separator": ("data.source.separator=x",),
    "data.tokenizer.spec": ("data.tokenizer.spec=train",),
    "data.splits.train": (SPLITS,),
    "data.splits.validation": (SPLITS,),
    "data.splits.test": (SPLITS,),
    "data.folder": ("data.folder=elsewhere",),
    "data.cache_gigabytes": ("data.cache_gigabytes=5",),
    "data.ray_address": ("data.ray_address=head:6379",),
    "data.ray_memory_gigabytes": ("data.ray_memory_gigabytes=8",),
    "data.share": ("data.share=2/4",),
    "launch.launcher": ("launch.launcher=ray",),
    "launch.nodes": ("launch.launcher=ray", "launch.nodes=2-4"),
    "launch.ray_address": ("launch.ray_address=head:6379",),
    "data.device": ("data.device=cpu",),
    "packing.context_length": ("packing.context_length=256",),
    "model.initial_weights": ("model.initial_weights=a/b", "model.segment_length=128"),
    "model.vocab_size": ("model.vocab_size=300",),
    "model.hidden_size": ("model.hidden_size=64",),
    "model.num_attention_heads": ("model.num_attention_heads=2",),
    "model.num_key_value_heads": ("model.num_key_value_heads=1",),
    "model.head_dim": ("model.head_dim=8",),
    "model.rope_scaling": (f"model.rope_scaling={SCALING}",),
    "model.segment_length": ("model.segment_length=64",),
    "model.memory_query_shift": ("model.memory_query_shift=true",),
    "model.bidirectional": (*DIFFUSION, "model.bidirectional=true"),
    "model.mask_token_id": ("model.mask_token_id=7",),
    "training.objective": DIFFUSION,
    "data.keep": ("data.keep=3",),
    "training.epochs": ("training.epochs=3",),
    "training.lora": ("model.initial_weights=a/b", "model.segment_length=128", "training.lora={}"),
    "launch.gpus": ("launch.gpus=0,3",),
    "launch.processes": ("launch.processes=2",),
    "launch.num_nodes": NODES,
    "launch.node_rank": (*NODES, "launch.node_rank=1"),
    "launch.rdzv_endpoint": ("launch.rdzv_endpoint=first:29500",),
    "launch.compile": ("launch.compile=true",),
    "launch.hang_timeout_seconds": ("launch.hang_timeout_seconds=60",),
    "logging.tensorboard_dir": ("logging.tensorboard_dir=boards",),
    "evaluation.max_windows": ("evaluation.max_windows=3",),
    "evaluation.tasks": ("evaluation.tasks=[sample]",),
    "evaluation.lm_eval.tasks": ("evaluation.lm_eval.tasks=[other]",),
    "evaluation.lm_eval.num_fewshot": ("evaluation.lm_eval.num_fewshot=3",),
    "evaluation.lm_eval.limit": ("evaluation.lm_eval.limit=3",),
    **{
        f"stages.{stage}.deployment": (f"stages.{stage}.deployment=elsewhere",)
        for stage in ("shard", "train", "evaluate")
    },
    "comparison.runs": ("comparison.runs=[other]",),
    "comparison.sweep": ("comparison.sweep=['run.seed=1,2']",),
    **{
        f"evaluation.{task}.{name}": (f"evaluation.{task}.{name}=[3, 4, 5, 6, 7]",)
        for task, name in (
            *(("needles", "lengths"), ("needles", "depths")),
            *(("passkey", "lengths"), ("passkey", "depths")),
            *(("recall", "lengths"), ("throughput", "lengths")),
        )
    },
    "evaluation.loss_by_position.segments": ("evaluation.loss_by_position.segments=3",),
    "evaluation.sample.unmasking.steps": ("evaluation.sample.unmasking.steps=3",),
    "evaluation.sample.unmasking.confidence_threshold": (
        "evaluation.sample.unmasking.confidence_threshold=0.9",
    ),
    "evaluation.sample.top_p": ("evaluation.sample.top_p=0.9",),
    "tracking.tracking_uri": ("tracking.tracking_uri=http://localhost:5000",),
    "tracking.experiment_name": ("tracking.experiment_name=other",),
    "tracking.registered_model": ("tracking.registered_model=other",),
    "run.data_dir": ("run.data_dir=elsewhere",),
}


# Keys that choose the folder.
PLACES = {"run.name", "run.preset", "run.output_dir", "run.store", "run.data_store"}


def leaves(section: Section, above: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every key below `section` except `PLACES`, with overrides that change its value."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{above}{name}"
        if isinstance(value, Section):
            yield from leaves(value, f"{key}.")
        elif key in OTHER:
            yield key, list(OTHER[key])
        elif isinstance(value, bool):
            yield key, [f"{key}={not value}"]
        elif isinstance(value, int | float):
            yield key, [f"{key}={value + 1 if isinstance(value, int) else value / 2 or 0.5}"]
        elif key.endswith(".timeout_seconds"):
            yield key, [f"{key}=60"]
        elif key not in PLACES:
            others = [choice for choice in get_args(field.annotation) if choice != value]
            yield from ((key, [f"{key}={other}"]) for other in others[:1])


@pytest.mark.parametrize(("key", "change"), list(leaves(load_config())))
def test_a_run_resumes_with_any_change_that_does_not_decide_its_weights(
    key: str, change: list[str], tmp_path: Path
) -> None:
    first = claim(config_of(tmp_path))
    changed = config_of(tmp_path, *change)
    assert changed != config_of(tmp_path)
    decides = key.split(".")[0] in ("packing", "model", "training") or key == "run.seed"
    assert (changed.identity != config_of(tmp_path).identity) is decides
    assert (claim(changed) != first) is decides
    resume = [text for text in change if not text.startswith("run.name=")]
    if decides:
        with pytest.raises(ConfigError, match="cannot be resumed with different settings"):
            resume_config(first, resume)
    else:
        assert resume_config(first, resume).identity == changed.identity


def test_concurrent_claims_never_share_a_folder(tmp_path: Path) -> None:
    with (
        claim_run(config_of(tmp_path), "k1", Path("data")) as one,
        claim_run(config_of(tmp_path), "k1", Path("data")) as two,
    ):
        assert one != two


def test_a_killed_lock_holder_blocks_no_other_command(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; "
        "from infini_model.config import load_config\n"
        "from infini_model.runtime.claims import claim_run\n"
        "config = load_config(overrides=['run.preset=debug', 'run.output_dir=' + sys.argv[1]])\n"
        "with claim_run(config, 'k1', Path('data')): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert claim(config_of(tmp_path)).name == "debug-1"


def test_a_named_run_gets_its_folder_or_fails(tmp_path: Path) -> None:
    named = config_of(tmp_path, "run.name=mine")
    assert claim(named, finish=True) == claim(named) == tmp_path / "runs" / "mine"
    with pytest.raises(ConfigError, match=r"run\.name: .*mine .*training\.learning_rate is"):
        claim(config_of(tmp_path, "run.name=mine", "training.learning_rate=1e-4"))
    with pytest.raises(ConfigError, match="the dataset differs"):
        claim(named, "k2")
    with claim_run(named, "k1", Path("data")), pytest.raises(ConfigError, match="in use"):
        claim(named)


def test_other_machines_join_the_run_of_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()

    def is_started_yet(run_dir: Path) -> bool:
        looked.set()
        return is_started(run_dir)

    monkeypatch.setattr(claims, "is_started", is_started_yet)
    shared = ["run.name=mine", "launch.num_nodes=2", "launch.rdzv_endpoint=first:29500"]
    first = config_of(tmp_path, *shared)
    second = config_of(tmp_path, *shared, "launch.node_rank=1")
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(claim, second)
        assert looked.wait(PATIENCE)
        with claim_run(first, "k1", Path("data")) as run_dir:
            assert joined.result(PATIENCE) == run_dir


def test_another_machine_does_not_wait_for_a_run_that_is_another_one(tmp_path: Path) -> None:
    shared = ["run.name=mine", "launch.num_nodes=2", "launch.rdzv_endpoint=first:29500"]
    second = config_of(tmp_path, *shared, "launch.node_rank=1")
    other = config_of(tmp_path, *shared, "training.learning_rate=1e-4")
    with claim_run(other, "k1", Path("data")):
        match = r"mine holds another run, in use by process \d+ \(training\.learning_rate is"
        with pytest.raises(ConfigError, match=match):
            claim(second)
    with pytest.raises(ConfigError, match=r"mine holds another run \(training\.learning_rate is"):
        claim(second)
    with pytest.raises(ConfigError, match="the dataset differs"):
        claim(
            config_of(tmp_path, *shared, "launch.node_rank=1", "training.learning_rate=1e-4"), "k2"
        )


def test_a_claim_killed_before_the_run_started_leaves_its_name_usable(tmp_path: Path) -> None:
    (tmp_path / "runs" / "debug-1").mkdir(parents=True)
    assert claim(config_of(tmp_path)).name == "debug-1"


def test_a_flow_run_gets_its_own_folder_back_and_no_other(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first = claim(config, owner=UI, adopt=False)
    assert find_run(tmp_path / "runs", "ui") == first
    assert find_run(tmp_path / "runs", "night") is None
    second = claim(config, owner=NIGHT, adopt=False)
    assert second != first
    for _ in range(2):
        assert claim(config, owner=UI, adopt=False, finish=True) == first
    assert owner_of(first) == UI
    with pytest.raises(ConfigError, match=r"debug-2 holds another run \(the dataset differs"):
        claim(config, "k2", owner=NIGHT, adopt=False)


def test_a_flow_run_does_not_take_back_a_run_that_another_has_resumed(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first = claim(config, owner=UI, adopt=False)
    assert claim(config, owner=NIGHT) == first
    message = r"debug-1 has since been resumed by flow run night; take it over with infini resume"
    with pytest.raises(ConfigError, match=message):
        claim(config, owner=UI, adopt=False)
    assert find_run(tmp_path / "runs", "ui") == first
    # Anyone may resume a run by its name if nobody holds it.
    assert claim(resume_config(first), owner=Owner("by name"), adopt=False) == first


def test_a_second_claim_fails_and_names_the_holder(tmp_path: Path) -> None:
    named = config_of(tmp_path, "run.name=mine")
    with claim_run(named, "k1", Path("data"), owner=UI) as run_dir:
        holder = run_holder(run_dir)
        assert holder is not None
        assert (holder.pid, holder.flow_run, holder.run) == (os.getpid(), "ui", str(run_dir))
        assert holder.is_on_this_machine()
        message = rf"mine is in use by process {os.getpid()} \(flow run {UI.url}\)$"
        with pytest.raises(ConfigError, match=message):
            claim(named, owner=NIGHT)
    assert run_holder(run_dir) is None


def test_a_flow_run_waits_for_its_own_earlier_process_to_exit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path)
    released = threading.Event()

    def hold_until_released() -> None:
        with claim_run(config, "k1", Path("data"), owner=UI):
            begun.set()
            assert released.wait(PATIENCE)

    begun = threading.Event()
    with ThreadPoolExecutor() as pool:
        pool.submit(hold_until_released)
        assert begun.wait(PATIENCE)
        with pytest.raises(ConfigError, match="in use by process"):
            claim(config, owner=UI, release_seconds=0.0)
        second = pool.submit(claim, config, owner=UI)
        eventually(lambda: "Waiting for process" in caplog.text, "the wait")
        assert not second.done()
        released.set()
        assert second.result(PATIENCE).name == "debug-1"


def test_a_run_is_resumed_with_its_own_settings_and_dataset(tmp_path: Path) -> None:
    begun = claim(config_of(tmp_path / "before", "training.learning_rate=2e-3"))
    run_dir = (tmp_path / "before").rename(tmp_path / "after") / "runs" / begun.name
    config = resume_config(run_dir, ["launch.gpus=cpu", "logging.logging_steps=7"])
    assert config.training.learning_rate == 2e-3
    assert config.logging.logging_steps == 7
    assert config.data.folder == Path("data").resolve()
    assert claim(config) == run_dir
    for override, message in {
        "training.learning_rate=1e-4": r"training\.learning_rate is 0\.002, not 0\.0001",
        "model.head_dim=64": r"model\.head_dim is None, not 64",
        "run.name=other": r"run\.name: .* can only be resumed under its own name",
    }.items():
        with pytest.raises(ConfigError, match=message):
            resume_config(run_dir, [override])
    with pytest.raises(DataError, match="not a run folder"):
        resume_config(begun)


def test_the_datasets_folder_of_another_machine_becomes_that_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("run.data_dir=s3://bucket/data", "data.folder=data")
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "one"))
    run_dir = claim(config_of(tmp_path, *asked))
    chosen = claim(
        config_of(tmp_path, "run.name=own", "run.data_dir=/ssd", "run.data_store=s3://b")
    )
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "two"))
    here = config_of(tmp_path, *asked).run.datasets_dir
    assert here.parent == tmp_path / "two"
    assert resume_config(run_dir).run.datasets_dir == here
    assert _as_trained(config_of(tmp_path), run_dir).run.datasets_dir == here
    assert resume_config(chosen).run.datasets_dir == Path("/ssd")
    other = resume_config(run_dir, ["run.data_dir=elsewhere"])
    assert other.run.datasets_dir == Path("elsewhere")


@pytest.mark.parametrize("own", [False, True])
def test_a_dataset_that_is_not_here_is_found_by_its_address(tmp_path: Path, own: bool) -> None:
    dataset, address = tmp_path / "copy" / "mine-1", "s3://other/datasets/mine-1"
    dataset.mkdir(parents=True)
    store = ["run.data_store=s3://other/datasets"] if own else []
    config = config_of(tmp_path, *store)
    with claim_run(config, "k1", dataset, address=address) as run_dir:
        pass
    for asked in (resume_config(run_dir), _as_trained(config, run_dir)):
        assert asked.data.folder == dataset
    dataset.rmdir()
    # What the run's own store has is found by its name, wherever that store is now.
    for asked in (resume_config(run_dir), _as_trained(config, run_dir)):
        assert asked.data.folder == (dataset if own else address)
    assert resume_config(run_dir, ["data.folder=elsewhere"]).data.folder == Path("elsewhere")

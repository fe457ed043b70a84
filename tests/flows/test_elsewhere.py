"""What a stage elsewhere is started with, and what is refused before any work."""

from pathlib import Path

import pytest
from commands import (
    Environment,
    infini,
    infini_here,
    run,
    tiny,
    write_settings,
)

from flows.elsewhere import check_elsewhere, parameters_elsewhere
from flows.parameters import resolve, settings_of
from flows.presets import configure
from infini_model.config import Config, FlowStageConfig
from infini_model.config.places import working_folder
from infini_model.runtime.errors import ConfigError, DeviceError

ELSEWHERE = tuple(f"stages.{stage}.deployment=there" for stage in ("shard", "train", "evaluate"))


def config_of(*overrides: str) -> Config:
    return configure(["debug"], overrides=[*ELSEWHERE, "stages.train.retries=7", *overrides])


@pytest.mark.parametrize("name", ["train", "evaluate"])
@pytest.mark.parametrize("places", [("run.output_dir=/shared",), ("run.data_dir=/datasets",)])
def test_a_stage_elsewhere_has_the_same_settings_and_no_stage_that_is_elsewhere_again(
    name: str, places: tuple[str, ...]
) -> None:
    config = config_of("training.max_steps=9", "run.seed=3", "data.keep=2", *places)
    there = resolve(**parameters_elsewhere(config, name, folder=Path("/shared/datasets/a-1")))
    run = config.run.model_copy(update={"output_dir": config.run.output_dir.resolve()})
    data = config.data.model_copy(update={"folder": Path("/shared/datasets/a-1"), "keep": None})
    stages = config.stages.in_place
    assert there == config.model_copy(update={"run": run, "data": data, "stages": stages})
    assert there.deployments == {}
    assert there.stages.train == FlowStageConfig(retries=7)


def test_what_the_deployment_sets_does_not_replace_what_is_null_here() -> None:
    parameters = parameters_elsewhere(config_of(), "train")
    assert parameters.keys() == {"preset", *settings_of("train"), "advanced"}


def test_a_machine_with_another_cache_has_the_same_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINI_CACHE_DIR", "/here")
    parameters = parameters_elsewhere(config_of("run.output_dir=s3://bucket/team"), "shard")
    monkeypatch.setenv("INFINI_CACHE_DIR", "/there")
    there = resolve(**parameters).run
    assert (there.output_dir, there.store) == (
        working_folder("s3://bucket/team"),
        "s3://bucket/team",
    )


def test_a_dataset_that_is_given_leaves_nothing_to_shard() -> None:
    assert config_of("data.folder=a-1").deployments == {"train": "there", "evaluate": "there"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("launch.num_nodes=2", "launch.rdzv_endpoint=head:29500", "run.name=one"),
            r"stages\.shard\.deployment: is not for launch\.num_nodes over 1",
        ),
        (("data.share=1/2",), r"data\.share: is not for stages\.shard\.deployment"),
    ],
)
def test_what_needs_other_commands_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_elsewhere(config_of(*overrides))


def test_a_machine_that_only_evaluates_needs_the_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = configure(["debug"], overrides=["launch.launcher=ray", "launch.gpus=all"])
    with pytest.raises(DeviceError) as refused:
        check_elsewhere(config)
    assert str(refused.value) == (
        "launch.gpus=all: no GPU on this machine, where the run is evaluated; name a "
        "stages.evaluate.deployment, or set launch.gpus=auto"
    )


def test_without_a_server_that_has_workers_nothing_starts(
    alone: Environment, text_files: Path, tmp_path: Path
) -> None:
    settings = write_settings(tmp_path / "settings.yaml", tiny(text_files, tmp_path / "output"))
    done = infini_here("run", "--config", settings, "stages.train.deployment=gpu", env=alone)
    assert done.returncode == 2
    assert done.stderr == (
        "error: stages.train.deployment: needs a Prefect server that has workers; start infini "
        "serve, or set PREFECT_API_URL\n"
    )
    assert not (tmp_path / "output").exists()


def test_a_deployment_that_does_not_exist_is_named_before_any_work(
    server: str, connected: Environment, text_files: Path, tmp_path: Path
) -> None:
    settings = write_settings(tmp_path / "settings.yaml", tiny(text_files, tmp_path / "output"))
    command = infini("run", "--config", settings, "stages.train.deployment=train/nowhere")
    done = run(command, connected)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: stages.train.deployment: there is no deployment train/nowhere on {server}"
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "output" / "datasets").exists()

"""Each option of the command line is a short name for a key of the configuration."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from flows.cli import app
from flows.options import configured
from flows.presets import configure
from infini_model.config import Config, load_config
from infini_model.config.evaluation_tasks import EvaluationTaskName
from infini_model.runtime.errors import ConfigError, UserError

FLOWS = ("run", "preprocess", "train", "evaluate")
COMMANDS = (*FLOWS, "compare", "generate", "serve", "doctor")
# They work on existing runs or on a server, and take no settings.
WITHOUT_SETTINGS = {"runs", "resume", "cancel", "logs", "deploy", "verify", "clean", "export"}
GUIDES = {
    "--config",
    "--config-file",
    "-c",
    "--output-dir",
    "--data-dir",
    "-d",
    "--gpu-id",
    "--gpu",
    "-g",
    "--no-gpu",
    "--gpus",
    "--batch-size",
    "--use-gpu-dataloader",
    "--gpu-device",
    "--disable-flash-attn",
    "--tensorboard-dir",
    "-t",
    "--skip-preprocessing",
    "--distributed",
    "--num-nodes",
    "--debug",
    "--max-steps",
    "--preset",
}


def invoke(command: str, *arguments: str) -> tuple[Config, list[str]]:
    """The configuration that `infini COMMAND ARGUMENTS` would work with, and what it notes."""
    seen: list[Config] = []

    def take(config: Config) -> None:
        seen.append(config)

    take.__name__ = command
    parser = typer.Typer()
    parser.command()(configured(take))
    result = CliRunner().invoke(parser, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return seen[0], result.stderr.splitlines()


def parse(command: str, *arguments: str) -> Config:
    """The configuration that `infini COMMAND ARGUMENTS` would work with."""
    return invoke(command, *arguments)[0]


def value_at(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def changed(config: Config, base: Config | None = None) -> dict[str, Any]:
    """The keys in which a configuration differs from the preset it began from."""
    base = base or configure(["quickstart"])

    def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        leaves: dict[str, Any] = {}
        for key, value in tree.items():
            inner = isinstance(value, dict)
            leaves |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
        return leaves

    before, after = flat(base.model_dump()), flat(config.model_dump())
    return {key: value for key, value in after.items() if before[key] != value}


def test_every_command_has_every_option_of_the_guides() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(commands) == {*COMMANDS, *WITHOUT_SETTINGS}
    for name in COMMANDS:
        offered = {option for parameter in commands[name].params for option in parameter.opts}
        assert offered >= GUIDES, name


@pytest.mark.parametrize("command", FLOWS)
def test_without_options_a_command_works_with_the_quickstart(command: str) -> None:
    assert parse(command) == configure(["quickstart"])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--output-dir", "there"], {"run.output_dir": Path("there")}),
        (["--max-steps", "7"], {"training.max_steps": 7}),
        (["--use-gpu-dataloader"], {}),
        (["--disable-flash-attn"], {"launch.attention_backend": "efficient"}),
        (["--force"], {"launch.force": True}),
        (["--tensorboard-dir", "tb"], {"logging.tensorboard_dir": Path("tb")}),
        (["-t", "tb"], {"logging.tensorboard_dir": Path("tb")}),
        (["--gpu-device", "cuda:2"], {"data.device": "cuda:2"}),
        (
            ["--num-nodes", "2", "launch.rdzv_endpoint=host:29500", "run.name=shared"],
            {
                "launch.num_nodes": 2,
                "launch.rdzv_endpoint": "host:29500",
                "run.name": "shared",
            },
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_option_sets_its_key_and_no_other(
    command: str, arguments: list[str], expected: dict[str, Any]
) -> None:
    assert changed(parse(command, *arguments)) == expected


def test_a_share_is_an_option_of_preprocess_alone() -> None:
    assert changed(parse("preprocess", "--share", "2/4")) == {"data.share": "2/4"}
    with pytest.raises(Exception, match=r"No such option.*--share"):
        parse("train", "--share", "2/4")


BYTES = "the bytes tokenizer runs on the CPU"
TRAINED = "data.tokenizer.spec=train"


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("run", ["--max-steps", "3", "--gpu", "0", "--batch-size", "2"], {}),
        *(
            (
                command,
                ["--use-gpu-dataloader"],
                {"--use-gpu-dataloader": "training reads finished "},
            )
            for command in COMMANDS
        ),
        ("preprocess", ["--gpu-device", "cuda:0"], {"--gpu-device": BYTES}),
        ("preprocess", ["--gpu", "0"], {"--gpu": BYTES}),
        ("preprocess", ["--gpu-device", "cuda:0", TRAINED], {}),
        ("preprocess", ["-g", "0", TRAINED], {}),
        ("run", ["--gpu-device", "cuda:0"], {"--gpu-device": BYTES}),
        (
            "run",
            ["--gpu-device", "cuda:0", "--skip-preprocessing", TRAINED],
            {"--gpu-device": "the dataset is already tokenized"},
        ),
        ("train", ["--gpus", "0,1", "--gpu", "5"], {"--gpus": "--gpu chooses the devices"}),
        ("train", ["--gpu", "5", "--no-gpu"], {"--gpu": "--no-gpu chooses the devices"}),
        ("train", ["--distributed", "--gpu", "2"], {"--distributed": "--gpu chooses the devices"}),
        ("train", ["--gpu-device", "cuda:0"], {"--gpu-device": "infini train does not use it"}),
        ("preprocess", ["--max-steps", "3"], {"--max-steps": "infini preprocess does not use it"}),
        ("evaluate", ["--batch-size", "3"], {"--batch-size": "infini evaluate does not use it"}),
        ("train", ["--tasks", "loss"], {"--tasks": "infini train does not use it"}),
        (
            "serve",
            ["--gpus", "0", "--debug"],
            {"--gpus": "infini serve does not use it", "--debug": "infini serve does not use it"},
        ),
        (
            "train",
            ["-t", "boards", "tracking.tensorboard=false"],
            {"--tensorboard-dir": "tracking.tensorboard is false"},
        ),
    ],
)
def test_an_option_without_effect_is_noted_in_one_line(
    command: str, arguments: list[str], expected: dict[str, str]
) -> None:
    lines = invoke(command, *arguments)[1]
    assert len(lines) == len(expected)
    for line, (option, why) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"note: {option} has no effect: {why}")


def test_compare_takes_runs_settings_and_with_sweep_what_to_vary() -> None:
    words = ["first", "out/runs/second", "training.max_steps=5"]
    assert changed(parse("compare", *words)) == {
        "comparison.runs": ["first", "out/runs/second"],
        "training.max_steps": 5,
    }
    swept = ["model.memory=linear,none", "run.seed=0,1,2"]
    for arguments in (["--sweep", *swept, *words], [*words, swept[0], "--sweep", swept[1]]):
        given = parse("compare", *arguments)
        assert changed(given) == {
            "comparison.runs": ["first", "out/runs/second"],
            "comparison.sweep": swept,
            "training.max_steps": 5,
        }
    with pytest.raises(UserError, match="--sweep: no setting has several values"):
        parse("compare", "--sweep", "training.max_steps=5")
    with pytest.raises(ConfigError, match=re.escape("run.seed: got '0,1'")):
        parse("compare", "run.seed=0,1")


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("--max-new-tokens", 9, "evaluation.sample.max_new_tokens"),
        ("--temperature", 0.25, "evaluation.sample.temperature"),
        ("--top-k", 3, "evaluation.sample.top_k"),
        ("--top-p", 0.5, "evaluation.sample.top_p"),
        ("--seed", 7, "run.seed"),
    ],
)
def test_only_generate_has_sampling_options(option: str, value: float, key: str) -> None:
    assert changed(parse("generate", option, str(value))) == {key: value}
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: got '-1"):
        parse("generate", option, "-1")
    with pytest.raises(typer.exceptions.TyperException, match=option):
        parse("train", option, str(value))


@pytest.mark.parametrize("command", ["run", "evaluate"])
def test_tasks_are_separated_by_commas(command: str) -> None:
    given = parse(command, "--tasks", "sample, loss")
    assert changed(given) == {"evaluation.tasks": ["sample", "loss"]}
    with pytest.raises(ConfigError) as error:
        parse(command, "--tasks", "loss,heat")
    (line,) = str(error.value).splitlines()
    assert line.startswith("evaluation.tasks.1: got 'heat': ")
    assert all(f"'{name}'" in line for name in get_args(EvaluationTaskName))


@pytest.mark.parametrize("option", ["--gpu", "--gpu-id", "-g"])
@pytest.mark.parametrize("command", ["run", "train", "evaluate"])
def test_one_gpu_trains_and_tokenises(command: str, option: str) -> None:
    assert changed(parse(command, option, "3")) == {
        "launch.gpus": "3",
        "data.device": "cuda:3",
    }


def test_the_gpu_of_preprocess_only_tokenises() -> None:
    assert changed(parse("preprocess", "--gpu-id", "1")) == {"data.device": "cuda:1"}
    assert changed(parse("preprocess", "--no-gpu")) == {"data.device": "cpu"}


def test_no_gpu_is_the_cpu_for_everything() -> None:
    assert changed(parse("run", "--no-gpu")) == {"launch.gpus": "cpu", "data.device": "cpu"}


@pytest.mark.parametrize("gpus", ["auto", "all", "cpu", "0", "0,3"])
def test_gpus_chooses_those_of_the_training(gpus: str) -> None:
    assert parse("train", "--gpus", gpus).launch.gpus == gpus
    assert parse("train", f"launch.gpus={gpus}").launch.gpus == gpus


def test_gpu_device_beats_the_device_that_gpu_implies() -> None:
    assert parse("run", "--gpu", "0", "--gpu-device", "cuda:1").data.device == "cuda:1"


def test_distributed_is_all_gpus_unless_some_are_named() -> None:
    assert changed(parse("run", "--distributed")) == {"launch.gpus": "all"}
    assert parse("run", "--distributed", "--gpus", "0,1").launch.gpus == "0,1"


def test_batch_size_is_documents_for_preprocess_and_windows_elsewhere() -> None:
    assert changed(parse("preprocess", "--batch-size", "512")) == {"data.batch_size": 512}
    for command in ("run", "train"):
        assert changed(parse(command, "--batch-size", "3")) == {"training.batch_size": 3}


def test_data_dir_is_where_datasets_appear_or_the_one_to_train_on() -> None:
    for command in ("run", "preprocess"):
        assert parse(command, "--data-dir", "there").run.datasets_dir == Path("there")
    for command in ("train", "evaluate"):
        assert parse(command, "-d", "there").data.folder == Path("there")


def test_skip_preprocessing_uses_a_finished_dataset() -> None:
    assert parse("run", "--skip-preprocessing").data.folder == Path("outputs/datasets")
    given = parse("run", "--skip-preprocessing", "--output-dir", "there")
    assert given.data.folder == Path("there/datasets")
    given = parse("run", "--skip-preprocessing", "--data-dir", "one")
    assert given.data.folder == Path("one")
    given = parse("run", "--skip-preprocessing", "data.folder=two")
    assert given.data.folder == Path("two")


def test_debug_alone_is_the_debug_preset_and_beside_another_its_checks() -> None:
    assert parse("run", "--debug") == configure(["debug"])
    given = parse("run", "--debug", "--preset", "quickstart")
    assert changed(given) == {"logging.debug": True, "run.log_level": "debug"}


@pytest.mark.parametrize("option", ["--config", "--config-file", "-c"])
@pytest.mark.parametrize("name", ["settings.yaml", "settings.json"])
def test_a_file_is_read_as_yaml_or_json(tmp_path: Path, option: str, name: str) -> None:
    file = tmp_path / name
    file.write_text('{"training": {"max_steps": 3}}')
    assert parse("train", option, str(file)) == load_config(
        overrides=[{"training": {"max_steps": 3}}]
    )


@pytest.mark.parametrize(
    ("option", "value", "override"),
    [
        ("--max-steps", "5", "training.max_steps=9"),
        ("--output-dir", "one", "run.output_dir=two"),
        ("--gpus", "all", "launch.gpus=cpu"),
        ("--gpu-device", "cuda:0", "data.device=cpu"),
        ("--batch-size", "5", "training.batch_size=9"),
    ],
)
def test_an_override_beats_an_option(option: str, value: str, override: str) -> None:
    key = override.partition("=")[0]
    for arguments in ([option, value, override], [override, option, value]):
        assert value_at(parse("run", *arguments), key) == value_at(parse("run", override), key)


def test_an_option_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("training: {max_steps: 3, batch_size: 4}")
    config = parse("train", "-c", str(file), "--max-steps", "5")
    assert (config.training.max_steps, config.training.batch_size) == (5, 4)


def test_presets_apply_in_order_and_options_over_them() -> None:
    given = parse("run", "--preset", "arxiv", "--preset", "stable", "--max-steps", "5")
    assert given == configure(["arxiv", "stable"], overrides=["training.max_steps=5"])
    assert parse("run", "--preset", "stable") == configure(["quickstart", "stable"])


def test_beside_a_file_only_a_remedy_goes(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("training: {max_steps: 3}")
    given = parse("run", "--preset", "stable", "--config", str(file))
    assert given == configure(["stable"], file)
    assert (given.training.max_steps, given.training.precision) == (3, "fp32")
    with pytest.raises(ConfigError, match="--preset or --config, not both"):
        parse("run", "--preset", "debug", "--config", str(file))

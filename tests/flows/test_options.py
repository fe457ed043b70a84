"""What a command line means: its options, and what is chosen for documents without a preset."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flows import own_text
from flows.cli import PARTS, app
from flows.cli.options import UNDERSCORES, configured
from flows.parameters import invoked
from flows.presets import Invocation, configure
from infini_model.config import Config, FilesSource, load_config
from infini_model.runtime.errors import ConfigError, DataError
from infini_model.runtime.storage import point_latest

COMMANDS = (
    "run",
    "preprocess",
    "train",
    "evaluate",
    "compare",
    "generate",
    "chat",
    "serve",
    "doctor",
)
TRAININGS = ("run", "train", "compare")
DEVICES = (*TRAININGS, "evaluate", "doctor")


def invoke(command: str, *arguments: str) -> tuple[Config, list[str]]:
    """The configuration that `infini COMMAND ARGUMENTS` would work with, and what it notes."""
    seen: list[Invocation] = []

    def take(asked: Invocation) -> None:
        seen.append(asked)

    take.__name__ = command
    parser = typer.Typer(context_settings=UNDERSCORES)
    parser.command()(configured(take))
    result = CliRunner().invoke(parser, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    (asked,) = seen
    # A flow that is started with its parameters works with the same settings.
    assert invoked(**json.loads(json.dumps(asked.parameters))).config == asked.config
    return asked.config, result.stderr.splitlines()


def parse(command: str, *arguments: str) -> Config:
    return invoke(command, *arguments)[0]


def meant(*settings: Any) -> Config:
    return configure(["quickstart"], overrides=settings)


NODES = "launch.num_nodes=2 launch.rdzv_endpoint=host:29500 run.name=shared"


@pytest.mark.parametrize(
    ("commands", "arguments", "settings"),
    [
        (COMMANDS, "", ""),
        (COMMANDS, "--output-dir there", "run.output_dir=there"),
        (TRAININGS, "--max-steps 7", "training.max_steps=7"),
        (TRAININGS, "--use-gpu-dataloader", ""),
        (
            [*TRAININGS, "evaluate", "generate", "chat", "doctor"],
            "--disable-flash-attn",
            "launch.attention_backend=sdpa",
        ),
        (TRAININGS, "--force", "launch.force=true"),
        (TRAININGS, "-t tb", "logging.tensorboard_dir=tb"),
        ([*TRAININGS, "preprocess"], "--gpu-device cuda:2", "data.device=cuda:2"),
        (
            [*TRAININGS, "doctor"],
            "--num-nodes 2 launch.rdzv_endpoint=host:29500 run.name=shared",
            NODES,
        ),
        (DEVICES, "-g 3", "launch.gpus=3 data.device=cuda:3"),
        (DEVICES, "--no-gpu", "launch.gpus=cpu data.device=cpu"),
        (DEVICES, "--gpus 0,3", "launch.gpus=0,3"),
        ([*TRAININGS, "doctor"], "--distributed", "launch.gpus=all"),
        (["train"], "--distributed --gpus 0,1", "launch.gpus=0,1"),
        (TRAININGS, "--gpu 0 --gpu-device cuda:1", "launch.gpus=0 data.device=cuda:1"),
        (["preprocess"], "--gpu-id 1", "data.device=cuda:1"),
        (["preprocess"], "--no-gpu", "data.device=cpu"),
        (["run", "train", "doctor", "preprocess"], "--batch-size 3", "training.batch_size=3"),
        (["run", "preprocess"], "--data-dir there", "run.data_dir=there"),
        (["train", "evaluate"], "-d there", "data.folder=there"),
        (["run", "evaluate"], "--tasks 'sample, loss'", "evaluation.tasks=[sample,loss]"),
        (["generate", "chat"], "--max-new-tokens 9", "evaluation.sample.max_new_tokens=9"),
        (["generate", "chat"], "--temperature 0.25", "evaluation.sample.temperature=0.25"),
        (["generate", "chat"], "--top-k 3", "evaluation.sample.top_k=3"),
        (["generate"], "--top-p 0.5", "evaluation.sample.top_p=0.5"),
        (["generate"], "--seed 7", "run.seed=7"),
        (["run"], "--skip-preprocessing -d one", "data.folder=one"),
        (
            ["run"],
            "--skip-preprocessing --output-dir there",
            "run.output_dir=there data.folder=there/datasets",
        ),
        (
            ["train"],
            "--epochs 5 --learning_rate=1e-5 --fp16 --nproc_per_node 2 --save_dir a_b",
            "training.epochs=5 training.learning_rate=1e-5 training.precision=fp16 "
            "launch.processes=2 run.output_dir=a_b",
        ),
        (["run"], "--no_fp16 --output_dir --a_b", "training.precision=fp32 run.output_dir=--a_b"),
        (["run"], "--debug --preset quickstart", "logging.debug=true run.log_level=debug"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_sets_its_key_alone(commands: list[str], arguments: str, settings: str) -> None:
    for command in commands:
        # A run is evaluated with its own settings, not those of a preset.
        base = [] if command == "evaluate" else ["quickstart"]
        expected = configure(base, overrides=settings.split())
        assert parse(command, *shlex.split(arguments)) == expected, command


def test_the_data_dir_is_one_dataset_or_the_datasets_below_it(tmp_path: Path) -> None:
    one = tmp_path / "datasets" / "one-key"
    one.mkdir(parents=True)
    (one / "manifest.json").touch()
    point_latest(one)
    for command in ("run", "compare"):
        assert parse(command, "-d", str(one)) == meant(f"data.folder={one}")
    # It is refused before anything is made in it.
    assert parse("preprocess", "-d", str(one)) == meant(f"run.data_dir={one}")
    for command in ("run", "preprocess"):
        assert parse(command, "-d", str(tmp_path)) == meant(f"run.data_dir={one.parent}")


def test_devices_are_chosen_once() -> None:
    refused = "^--gpu and --gpus: both choose the devices; give one of them$"
    with pytest.raises(ConfigError, match=refused):
        parse("train", "--gpus", "0,1", "--gpu", "5")
    with pytest.raises(ConfigError, match=r"^--no-gpu and --gpu: "):
        parse("preprocess", "--no-gpu", "--gpu", "0")
    with pytest.raises(ConfigError, match=r"^--no-gpu and --distributed: "):
        parse("train", "--no-gpu", "--distributed")


def test_compare_takes_runs_settings_and_with_sweep_what_to_vary() -> None:
    words = ["first", "out/runs/second", "training.max_steps=5"]
    assert parse("compare", *words) == meant({"comparison": {"runs": words[:2]}}, words[2])
    swept = ["model.memory=linear,none", "run.seed=0,1,2"]
    for arguments in (["--sweep", *swept, *words], [*words, swept[0], "--sweep", swept[1]]):
        given = parse("compare", *arguments)
        assert given == meant({"comparison": {"runs": words[:2], "sweep": swept}}, words[2])
    with pytest.raises(ConfigError, match=re.escape("run.seed: got '0,1'")):
        parse("compare", "run.seed=0,1")


@pytest.mark.parametrize("option", ["--config", "--config-file", "-c"])
def test_what_is_typed_beats_a_file_and_a_file_a_preset(tmp_path: Path, option: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("training: {max_steps: 3, batch_size: 4}")
    given = parse("train", "training.max_steps=9", option, str(file))
    assert given == load_config(overrides=[{"training": {"max_steps": 9, "batch_size": 4}}])
    assert parse("train", option, str(file), "--max-steps", "5").training.max_steps == 5
    presets, asked = ["shakespeare", "stable"], ["training.max_steps=3", "training.batch_size=4"]
    given = parse("run", option, str(file), *(f"--preset={name}" for name in presets))
    assert given == configure(presets, overrides=asked)
    assert parse("run", "--debug") == configure(["debug"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("training.max_steps=9 --max-steps 5", "training.max_steps: is given twice, as 5 and as 9"),
        ("training.epochs=5 --max-steps 3", "training.epochs: cannot be combined with"),
        ("run.seed=1 run.seed=2", "run.seed: is given twice, as 1 and as 2"),
        ("launch.gpus=cpu --gpu 1", "launch.gpus: is given twice"),
        ("--preset debug run.preset=arxiv", "run.preset: cannot be set; choose a preset with"),
    ],
)
def test_of_two_things_typed_none_is_dropped(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse("train", *words.split())


def test_what_is_typed_twice_alike_is_taken_and_epochs_of_a_preset_are_no_typing() -> None:
    tuned = "--preset fine-tune model.initial_weights=llama"
    for words in ("training.max_steps=5", tuned):
        given = parse("train", *words.split(), "--max-steps", "5").training
        assert (given.max_steps, given.epochs) == (5, None)


@pytest.mark.parametrize("command", ["run", "preprocess"])
def test_settings_that_come_to_no_documents_are_refused(tmp_path: Path, command: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("training: {max_steps: 3}")
    with pytest.raises(ConfigError, match=r"data\.source: missing; name a --preset, or documents"):
        parse(command, "--config", str(file))
    for source in (["--preset", "debug"], ["data.source.paths=[a.txt]"], ["data.folder=here"]):
        assert parse(command, "--config", str(file), *source).training.max_steps == 3


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        ("serve", "--port --mlflow-port --auth --database"),
        (
            "doctor",
            "--gpus --gpu --no-gpu --batch-size --disable-flash-attn --distributed --num-nodes "
            "--debug",
        ),
    ],
)
def test_the_help_lists_what_the_command_uses(command: str, listed: str) -> None:
    told = CliRunner().invoke(app, [command, "--help"]).stdout
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", told, re.MULTILINE)
    assert options == ["--preset", "--config", "--output-dir", *listed.split(), "--help"]
    assert "bool" not in told


def test_the_help_lists_every_command_in_its_part_and_shells_complete_them() -> None:
    told = CliRunner().invoke(app, ["--help"]).stdout.partition("Train:")[2]
    listed = re.findall(r"^  (\w+)  ", told, re.MULTILINE)
    assert listed == [command.__name__ for part in PARTS.values() for command in part]
    typed = {"COMP_WORDS": "infini export --for", "COMP_CWORD": "2"}
    env = {**os.environ, **typed, "_INFINI_COMPLETE": "complete_bash"}
    program = Path(sys.executable).with_name("infini")
    completed = subprocess.run([program], env=env, capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["--format"]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of texts in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    return folder


def write(folder: Path, files: int, size: int) -> None:
    """That many files, which are empty but as long as they say."""
    for number in range(files):
        with (folder / f"{number}.txt").open("wb") as file:
            file.truncate(size)


def chosen(*arguments: str) -> tuple[Config, list[str]]:
    """What `infini run` on the texts means, and what it says."""
    return invoke("run", "data.source.paths=texts/*.txt", *arguments)


@pytest.mark.parametrize(
    ("size", "named", "vocabulary", "steps"),
    [
        (1_000, "20.0 kB", 512, 200),
        (10_000, "200.0 kB", 512, 325),
        (20_000, "400.0 kB", 1024, 651),
        (2_000_000, "40.0 MB", 4096, 1000),
    ],
)
def test_the_model_suits_the_text(
    size: int, named: str, vocabulary: int, steps: int, texts: Path
) -> None:
    write(texts, 20, size)
    config, (line,) = chosen("--no-gpu")
    assert config.run.preset == "quickstart"
    assert config.data.tokenizer.vocab_size == vocabulary
    assert config.training.max_steps == steps
    assert f"{named} of text, no GPU: --preset quickstart, {steps:,} steps" in line


def test_on_a_gpu_it_is_that_of_a_gpu(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "choose_gpus", lambda gpus: [gpus])
    write(texts, 20, 10_000_000)
    config, (line,) = chosen()
    assert "a GPU: --preset one-gpu, 1,525 steps, tokenizer: a BPE of 32,768" in line
    # No more than four epochs, and everything that the preset says of its own documents is gone.
    tokens = 1525 * config.training.gradient_accumulation_steps * 8 * config.packing.context_length
    assert tokens <= 4 * 200_000_000 / 4
    assert config.data.source == FilesSource(paths=["texts/*.txt"])
    assert (config.data.splits.validation, config.model.vocab_size) == (0.05, None)


def test_settings_and_presets_that_are_named_count(texts: Path) -> None:
    write(texts, 20, 1_000)
    config, (line,) = chosen("--max-steps", "7", "data.tokenizer.spec=bytes")
    assert (config.training.max_steps, config.data.tokenizer.spec) == (7, "bytes")
    assert ", 7 steps, tokenizer: bytes;" in line
    assert "3.0 epochs" in chosen("training.epochs=3")[1][0]
    named, lines = chosen("--preset", "debug")
    assert (named.run.preset, lines) == ("debug", [])
    assert invoke("train", "data.source.paths=texts/*.txt")[1] == []


def test_a_pattern_without_files_is_an_error_at_once(texts: Path) -> None:
    with pytest.raises(DataError, match=r"data.source.paths: 'texts/\*.txt' matches no file"):
        chosen()

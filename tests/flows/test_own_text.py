"""What `infini run` chooses for a user's documents when no preset is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_options import invoke

from flows import own_text
from infini_model.config import Config, dump_config
from infini_model.runtime.errors import DataError
from infini_model.runtime.runs import record_evaluation
from infini_model.runtime.storage import write_json


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


def begin(config: Config, runs_dir: Path) -> Path:
    """A run folder of these settings, as a training leaves it when it is killed."""
    run_dir = runs_dir / f"{config.run.preset}-1"
    run_dir.mkdir(parents=True)
    named = config.run.model_copy(update={"name": run_dir.name})
    (run_dir / "config.yaml").write_text(dump_config(config.model_copy(update={"run": named})))
    write_json(
        run_dir / "run.json",
        {"dataset": "d", "dataset_key": "k", "max_steps": config.training.max_steps},
    )
    return run_dir


@pytest.mark.parametrize(
    ("size", "named", "vocabulary", "steps"),
    [
        (1_000, "20.0 kB", 512, 200),
        (10_000, "0.2 MB", 512, 325),
        (20_000, "0.4 MB", 1024, 651),
        (2_000_000, "40.0 MB", 4096, 1000),
    ],
)
def test_the_model_is_for_the_size_of_the_text(
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
    assert config.data.source.model_dump(include={"kind", "paths"}) == {
        "kind": "files",
        "paths": ["texts/*.txt"],
    }
    assert (config.data.splits.validation, config.model.vocab_size) == (0.05, None)


def test_settings_and_presets_that_are_named_count(texts: Path) -> None:
    write(texts, 20, 1_000)
    config, (line,) = chosen("--max-steps", "7", "data.tokenizer.spec=bytes")
    assert (config.training.max_steps, config.data.tokenizer.spec) == (7, "bytes")
    assert ", 7 steps, tokenizer: bytes;" in line
    assert "3.0 epochs" in chosen("training.epochs=3")[1][0]
    named, lines = chosen("--preset", "debug")
    assert (named.run.preset, named.run.chosen_for, lines) == ("debug", None, [])
    assert invoke("train", "data.source.paths=texts/*.txt")[0].run.chosen_for is None


def test_few_documents_are_told(texts: Path) -> None:
    write(texts, 1, 1_000_000)
    assert "each file is one document, and 1 may leave a split empty" in chosen()[1][1]
    assert len(chosen(r'data.source.separator="\n\n"')[1]) == 1


def test_a_pattern_without_files_is_an_error_at_once(texts: Path) -> None:
    with pytest.raises(DataError, match=r"data.source.paths: 'texts/\*.txt' matches no file"):
        chosen()


def test_an_interrupted_run_keeps_its_choice(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(texts, 20, 1_000)
    first, _ = chosen()
    run_dir = begin(first, tmp_path / "outputs" / "runs")
    monkeypatch.setattr(own_text, "choose_gpus", lambda gpus: [gpus])
    again, (line,) = chosen("launch.processes=2")  # which does not decide what is trained
    assert again.identity == first.identity
    assert "as chosen for the interrupted run quickstart-1, 200 steps" in line
    # The run of another command, or one that is finished, decides nothing.
    assert chosen("training.batch_size=4")[0].run.preset == "one-gpu"
    record_evaluation(run_dir, 200, "key", {})
    assert chosen()[0].run.preset == "one-gpu"

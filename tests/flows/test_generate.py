"""`infini generate` from a saved checkpoint to the text on the screen."""

import subprocess
from pathlib import Path

import pytest
import torch
from commands import Environment, infini, infini_here
from typer.testing import CliRunner

from flows.cli import app
from infini_model.config import ModelConfig
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.model.generation.causal import generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import PRECISIONS

PROMPT = "Grüße, 世界! " * 9
DRAW = {"max_new_tokens": 60, "temperature": 0.7, "top_k": 40, "top_p": 0.95, "seed": 5}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in DRAW.items()]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with its tokenizer, of mostly single bytes."""
    folder = tmp_path_factory.mktemp("model") / "folder"
    tokenizer = train_tokenizer([[PROMPT]], 270)
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, segment_length=16, initializer_range=0.3
    )
    InfiniLlama(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def continued(checkpoint: Path) -> str:
    """What the library makes of it in float32."""
    return library(checkpoint, "fp32")


def library(checkpoint: Path, precision: str) -> str:
    """What the library makes of it, at once; a sequence that the end cuts off is left out."""
    tokenizer = load_tokenizer(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode_batch([PROMPT]).ids.tolist()
    model = InfiniLlama.from_pretrained(checkpoint)
    model.precision = PRECISIONS[precision]
    (new,) = generate(model, [ids], eos_token_id=tokenizer.eos_token_id, **DRAW)
    text = tokenizer.decode(ids + new).removeprefix(PROMPT).rstrip("\ufffd")
    assert len(text) > 20
    return text


def test_a_prompt_from_stdin_is_continued(
    alone: Environment, checkpoint: Path, continued: str
) -> None:
    command = infini("generate", "--no-gpu", "--checkpoint", checkpoint, *OPTIONS)
    done = subprocess.run(
        [*command, "--prompt-file", "-"], env=alone, input=PROMPT.encode(), capture_output=True
    )
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, continued + "\n", b"")


@pytest.mark.parametrize("source", ["option", "file"])
def test_a_prompt_from_the_command_line_or_a_file_is_continued(
    checkpoint: Path, continued: str, tmp_path: Path, source: str
) -> None:
    """In this process: how a command starts is what the test above shows."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode())
    given = {"option": ["--prompt", PROMPT], "file": ["--prompt-file", str(file)]}
    options = ["--no-gpu", "--checkpoint", str(checkpoint), *OPTIONS, *given[source]]
    done = CliRunner().invoke(app, ["generate", *options], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (PROMPT if source == "option" else "") + continued + "\n"


def test_the_command_computes_in_16_bits_what_the_library_does(
    checkpoint: Path, continued: str
) -> None:
    expected = library(checkpoint, "bf16")
    assert expected != continued
    options = ["--no-gpu", "--checkpoint", str(checkpoint), *OPTIONS, "--prompt", PROMPT]
    arguments = ["generate", *options, "training.precision=bf16"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.stdout == PROMPT + expected + "\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "give either --prompt or --prompt-file"),
        (["--prompt", "a", "--prompt-file", "-"], "give either --prompt or --prompt-file"),
        (["--prompt", ""], "prompt 0: is empty"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt: cannot be read: No such file"),
        (["--prompt-file", "-"], "-: is not UTF-8 text"),
        (["--prompt", b"\xff"], "--prompt: is not UTF-8 text"),
        (["--prompt", "a", "--top-p", "2"], "evaluation.sample.top_p: got '2.0'"),
        (["--prompt", "a", "--checkpoint", "/nowhere"], "/nowhere: has no tokenizer.json"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(
    alone: Environment, checkpoint: Path, arguments: list[str | bytes], named: str
) -> None:
    given = [a.decode("utf-8", "surrogateescape") if isinstance(a, bytes) else a for a in arguments]
    options = ("--no-gpu", "--checkpoint", checkpoint)
    done = infini_here("generate", *options, *given, env=alone, stdin=b"\xff")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line

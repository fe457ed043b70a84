"""Mistakes of users: one line that names the cause, exit status 2, and no partial output."""

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import (
    Environment,
    dataset_of,
    infini,
    infini_here,
    leftovers,
    preprocess,
    run,
    stage,
    tiny,
    write_settings,
    write_texts,
)
from disks import SmallDisk

from infini_model.data.manifest import read_manifest
from infini_model.training.checkpoints.checkpoint import newest_checkpoint

Refused = Callable[..., str]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def settings(tmp_path: Path, text_files: Path, output: Path) -> Path:
    """A configuration that would work."""
    return write_settings(tmp_path / "settings.yaml", tiny(text_files, output))


@pytest.fixture
def refused(output: Path, connected: Environment) -> Refused:
    """Run `infini` with a mistake; returns the error, which must be the last line."""

    def check(*arguments: str | Path, env: Environment = connected, **options: Any) -> str:
        done = run(infini(*arguments), env, **options)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert not leftovers(output)
        *before, last = done.stderr.splitlines()
        assert last.startswith("error: ")
        assert last not in before
        return last

    return check


@pytest.fixture
def refused_at_once(output: Path, alone: Environment) -> Refused:
    """Like `refused`, for mistakes found before anything starts: the error is the only output."""

    def check(*arguments: str | Path) -> str:
        done = infini_here(*arguments, env=alone)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert not output.exists()
        return line

    return check


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["model.layers=2"], "model.layers: unknown key"),
        (["modle.hidden_size=64"], "modle: unknown key"),
        (["--preset", "nope"], "preset 'nope' is unknown; available: arxiv, debug, "),
        (["--preset", "uptrain"], "the preset uptrain needs a pretrained Llama: model.initial_w"),
        (["training.max_steps=many"], "training.max_steps: got 'many': "),
        (["training.max_steps=0"], "training.max_steps: got 0: input should be greater than 0"),
        (["--max-steps", "many"], "'--max-steps'"),
        (["--batch-size", "0"], "training.batch_size: got '0': input should be greater than 0"),
        (["data.splits.train=2"], "data.splits.train: got 2"),
        (["packing.context_length=100"], "packing.context_length 100 is not a multiple of"),
        (["model.num_attention_heads=3"], "hidden_size 128 is not a multiple of"),
        (["data.source.kind=ftp"], "data.source.kind: got 'ftp'"),
        (["data.share=5/4"], "data.share: got '5/4': takes I/N with 1 <= I <= N, such as 2/4"),
        (["data.ray_cpus=1.5"], "data.ray_cpus: got 1.5: takes a fraction of 1 or a whole number"),
        (["data.ray_address=ray://head:1"], "data.ray_address: got 'ray://head:1': takes auto or"),
        (
            ["data.engine=ray", "data.device=mixed"],
            "data: device mixed needs engine=local; Ray takes cpu or cuda",
        ),
        (["launch.gpus=one"], "launch.gpus: got 'one': takes auto, all, cpu, or"),
        (["--num-nodes", "2"], "num_nodes over 1 needs rdzv_endpoint"),
        (["max_steps"], "override 'max_steps' is not of the form section.key=value"),
        (["--no-such-option"], "--no-such-option"),
        (["--config", "missing.yaml"], "missing.yaml: cannot be read: No such file"),
        (["--config", "/"], "/: cannot be read: Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_the_settings_is_told_before_anything_starts(
    refused_at_once: Refused, output: Path, arguments: list[str], named: str
) -> None:
    assert named in refused_at_once("run", f"run.output_dir={output}", *arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "name two runs or more to compare"),
        (["here"], "/runs/here: there is no such run; infini runs lists them"),
        (["--sweep", "training.seed=0,1"], "training.seed: unknown key; it is run.seed"),
        (["--sweep", "model.memory=linear,lin"], "model.memory: got 'lin': input should be"),
        (["--sweep", "run.seed=0,1,0"], "run.seed: 0 is given twice"),
        (["--sweep", "run.seed=0,1", "run.seed=2,3"], "run.seed: is given twice"),
        (["--sweep", "run.name=a,b"], "run.name: cannot be swept"),
        (["--sweep", "run.seed=0"], "--sweep: no setting has several values"),
        (["--sweep", "run.seed=0,1", "here"], "/runs/here: there is no such run"),
        (
            ["--sweep", "packing.context_length=512,100"],
            "packing.context_length 100 is not a multiple of model.segment_length 128",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_a_comparison_is_told_before_anything_starts(
    refused_at_once: Refused, output: Path, arguments: list[str], named: str
) -> None:
    assert named in refused_at_once("compare", f"run.output_dir={output}", *arguments)


def test_an_unknown_run_is_told_without_importing_torch_or_prefect(
    tmp_path: Path, alone: Environment
) -> None:
    commands = [
        ["compare", "here", "there", "run.output_dir=nowhere"],
        ["compare", "here", "--sweep", "run.seed=0,1", "run.output_dir=nowhere"],
        ["generate", "--prompt", "x", "run.output_dir=nowhere"],
        ["cancel", "here", "--output-dir", "nowhere"],
        ["resume", "here", "--output-dir", "nowhere"],
    ]
    code = (
        "import contextlib, sys\n"
        "from flows.cli import main\n"
        f"for sys.argv[1:] in {commands}:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "print(sorted({'torch', 'prefect', 'mlflow'} & sys.modules.keys()))\n"
    )
    done = run([sys.executable, "-c", code], alone, cwd=tmp_path)
    assert done.stdout == "[]\n", done.stdout + done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == len(commands)
    assert all(re.search("/runs/(here|latest): .*no such run", each) for each in errors), errors


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("training: {max_steps: 5", "settings.yaml: while parsing a flow mapping"),
        ("- training", "settings.yaml: holds list, needs a mapping of sections"),
        ("training: {max_step: 5}", "training.max_step: unknown key"),
        (b"\xff\xfe", "settings.yaml: is not UTF-8 text"),
    ],
)
def test_a_broken_configuration_file_is_named(
    refused_at_once: Refused, tmp_path: Path, text: str | bytes, named: str
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert named in refused_at_once("train", "--config", file)


def test_a_gpu_that_does_not_exist_is_named(refused_at_once: Refused, settings: Path) -> None:
    message = refused_at_once("run", "--config", settings, "--gpus", "0,97")
    assert "launch.gpus=0,97: GPU 0 does not exist" in message
    assert "launch.gpus=all: no GPU" in refused_at_once("train", "--gpus", "all")


def test_a_device_to_tokenise_on_that_does_not_exist_is_named(
    refused: Refused, settings: Path
) -> None:
    message = refused("preprocess", "--config", settings, "--gpu-device", "cuda:97")
    assert "data.device: got 'cuda:97': this machine has 0 GPUs" in message


@pytest.mark.parametrize("option", ["--port", "--mlflow-port"])
def test_a_port_in_use_is_named(
    refused: Refused, output: Path, alone: Environment, option: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        arguments = ("serve", "--output-dir", output, option, port)
        message = refused(*arguments, env=alone)
    assert f"{option}: port {port} is in use" in message


def test_a_port_beyond_the_range_is_named(refused_at_once: Refused) -> None:
    assert "--port" in refused_at_once("serve", "--port", "70000")


DOCUMENTS: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b"", "a.txt: no documents left: 1 of 1 are empty"),
    "not UTF-8": ("a.txt", b"caf\xe9 noir", "a.txt: is not UTF-8: invalid continuation byte at"),
    "binary": ("a.txt", b"PK\x03\x04\0\0", "a.txt: is binary, not text: it has a NUL at byte 4"),
    "a row not UTF-8": ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', "a.jsonl, line 2: is not"),
    "no JSON": ("a.jsonl", b'{"text": "x"}\n{', "a.jsonl, line 2: is not JSON"),
    "a column missing": (
        "a.jsonl",
        b'{"body": "x"}',
        "a.jsonl, line 1: has no column 'text'; it has: body",
    ),
    "no Parquet": ("a.parquet", b"PAR1 or not", "a.parquet: cannot be read"),
    "no Arrow": ("a.arrow", b"ARROW1 or not", "a.arrow: cannot be read"),
    "no gzip": ("a.jsonl.gz", b"not gzip at all", "a.jsonl.gz: cannot be read"),
    "an unknown format": ("a.exe", b"MZ", "a.exe: unknown file format; takes .txt .md"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, text_files: Path, output: Path, name: str
) -> None:
    file, content, named = DOCUMENTS[name]
    (tmp_path / file).write_bytes(content)
    source = {"source": {"paths": [str(tmp_path / file)]}}
    settings = write_settings(tmp_path / "s.yaml", tiny(text_files, output, data=source))
    result = preprocess(settings)
    assert named in result["error"]
    assert result["kind"] == "user"
    assert not leftovers(output)


def test_a_missing_column_of_a_table_is_named(
    tmp_path: Path, text_files: Path, output: Path
) -> None:
    pq.write_table(pa.table({"body": ["x"], "number": [1]}), tmp_path / "a.parquet")
    source: dict[str, Any] = {"paths": [str(tmp_path / "a.parquet")]}
    make = partial(tiny, text_files, output)
    settings = write_settings(tmp_path / "s.yaml", make(data={"source": source}))
    result = preprocess(settings)
    assert result["error"].endswith("has no column 'text'; it has: body, number")
    source["column"] = "number"
    settings = write_settings(tmp_path / "s.yaml", make(data={"source": source}))
    assert "column 'number' is int64, not text" in preprocess(settings)["error"]


def test_what_is_not_utf8_is_named_skipped_or_replaced_as_asked(
    tmp_path: Path, text_files: Path, output: Path
) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    (tmp_path / "nul.txt").write_bytes(b"\0")
    make = partial(tiny, text_files, output)

    def settings(errors: str, *names: str) -> Path:
        source = {"paths": [str(tmp_path / name) for name in names], "errors": errors}
        return write_settings(tmp_path / "s.yaml", make(data={"source": source}))

    both = ("good.txt", "bad.txt")
    message = preprocess(settings("fail", *both))["error"]
    assert f"{tmp_path / 'bad.txt'}: is not UTF-8" in message
    skipped = read_manifest(dataset_of(settings("skip", *both, "nul.txt"))).corpus
    assert (skipped.documents, skipped.skipped) == (1, 2)
    replaced = read_manifest(dataset_of(settings("replace", *both))).corpus
    assert (replaced.documents, replaced.skipped) == (2, 0)
    assert replaced.bytes == len("good") + len("caf\ufffd".encode())


@pytest.mark.parametrize("pattern", ["/nowhere/*.txt", "{stdlib}/nothing/*.py"])
def test_a_glob_that_matches_nothing_is_named(
    tmp_path: Path, text_files: Path, output: Path, pattern: str
) -> None:
    source = {"source": {"paths": [pattern]}}
    settings = write_settings(tmp_path / "s.yaml", tiny(text_files, output, data=source))
    result = preprocess(settings)
    assert f"data.source.paths: '{pattern}' matches no file" in result["error"]
    assert result["kind"] == "user"


def test_a_tokenizer_file_that_is_none_is_named(
    tmp_path: Path, text_files: Path, output: Path
) -> None:
    (tmp_path / "text.json").write_text("not a tokenizer")
    tree = tiny(text_files, output)
    settings = write_settings(tmp_path / "s.yaml", tree)
    listing = stage("download", settings)["listing"]
    for step, name, named in (
        ("plan", "missing.json", "missing.json: no such tokenizer file"),
        ("plan", "text.json", "text.json: is not a tokenizer.json"),
        ("shard", "text.json", "text.json: is not a tokenizer.json"),
    ):
        tree["data"]["tokenizer"] = {"spec": str(tmp_path / name)}
        result = stage(step, write_settings(settings, tree), "--listing", listing)
        assert named in result["error"]
        assert result["kind"] == "user"
    assert not leftovers(output)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, text_files: Path) -> Path:
    """A finished dataset folder."""
    root = tmp_path_factory.mktemp("made")
    settings = write_settings(root / "settings.yaml", tiny(text_files, root / "output"))
    return dataset_of(settings)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        ("missing", "is not a dataset folder: it does not exist"),
        ("other", "is not a complete dataset folder: it has no manifest.json"),
        ("manifest", "manifest.json: is damaged"),
        ("version", "has format version 99, but this program reads"),
        ("lost", "train/data-00000-of-00001.arrow: is missing"),
        ("short", "train/data-00000-of-00001.arrow: has "),
        ("flipped", "train/data-00000-of-00001.arrow: is damaged"),
    ],
)
def test_a_dataset_folder_that_is_none_is_named(
    tmp_path: Path, dataset: Path, text_files: Path, harm: str, named: str
) -> None:
    folder = shutil.copytree(dataset, tmp_path / "dataset")
    manifest, shard = folder / "manifest.json", folder / "train" / "data-00000-of-00001.arrow"
    if harm == "missing":
        folder = tmp_path / "nowhere"
    elif harm == "other":
        folder = text_files
    elif harm == "manifest":
        manifest.write_text(manifest.read_text()[:100])
    elif harm == "version":
        record = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(record | {"format_version": 99}))
    elif harm == "lost":
        shard.unlink()
    elif harm == "short":
        shard.write_bytes(shard.read_bytes()[:-8])
    else:
        flip(shard)
    tree = tiny(text_files, tmp_path / "output", data={"folder": str(folder)})
    result = stage("plan", write_settings(tmp_path / "s.yaml", tree))
    assert str(folder) in result["error"]
    assert named in result["error"]


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_training_without_a_dataset_says_so(settings: Path) -> None:
    assert "there is no finished dataset yet" in stage("plan", settings)["error"]


@pytest.mark.story
def test_training_names_a_dataset_that_does_not_fit(refused: Refused, settings: Path) -> None:
    dataset_of(settings)
    message = refused("train", "--config", settings, "--batch-size", "5000")
    assert "too few tokens for one batch" in message
    assert "5000" in message


def test_a_training_that_cannot_fit_is_refused_before_anything_is_downloaded(
    refused: Refused, settings: Path, output: Path
) -> None:
    wide = ["model.hidden_size=65536", "model.num_hidden_layers=64"]
    message = refused("run", "--config", settings, *wide)
    assert re.search(r"not enough memory: the training needs .*\(weights [\d,]+, ", message)
    assert "no setting makes it fit; a smaller model" in message
    assert message.endswith("--force (launch.force=true) runs it all the same")
    assert not (output / "raw").exists()
    assert not (output / "datasets").exists()


def test_a_report_of_a_run_that_is_none_is_refused(refused: Refused, settings: Path) -> None:
    message = refused("evaluate", "--config", settings, "run.name=unknown")
    assert "unknown: no such run; train one first" in message


def test_a_folder_that_cannot_be_written_is_named(
    refused: Refused, settings: Path, tmp_path: Path, alone: Environment
) -> None:
    """Nothing can be written below a regular file, not even by root."""
    (tmp_path / "file").write_text("")
    below = ("--config", settings, "--output-dir", tmp_path / "file" / "below")
    for env in ({}, {"env": alone}):
        message = refused("run", *below, **env)
        assert f"{tmp_path}/file/below" in message
        assert "cannot be written: Not a directory" in message


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "disk")
    yield small
    small.close()


def says_full(line: str) -> bool:
    return "the disk is full" in line or "File too large" in line


@pytest.mark.story
@pytest.mark.parametrize(("count", "words"), [(20, 30_000), (400_000, 1)])
def test_a_full_disk_is_named_and_with_space_the_same_command_resumes(
    refused: Refused,
    disk: SmallDisk,
    tmp_path: Path,
    connected: Environment,
    count: int,
    words: int,
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", count, words)
    tree = tiny(tmp_path, disk.folder, data={"source": {"paths": [str(rows)]}})
    settings = write_settings(tmp_path / "s.yaml", tree)
    message = refused("preprocess", "--config", settings, **disk.limits)
    assert f"error: {disk.folder}/" in message
    assert says_full(message)
    assert not leftovers(disk.folder)
    disk.grow()
    done = run(infini("preprocess", "--config", settings), connected)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.story
def test_a_disk_that_fills_up_in_training_keeps_the_checkpoint_before(
    settings: Path, text_files: Path, output: Path, disk: SmallDisk, alone: Environment
) -> None:
    # A metrics line that finds the disk full beside the checkpoint would be named in its place.
    rarely = {"logging_steps": 20, "eval_steps": 20}
    write_settings(settings, tiny(text_files, output, logging=rarely))
    arguments = ["--dataset", dataset_of(settings), "--run-dir", disk.folder / "run"]
    command = [sys.executable, "-m", "infini_model.training", "--config", str(settings)]
    command += map(str, arguments)
    done = run(command, alone, **disk.limits)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (last,) = done.stderr.splitlines()
    assert f"{disk.folder}/run/checkpoints/" in last
    assert says_full(last)
    assert not leftovers(disk.folder)
    kept = newest_checkpoint(disk.folder / "run")
    # Where mounting is not allowed, no checkpoint fits.
    assert (kept is not None) is disk.mounted
    assert kept is None or f"Checkpoint saved: {kept}" in done.stdout
    disk.grow()
    assert run(command, alone, **disk.limits).returncode == 0


def write_rows(path: Path, count: int, words: int) -> Path:
    """A file of `count` JSON lines of so many words each."""
    text = " ".join(["river"] * words)
    path.write_text("".join(f'{{"text": "{number} {text}"}}\n' for number in range(count)))
    return path


@pytest.mark.story
def test_a_flipped_byte_is_named_and_its_shard_alone_is_made_again(
    settings: Path, tmp_path: Path, output: Path, connected: Environment
) -> None:
    texts = write_texts(tmp_path / "texts", 60, words=12_000)
    tree = tiny(texts, output)
    tree["data"]["partition_megabytes"] = 1
    command = infini("preprocess", "--config", write_settings(settings, tree))
    assert run(command, connected).returncode == 0
    (folder,) = (output / "datasets").glob("tiny-*")
    shards = sorted((output / "datasets" / ".partitions").glob("*/*.arrow"))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards}
    assert len(before) >= 12
    damaged = sorted((folder / "train").glob("*.arrow"))[1]
    flip(damaged)

    again = run(command, connected)
    output = again.stdout + again.stderr
    assert again.returncode == 0, output
    assert f"{damaged}: is damaged" in output
    assert re.search(r": 1 partition to make, \d+ present", output)
    assert {path: path.read_bytes() for path in shards} == {p: b for p, (b, _) in before.items()}
    renewed = [path for path in shards if path.stat().st_mtime_ns != before[path][1]]
    assert len({path.parent for path in renewed}) == 1
    assert "is reused" in run(command, connected).stderr

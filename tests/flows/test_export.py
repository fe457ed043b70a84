"""`infini export`: a run becomes a folder that `transformers` and `infini generate` open."""

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from commands import tiny, write_texts
from llamas import recorded, write_llama
from peft import AutoPeftModelForCausalLM
from templates import BOS, with_bos
from tokenizers import Tokenizer as Reference
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from flows.cli import app
from infini_model.config import Config, SampleConfig, load_config
from infini_model.data.manifest import Manifest
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.shards.stream import open_split
from infini_model.data.sources.download import download
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.tasks.sample import draw_sample
from infini_model.model.generation.causal import generate
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.claims import claim_run
from infini_model.runtime.runs import dataset_of
from infini_model.training.loop import train

PROMPT = "a stone  under <|end_of_text|> the river"


def make_run(
    root: Path, output: str | Path, tokenizer: str, memory: str, *overrides: str
) -> tuple[Manifest, Path]:
    """Train a model of a few steps; returns the dataset's manifest and the run folder."""
    tree = tiny(
        write_texts(root / "texts", 20),
        output,
        model={"memory": memory},
        training={"max_steps": 2, "warmup_steps": 0},
    )
    tree["data"]["tokenizer"] = {"spec": tokenizer}
    config: Config = load_config(overrides=[tree, *overrides])
    run, store = config.run, config.run.datasets_store
    listing = download(config.data, run.output_dir)
    manifest = build_dataset(
        listing, config.data, run.output_dir, datasets_dir=run.datasets_dir, store=store
    )
    folder = run.datasets_dir / manifest.folder_name
    address = None if store is None else f"{store}/{manifest.folder_name}"
    with claim_run(config, manifest.key, folder, address=address) as run_dir:
        if config.model.initial_weights is not None:
            recorded(config, run_dir)
        train(config, folder, run_dir)
    return manifest, run_dir


def infini(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=True)


def fields(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text()))


@pytest.fixture(params=[False, True], ids=["plain", "begun"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer.json, of which one puts a token in front of every text."""
    definition = train_tokenizer([["the stone under the river is a stone"]], 300).text
    path = tmp_path / "given" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(with_bos(definition) if request.param else definition)
    return path


def test_transformers_opens_an_exported_model_without_memory(
    tokenizer: Path, tmp_path: Path
) -> None:
    manifest, run_dir = make_run(tmp_path, tmp_path / "output", str(tokenizer), "none")
    folder = tmp_path / "exported to" / "here"
    done = infini("export", "--to", folder, "--output-dir", tmp_path / "output")
    assert done.exit_code == 0, done.output
    first, *uses = done.stdout.splitlines()
    assert first == f"Exported step 2 of {run_dir.name} to {folder}"
    assert [use.split()[0] for use in uses] == ["infini", "transformers:"]
    same = {path.name for path in folder.iterdir()}
    assert same == {path.name for path in (run_dir / "model").iterdir()}
    assert same == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }

    reference = Reference.from_file(str(tokenizer))
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs(PROMPT).input_ids
    assert ids == reference.encode(PROMPT).ids
    assert theirs.eos_token == "<|end_of_text|>"
    assert theirs.bos_token == (BOS if manifest.tokenizer.bos_token_id else None)
    assert theirs.model_max_length == 16
    llama = AutoModelForCausalLM.from_pretrained(folder)
    for said in (llama.config, llama.generation_config):
        assert said.eos_token_id == manifest.tokenizer.eos_token_id == theirs.eos_token_id
        assert said.bos_token_id == manifest.tokenizer.bos_token_id == theirs.bos_token_id
    checkpoint = fields(run_dir / "checkpoints" / "step-2" / "model" / "config.json")
    assert checkpoint == fields(folder / "config.json")
    ours = InfiniLlama.from_pretrained(folder)
    batch = torch.tensor([ids[:16]])
    with torch.no_grad():
        torch.testing.assert_close(llama(batch).logits, ours(batch).logits, rtol=1e-5, atol=1e-5)


def test_infini_generate_opens_an_export_with_its_tokenizer(
    tokenizer: Path, tmp_path: Path
) -> None:
    manifest, run_dir = make_run(tmp_path, tmp_path / "output", str(tokenizer), "linear")
    folder = tmp_path / "exported"
    done = infini("export", run_dir, "--to", folder)
    assert done.exit_code == 0, done.output
    assert "transformers" not in done.stdout
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 10**30

    reference = Reference.from_file(str(tokenizer))
    model = InfiniLlama.from_pretrained(folder)
    prompt = reference.encode(PROMPT).ids
    eos = manifest.tokenizer.eos_token_id
    (new,) = generate(model, [prompt], max_new_tokens=9, temperature=0, eos_token_id=eos)
    new = [token for token in new if token != eos]
    given = ("--no-gpu", "--max-new-tokens=9", "--temperature=0", "--prompt", PROMPT)
    for checkpoint in (folder, run_dir, run_dir / "model", run_dir / "checkpoints" / "step-2"):
        said = infini("generate", "--checkpoint", checkpoint, *given)
        assert said.exit_code == 0, said.output
        plain = reference.decode([*prompt, *new], skip_special_tokens=False).removeprefix(BOS)
        assert said.stdout == plain.rstrip("\ufffd") + "\n"


def test_a_sample_continues_a_document_from_its_first_token(
    tokenizer: Path, tmp_path: Path
) -> None:
    manifest, run_dir = make_run(tmp_path, tmp_path / "output", str(tokenizer), "linear")
    model = InfiniLlama.from_pretrained(run_dir / "model")
    settings = SampleConfig(prompt_tokens=9, max_new_tokens=5)
    sample = draw_sample(model, dataset_of(run_dir), manifest, settings, seed=0)
    assert sample is not None
    document = open_split(dataset_of(run_dir), sample.split).document(sample.document)
    assert document[:1] == Reference.from_file(str(tokenizer)).encode(sample.prompt).ids[:1]
    whole = load_dataset_tokenizer(dataset_of(run_dir)).decode(document)
    assert not whole.startswith("<|")
    assert whole.startswith(sample.prompt + sample.original)


def test_an_export_of_bytes_is_opened_without_a_tokenizer_file(tmp_path: Path) -> None:
    _, run_dir = make_run(tmp_path, tmp_path / "output", "bytes", "none")
    folder = tmp_path / "exported"
    done = infini("export", run_dir.name, "--to", folder, "--output-dir", tmp_path / "output")
    assert done.exit_code == 0, done.output
    assert "AutoTokenizer" not in done.stdout
    assert fields(folder / "generation_config.json") == {"eos_token_id": 255}
    assert fields(folder / "config.json")["bos_token_id"] is None
    assert not [path.name for path in folder.iterdir() if path.name.startswith("tokenizer")]
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 255
    given = ("--no-gpu", "--max-new-tokens=9", "--temperature=0", "--prompt", "the river")
    alone, within = (
        infini("generate", "--checkpoint", place, *given) for place in (folder, run_dir)
    )
    assert alone.exit_code == 0, alone.output
    assert alone.stdout == within.stdout

    first = fields(folder / "config.json")
    (folder / "config.json").write_text("{}")
    assert infini("export", run_dir, "--to", folder).exit_code == 0
    assert fields(folder / "config.json") == first
    (folder / "notes.txt").write_text("mine")
    refused = infini("export", run_dir, "--to", folder)
    assert str(refused.exception) == f"{folder}: holds notes.txt, which would be lost; pick another"
    assert (folder / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("memory", ["none", "linear"])
def test_a_lora_run_is_exported_as_an_adapter_or_merged(tmp_path: Path, memory: str) -> None:
    llama = write_llama(tmp_path / "llama", dtype=torch.bfloat16)
    lora = (f"model.initial_weights={llama}", "model.segment_length=16", "training.lora={r: 4}")
    _, run_dir = make_run(tmp_path, tmp_path / "output", "bytes", memory, *lora)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    done = infini("export", run_dir, "--to", adapter)
    assert done.exit_code == 0, done.output
    opens = f"peft: AutoPeftModelForCausalLM.from_pretrained('{adapter}')"
    assert done.stdout.splitlines()[2:] == ([opens] if memory == "none" else [])
    assert {path.name for path in adapter.iterdir()} == {
        path.name for path in (run_dir / "model").iterdir()
    }
    done = infini("export", run_dir, "--merge", "--to", merged)
    assert done.exit_code == 0, done.output
    assert {path.name for path in merged.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors")
    }
    batch = torch.randint(256, (2, 16))
    with torch.no_grad():
        theirs = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
        ours, whole = theirs(batch).logits, InfiniLlama.from_pretrained(merged)(batch).logits
        torch.testing.assert_close(whole, ours, rtol=0.05, atol=0.05)
    if memory == "none":
        plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(plain(batch).logits, whole, rtol=1e-5, atol=1e-5)
    given = ("--no-gpu", "--max-new-tokens=9", "--temperature=0", "--prompt", "the river")
    for checkpoint in (adapter, merged, run_dir):
        said = infini("generate", "--checkpoint", checkpoint, *given)
        assert said.exit_code == 0, said.output

    llama.rename(tmp_path / "elsewhere")
    gone = infini("export", run_dir, "--merge", "--to", merged)
    assert str(gone.exception).endswith(
        f"adapter_config.json: base_model_name_or_path: {llama} is not a folder"
    )
    said = infini("generate", "--checkpoint", merged, *given)
    assert said.exit_code == 0, said.output


def test_only_a_lora_run_is_merged(tmp_path: Path) -> None:
    _, run_dir = make_run(tmp_path, tmp_path / "output", "bytes", "none")
    done = infini("export", run_dir, "--merge", "--to", tmp_path / "merged")
    assert str(done.exception).startswith(f"--merge: {run_dir}")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("run", "to", "complaint"),
    [
        (None, "s3://bucket/a", "--to: got 's3://bucket/a': takes a folder of this machine"),
        (None, "file", "file: is not a folder; pick another"),
        (None, "new", "latest: there is no such run; infini runs lists them"),
        ("run-1", "new", "run-1: there is no such run; infini runs lists them"),
        ("empty", "new", "checkpoints: no checkpoint found; train first"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str | None, to: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "output" / "runs" / "empty").mkdir(parents=True)
    done = infini("export", *([] if run is None else [run]), "--to", to, "--output-dir", "output")
    assert str(done.exception).endswith(complaint)
    assert not (tmp_path / "new").exists()


def test_a_stored_run_is_exported_on_another_machine(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = train_tokenizer([["the stone under the river is a stone"]], 300).text
    (tmp_path / "tokenizer.json").write_text(with_bos(definition))
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "one"))
    _, run_dir = make_run(tmp_path, f"{bucket}/team", str(tmp_path / "tokenizer.json"), "linear")
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "two"))
    run_dir = run_dir.rename(tmp_path / "gone")
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    folder = tmp_path / "exported"
    done = infini("export", "--to", folder, "--output-dir", f"{bucket}/team")
    assert done.exit_code == 0, (done.output, done.exception)
    expected = {path.name: path.read_bytes() for path in (run_dir / "model").iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected

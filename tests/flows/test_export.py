"""`infini export` and `infini generate`: what other programs, and a prompt, make of a training."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from commands import tiny, write_texts
from llamas import recorded, write_llama
from peft import AutoPeftModelForCausalLM
from templates import BOS, of_messages, with_bos
from tokenizers import Tokenizer as Reference
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from flows.cli import app
from infini_model.config import Config, ModelConfig, SampleConfig, load_config
from infini_model.data.build import build_dataset
from infini_model.data.downloads import download_shards
from infini_model.data.manifest import Manifest
from infini_model.data.sources.listing import list_sources
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_tokenizer, tokenizer_of
from infini_model.model.generate import generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import PRECISIONS
from infini_model.runtime.claims import claim_run
from infini_model.serving.model import Conversation, Model
from infini_model.training.train import train

PROMPT = "a stone  under <|end_of_text|> the river"
GIVEN = "given.json"
TEMPLATE = of_messages("<{role}>{content}")
GREEDY = ("--no-gpu", "--max-new-tokens=9", "--temperature=0")
Trained = tuple[Manifest, Path]


def make_run(
    root: Path, output: str | Path, tokenizer: str, memory: str, *overrides: str
) -> Trained:
    """Train a model of a few steps; returns the dataset's manifest and the run folder."""
    training = {"max_steps": 2, "warmup_steps": 0}
    texts = write_texts(root / "texts", 20)
    tree = tiny(texts, output, model={"memory": memory}, training=training)
    tree["data"]["tokenizer"] = {"spec": tokenizer}
    config: Config = load_config(overrides=[tree, *overrides])
    data, run, store = config.data, config.run, config.run.datasets_store
    listing = list_sources(data, run.output_dir)
    manifest = build_dataset(listing, data, run.datasets_dir, store=store)
    folder = run.datasets_dir / manifest.folder_name
    address = None if store is None else f"{store}/{manifest.folder_name}"
    with claim_run(config, manifest.key, folder, address=address) as run_dir:
        if config.model.initial_weights is not None:
            recorded(config, run_dir)
        download_shards(folder)
        train(config, folder, run_dir)
    return manifest, run_dir


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of a model without memory, whose tokenizer puts a token in front of every text."""
    root = tmp_path_factory.mktemp("trained")
    template = f"data.source.template={TEMPLATE!r}"
    return make_run(root, root / "output", str(write_tokenizer(root)), "none", template)


def write_tokenizer(folder: Path) -> Path:
    definition = train_tokenizer([["the stone under the river is a stone"]], 300).text
    path = folder / GIVEN
    path.write_text(with_bos(definition))
    return path


def reference_of(run_dir: Path) -> Reference:
    """The tokenizer that a run was given, as its own library reads it."""
    return Reference.from_file(str(run_dir.parents[2] / GIVEN))


def done(*arguments: object, stdin: str | None = None) -> Result:
    result = attempted(*arguments, stdin=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def attempted(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], input=stdin)


def fields(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text()))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_transformers_opens_an_export_without_memory(trained: Trained, tmp_path: Path) -> None:
    manifest, run_dir = trained
    folder = tmp_path / "exported to" / "here"
    said = done("export", "--to", folder, "--output-dir", run_dir.parents[1])
    assert said.stdout.splitlines() == [
        f"Exported step 2 of {run_dir.name} to {folder}",
        f"infini generate --checkpoint '{folder}' --prompt \"Once upon a time\"",
    ]
    assert names(folder) == names(run_dir / "model")

    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs(PROMPT).input_ids
    assert ids == reference_of(run_dir).encode(PROMPT).ids
    told = (theirs.eos_token, theirs.bos_token, theirs.model_max_length)
    assert told == ("<|end_of_text|>", BOS, 16)
    llama = AutoModelForCausalLM.from_pretrained(folder)
    for said in (llama.config, llama.generation_config):
        assert said.eos_token_id == manifest.tokenizer.eos_token_id == theirs.eos_token_id
        assert said.bos_token_id == manifest.tokenizer.bos_token_id == theirs.bos_token_id
    checkpoint = fields(run_dir / "checkpoints" / "step-2" / "model" / "config.json")
    assert checkpoint == fields(folder / "config.json")


def test_generate_opens_an_export_with_its_tokenizer(trained: Trained, tmp_path: Path) -> None:
    manifest, run_dir = trained
    folder = tmp_path / "exported"
    done("export", run_dir, "--to", folder)
    reference = reference_of(run_dir)
    prompt = reference.encode(PROMPT).ids
    eos = manifest.tokenizer.eos_token_id
    model = InfiniLlama.from_pretrained(folder)
    (new,) = generate(model, [prompt], max_new_tokens=9, temperature=0, eos_token_id=eos)
    new = [token for token in new if token != eos]
    plain = reference.decode([*prompt, *new], skip_special_tokens=False).removeprefix(BOS)
    given = (*GREEDY, "--prompt", PROMPT)
    for checkpoint in (folder, run_dir, run_dir / "model", run_dir / "checkpoints" / "step-2"):
        said = done("generate", "--checkpoint", checkpoint, *given).stdout
        assert said == plain.rstrip("\ufffd") + "\n"


def test_chat_has_the_form_of_the_runs_conversations(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, run_dir = trained
    folder = tmp_path / "exported"
    done("export", run_dir, "--to", folder)
    sampling = SampleConfig(max_new_tokens=9, temperature=0.0)
    for checkpoint, template in ((run_dir, TEMPLATE), (folder, None)):
        tokenizer = tokenizer_of(folder, "here")
        assert tokenizer is not None
        model, turns = InfiniLlama.from_pretrained(folder), ["the stone", "a river"]
        form = partial(tokenizer.chat, template)
        talk = Conversation(Model(model, tokenizer, template=form, sampling=sampling))
        expected = "".join(f"> {''.join(talk.reply(turn))}\n" for turn in turns)
        stdin = "".join(f"{turn}\n" for turn in turns)
        said = done("chat", "--checkpoint", checkpoint, *GREEDY, stdin=stdin)
        assert said.stdout == f"{expected}> \n"
        assert caplog.text.count("was not trained on conversations") == 1
        caplog.clear()
    refused = attempted("chat", "--checkpoint", folder, *GREEDY, stdin=b"\xff\n")
    assert str(refused.exception) == "stdin: is not UTF-8 text"


def test_an_export_replaces_another_but_no_other_files(trained: Trained, tmp_path: Path) -> None:
    _, run_dir = trained
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    done("export", run_dir, "--to", folder)
    assert fields(folder / "config.json") == fields(run_dir / "model" / "config.json")
    (folder / "notes.txt").write_text("mine")
    refused = attempted("export", run_dir, "--to", folder)
    assert str(refused.exception) == f"{folder}: holds notes.txt, which would be lost; pick another"
    assert (folder / "notes.txt").read_text() == "mine"
    refused = attempted("export", run_dir, "--merge", "--to", tmp_path / "merged")
    assert str(refused.exception).startswith(f"--merge: {run_dir}")
    assert names(tmp_path) == {"exported"}


def test_a_lora_run_is_exported_as_an_adapter_or_merged(tmp_path: Path) -> None:
    llama = write_llama(tmp_path / "llama", dtype=torch.bfloat16)
    lora = (f"model.initial_weights={llama}", "model.segment_length=16", "training.lora={r: 4}")
    _, run_dir = make_run(tmp_path, tmp_path / "output", "bytes", "none", *lora)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    done("export", run_dir, "--to", adapter)
    assert names(adapter) == names(run_dir / "model")
    done("export", run_dir, "--merge", "--to", merged)
    code = attempted("export", run_dir, "--format", "remote-code", "--to", tmp_path / "code")
    assert "add --merge" in str(code.exception)
    files = {"config.json", "generation_config.json", "model.safetensors"}
    assert names(merged) == files | {"tokenizer.json", "tokenizer_config.json"}
    assert fields(merged / "generation_config.json") == {"eos_token_id": 255}
    assert fields(merged / "config.json")["bos_token_id"] is None
    batch = torch.randint(256, (2, 16))
    with torch.no_grad():
        theirs = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
        ours, whole = theirs(batch).logits, InfiniLlama.from_pretrained(merged)(batch).logits
        torch.testing.assert_close(whole, ours, rtol=0.05, atol=0.05)
        plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        torch.testing.assert_close(plain(batch).logits, whole, rtol=1e-5, atol=1e-5)
    given = (*GREEDY, "--prompt", "the river")
    said = {done("generate", "--checkpoint", each, *given).stdout for each in (adapter, run_dir)}
    assert len(said) == 1

    llama.rename(tmp_path / "elsewhere")
    gone = str(attempted("export", run_dir, "--merge", "--to", merged).exception)
    assert gone.endswith(f"base_model_name_or_path: {llama} is not a folder")
    done("generate", "--checkpoint", merged, *given)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--to s3://bucket/a", "--to: got 's3://bucket/a': takes a path of this machine"),
        ("--to file", "file: is not a folder; pick another"),
        ("--to new", "latest: there is no such run; infini runs lists them"),
        ("empty --to new", "checkpoints: no checkpoint found; train first"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "output" / "runs" / "empty").mkdir(parents=True)
    refused = attempted("export", *arguments.split(), "--output-dir", "output")
    assert str(refused.exception).endswith(complaint)
    assert not (tmp_path / "new").exists()


def test_a_stored_run_is_exported_on_another_machine(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "one"))
    _, run_dir = make_run(tmp_path, f"{bucket}/team", str(write_tokenizer(tmp_path)), "linear")
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "two"))
    run_dir = run_dir.rename(tmp_path / "gone")
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    folder = tmp_path / "exported"
    done("export", "--to", folder, "--output-dir", f"{bucket}/team")
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 10**30
    expected = {path.name: path.read_bytes() for path in (run_dir / "model").iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


ELSEWHERE = """
import sys
sys.modules["infini_model"] = None  # as if it were not installed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer(text, return_tensors="pt")
print(ids.input_ids[0].tolist())
print(model(**ids).logits[0, -1].tolist())
print(model.generate(**ids, do_sample=False, max_new_tokens=9)[0].tolist())
"""


@pytest.mark.parametrize("spec", ["bytes", GIVEN])
def test_an_export_with_its_code_opens_where_this_package_is_not_installed(
    spec: str, tmp_path: Path
) -> None:
    given = spec if spec == "bytes" else str(write_tokenizer(tmp_path))
    manifest, _ = make_run(tmp_path, tmp_path / "output", given, "residual")
    folder = tmp_path / "folder"
    told = done(
        *("export", "--format", "remote-code", "--to", folder),
        *("--output-dir", tmp_path / "output"),
    )
    assert "once it may run the code in it" in told.stdout
    prompt = "Grüße, 世界! a stone  under the river " * 3
    command = [sys.executable, "-c", ELSEWHERE, folder, prompt]
    env = os.environ | {"HF_HOME": str(tmp_path / "hub")}  # where it copies the code to
    result = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    ids, logits, text = map(json.loads, result.stdout.splitlines())
    tokenizer = tokenizer_of(folder, str(folder))
    assert tokenizer is not None
    assert tokenizer.fingerprint == manifest.tokenizer.fingerprint
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    assert ids == [*begin, *tokenizer.encode_batch([prompt]).ids.tolist()]
    model = InfiniLlama.from_pretrained(folder)
    wanted = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(torch.tensor(logits), wanted, atol=1e-5, rtol=1e-5)
    ends = tokenizer.end_token_ids
    new = generate(model, [ids], max_new_tokens=9, temperature=0, eos_token_id=ends)[0]
    assert text == [*ids, *new]
    # Such a folder is an export, which another may replace.
    done("export", "--to", folder, "--output-dir", tmp_path / "output")
    assert "modeling_infini_llama.py" not in names(folder)


def test_code_is_not_written_for_a_model_that_it_does_not_compute(tmp_path: Path) -> None:
    make_run(tmp_path, tmp_path / "output", "bytes", "delta")
    refused = attempted(
        *("export", "--format", "remote-code", "--to", tmp_path / "new"),
        *("--output-dir", tmp_path / "output"),
    )
    assert "--format remote-code: needs a causal model" in str(refused.exception)
    assert not (tmp_path / "new").exists()


TEXT = "Grüße, 世界! " * 9
DRAW = {"max_new_tokens": 60, "temperature": 0.7, "top_k": 40, "top_p": 0.95, "seed": 5}
OPTIONS = ["--no-gpu", *(f"--{name.replace('_', '-')}={value}" for name, value in DRAW.items())]


def test_a_prompt_from_stdin_is_continued_in_the_precision_asked_for(tmp_path: Path) -> None:
    trained_tokenizer = train_tokenizer([[TEXT]], 270)  # mostly single bytes
    torch.manual_seed(0)
    size = {"vocab_size": trained_tokenizer.vocab_size, "hidden_size": 32, "segment_length": 16}
    InfiniLlama(ModelConfig(**size, initializer_range=0.3)).save_pretrained(tmp_path)
    trained_tokenizer.save(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode_batch([TEXT]).ids.tolist()

    def continued(precision: str) -> str:
        """The text at once; a sequence that the end cuts off is left out."""
        model = InfiniLlama.from_pretrained(tmp_path)
        model.precision = PRECISIONS[precision]
        (new,) = generate(model, [ids], eos_token_id=tokenizer.eos_token_id, **DRAW)
        return tokenizer.decode(ids + new).removeprefix(TEXT).rstrip("\ufffd")

    rounded = continued("bf16")
    assert len(rounded) > 10
    assert rounded != continued("fp32")
    command = ("generate", "--checkpoint", tmp_path, *OPTIONS, "--prompt-file", "-")
    assert done(*command, "training.precision=bf16", stdin=TEXT).stdout == rounded + "\n"

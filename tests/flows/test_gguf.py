"""`infini export --format gguf`: llama.cpp itself reads what its converter wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llamas import write_llama
from real import llama_cpp, real_tokenizer
from test_export import attempted, done, make_run, write_tokenizer

from infini_model.config import ModelConfig
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.load import load_tokenizer, tokenizer_of
from infini_model.model.llama import InfiniLlama
from infini_model.training.gguf import write_gguf

# In a process of its own, as it is a program in C++: it prints the ids of each text, and those with
# which it continues the first one.
ASK = """
import json, sys
import httpx, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = sys.argv[1], 256, 1, 0
params.cpuparams.n_threads, params.warmup = 1, False
server = xllamacpp.Server(params)
client, texts = httpx.Client(base_url=server.listening_address, timeout=300), json.load(sys.stdin)
ask = {"content": texts[0], "add_special": True}
ids = [client.post("/tokenize", json=ask | {"content": t}).json()["tokens"] for t in texts]
ask = {"prompt": ids[0], "n_predict": 9, "temperature": 0, "return_tokens": True}
print(json.dumps([ids, client.post("/completion", json=ask).json()["tokens"]]))
"""
HARD = ["The stone  under the river's", "Grüße, 世界! DON'T\n\n  a   tab\tand 12345 'RE 😶‍🌫️\r\n x"]


def real_texts() -> list[str]:
    """Two hard lines, and texts that Debian's packages have of their licences."""
    paths = sorted(Path("/usr/share/doc").glob("lib*/copyright"))[:40]
    return [*HARD, *(path.read_text(errors="replace")[:5000] for path in paths)]


def read_by_llama_cpp(file: Path, texts: list[str]) -> tuple[list[list[int]], list[int]]:
    command = [sys.executable, "-c", ASK, str(file)]
    result = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ids, new = json.loads(result.stdout.splitlines()[-1])
    return ids, new


def assert_same(file: Path, model: InfiniLlama, tokenizer: BPETokenizer) -> None:
    """Assert that llama.cpp has our ids of real texts, and our greedy continuation."""
    texts = real_texts()
    ids, new = read_by_llama_cpp(file, texts)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    assert ids == [[*begin, *tokenizer.encode_batch([text]).ids.tolist()] for text in texts]
    with torch.no_grad():
        logits = model(torch.tensor([[*ids[0], *new]])).logits[0, len(ids[0]) - 1 : -1]
    assert len(new) == 9
    # In 16 bits the second of two that are about as likely may be the first.
    torch.testing.assert_close(logits[range(9), new], logits.amax(-1), atol=0.1, rtol=0.0)


def trained_here(_: Path) -> str:
    return "train"


@pytest.mark.story
@pytest.mark.parametrize("make_tokenizer", [trained_here, lambda root: str(write_tokenizer(root))])
def test_llama_cpp_computes_the_same_with_a_tokenizer_that_was_trained_here(
    make_tokenizer: Callable[[Path], str], tmp_path: Path
) -> None:
    spread = ("model.initializer_range=0.3", "model.segment_length=64", "packing.context_length=64")
    output, file = tmp_path / "output", tmp_path / "to" / "model.gguf"
    make_run(tmp_path, output, make_tokenizer(tmp_path), "none", *spread)
    done("export", "--output-dir", output, "--to", tmp_path / "folder")
    form = ("--format", "gguf", "--llama-cpp", llama_cpp())
    told = done("export", "--output-dir", output, "--to", file, *form)
    assert f"llama-cli -m {file}" in told.stdout
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]
    tokenizer = tokenizer_of(tmp_path / "folder", "here")
    assert isinstance(tokenizer, BPETokenizer)
    assert_same(file, InfiniLlama.from_pretrained(tmp_path / "folder"), tokenizer)


@pytest.mark.story
@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen3"])
def test_llama_cpp_computes_the_same_with_the_tokenizer_of_a_base(
    name: str, tmp_path: Path
) -> None:
    """That of Llama 2 is of SentencePiece, whose scores the converter does not know."""
    tokenizer = load_tokenizer(str(real_tokenizer(name)))
    assert isinstance(tokenizer, BPETokenizer)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = {"memory": "none", "segment_length": 64, "initializer_range": 0.3}
    model = InfiniLlama(ModelConfig(vocab_size=tokenizer.vocab_size, **size, **shape)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", llama_cpp())
    assert_same(tmp_path / "model.gguf", model, tokenizer)


@pytest.mark.story
def test_merged_adapters_become_gguf_and_a_failure_of_the_converter_is_one_line(
    tmp_path: Path,
) -> None:
    llama = write_llama(tmp_path / "llama", dtype=torch.bfloat16, vocab_size=300)
    tokenizer = str(write_tokenizer(tmp_path))
    lora = (f"model.initial_weights={llama}", "model.segment_length=16", "training.lora={r: 4}")
    output, file = tmp_path / "output", tmp_path / "model.gguf"
    make_run(tmp_path, output, tokenizer, "none", *lora)
    form = ("--output-dir", output, "--format", "gguf", "--to", file, "--llama-cpp")
    assert "add --merge" in str(attempted("export", *form, llama_cpp()).exception)
    done("export", *form, llama_cpp(), "--merge")
    done("export", "--output-dir", output, "--merge", "--to", tmp_path / "folder")
    ids, new = read_by_llama_cpp(file, HARD)
    with torch.no_grad():
        batch = torch.tensor([[*ids[0], *new]])
        logits = InfiniLlama.from_pretrained(tmp_path / "folder")(batch).logits[0]
    assert new[0] == logits[len(ids[0]) - 1].argmax()

    file.write_bytes(b"before")
    broken = tmp_path / "llama.cpp"
    broken.mkdir()
    (broken / "convert_hf_to_gguf.py").write_text("import no_such_module")
    refused = str(attempted("export", *form, broken, "--merge").exception)
    assert refused == (
        f"{broken}/convert_hf_to_gguf.py: ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert file.read_bytes() == b"before"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]


def test_what_llama_cpp_does_not_know_is_one_line(tmp_path: Path) -> None:
    form = ("--format", "gguf", "--to", tmp_path / "model.gguf", "--output-dir")
    for number, (tokenizer, memory, expected) in enumerate(
        [
            (
                "train",
                "residual",
                "llama.cpp has no such model; it takes causal ones with model.memory=none",
            ),
            ("bytes", "none", "llama.cpp has no tokenizer of bytes; train one (spec: train)"),
            ("train", "none", f"{tmp_path}: has no convert_hf_to_gguf.py; give --llama-cpp"),
        ]
    ):
        output = tmp_path / str(number)
        make_run(tmp_path, output, tokenizer, memory)
        refused = attempted("export", *form, output, "--llama-cpp", tmp_path)
        assert str(refused.exception).startswith(f"--format gguf: {expected}")
    refused = attempted("export", *form, output, "--to", tmp_path / "folder")
    assert "takes a file, such as model.gguf" in str(refused.exception)
    assert not (tmp_path / "model.gguf").exists()

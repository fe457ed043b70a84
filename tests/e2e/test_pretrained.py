"""A real pretrained Llama: talked to, fine-tuned on conversations, and opened by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import Environment, infini, infini_here, succeed
from real import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.model.llama import InfiniLlama

pytestmark = pytest.mark.story
QUESTIONS = b"What is the capital of France?\nAnd of Italy? One word.\n"
GREEDY = ("--no-gpu", "--max-new-tokens", "40", "--temperature", "0")
SHORT = {
    "data": {"name": "chat", "splits": {"train": 0.8, "validation": 0.2, "test": 0.0}},
    "packing": {"mode": "document", "remainder": "pad", "context_length": 64},
    "model": {"segment_length": 64},
    "training": {"max_steps": 2, "epochs": None, "batch_size": 1, "warmup_steps": 0},
    "evaluation": {"tasks": ["loss"], "max_windows": 2},
    "tracking": {"mlflow": False, "tensorboard": False},
}


def test_a_pretrained_llama_keeps_its_ends_and_its_chat_through_training_and_export(
    connected: Environment, tmp_path: Path
) -> None:
    base = smollm2()
    said = infini_here("chat", "--checkpoint", base, *GREEDY, env=connected, stdin=QUESTIONS)
    first, second = said.stdout.split("> ")[1:3]
    assert first.startswith("The capital of France is Paris")
    assert "Rome" in second
    assert "<|im_end|>" not in said.stdout

    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for number in range(20):
            asked = {"role": "user", "content": f"What comes after {number}?"}
            told = {"role": "assistant", "content": f"It is {number + 1}."}
            file.write(json.dumps({"messages": [asked, told]}) + "\n")
    source = {"paths": str(chats), "pairs": True}
    tree = SHORT | {"run": {"output_dir": str(tmp_path / "out"), "name": "tuned"}}
    tree["data"] = SHORT["data"] | {"source": source}
    tree["model"] = SHORT["model"] | {"initial_weights": str(base)}
    (tmp_path / "short.json").write_text(json.dumps(tree))
    ran = succeed(
        infini("run", "--preset", "fine-tune", "--config", tmp_path / "short.json"), connected
    )
    assert "documents end with <|im_end|> (2)" in ran.stdout + ran.stderr
    (dataset,) = (tmp_path / "out" / "datasets").glob("chat-*")
    tokenizer = load_dataset_tokenizer(dataset)
    rows = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    theirs = AutoTokenizer.from_pretrained(base)
    known = {theirs.apply_chat_template(row, tokenize=False).rstrip() for row in rows}
    from datasets import load_from_disk

    (ids, *_) = load_from_disk(str(dataset))["train"]["input_ids"]
    assert theirs.decode(ids) in known
    assert tokenizer.end_token_ids == (2,)

    exported = tmp_path / "exported"
    succeed(
        infini("export", "tuned", "--to", exported, "--output-dir", tmp_path / "out"), connected
    )
    again = AutoTokenizer.from_pretrained(exported)
    assert again.chat_template == theirs.chat_template
    assert again.eos_token == theirs.eos_token
    assert GenerationConfig.from_pretrained(exported) == GenerationConfig.from_pretrained(base)
    with torch.no_grad():
        tokens = torch.tensor([ids])
        expected = AutoModelForCausalLM.from_pretrained(exported)(tokens).logits
        found = InfiniLlama.from_pretrained(exported)(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)

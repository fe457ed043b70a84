"""Pretrained weights under `infini serve`: asked for, fetched with progress, retried."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import PATIENCE, Environment, api, eventually
from local_hub import LocalHub, Repository, serve_hub, sha256
from ports import free_port
from serving import Serving, serve
from transformers import LlamaConfig, LlamaForCausalLM
from trials import Make, Start

from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.training.initial_weights import read_initial_weights

pytestmark = pytest.mark.story
SUFFIX = ".safetensors"


@pytest.fixture
def hub(tmp_path: Path, documents: Path) -> Iterator[LocalHub]:
    """A hub with a small Llama in several files, of which the largest is held."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "llama", max_shard_size="30KB")
    texts = [path.read_text() for path in documents.iterdir()]
    train_tokenizer([texts], 290).save(tmp_path / "llama")
    files = {path.name: path.read_bytes() for path in (tmp_path / "llama").iterdir()}
    with serve_hub() as server:
        server.repositories["team/llama"] = Repository(files)
        server.held = max(files.values(), key=len)
        yield server
        server.released.set()


def progress_of(serving: Serving, flow_run: str) -> float:
    """What the progress artifact of the weights stage shows, in percent."""
    key = {"any_": ["weights-progress"]}
    wanted = {"artifacts": {"flow_run_id": {"any_": [flow_run]}, "key": key}}
    found = api(serving.url, "artifacts/filter", sort="CREATED_DESC", **wanted)
    return float(found[0]["data"])


def test_a_killed_download_is_retried_and_the_run_finishes(
    start: Start,
    pipeline: Make,
    alone: Environment,
    with_tables: Callable[[Path], Path],
    hub: LocalHub,
    tmp_path: Path,
) -> None:
    output = with_tables(tmp_path / "output")
    variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hub")}
    # The file that is held must not be given up.
    timeouts = dict.fromkeys(("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"), f"{PATIENCE:.0f}")
    env = alone | variables | timeouts | {"HF_HUB_OFFLINE": "0"}
    serving = serve(functools.partial(start, env=env), output, (free_port(), free_port()))
    tree = pipeline(output, training={"max_steps": 5})

    refused = serving.create("pipeline", preset="uptrain", advanced=tree)
    message = serving.wait_for_state(refused, "Failed")["message"]
    assert message.endswith(
        "model.initial_weights: missing; the preset uptrain needs a pretrained Llama: "
        "model.initial_weights=FOLDER or meta-llama/Llama-3.2-1B"
    )

    flow_run = serving.create(
        "pipeline", preset="uptrain", initial_weights="team/llama", advanced=tree
    )
    serving.wait_for_log(flow_run, "% of ")
    files = hub.repositories["team/llama"].files
    others = {name for name, data in files.items() if name.endswith(SUFFIX) and data != hub.held}

    def have_arrived() -> bool:
        return others <= {path.name for path in (tmp_path / "hub").rglob(f"*{SUFFIX}")}

    eventually(have_arrived, f"{others}, but for the file that is held")
    serving.kill("weights")
    serving.wait_for_log(flow_run, "weights ended with status -9")
    hub.released.set()
    serving.wait_for_state(flow_run, "Completed")
    assert progress_of(serving, flow_run) == 100.0
    wanted = {"flow_runs": {"id": {"any_": [flow_run]}}}

    def runs() -> dict[str, int]:
        found = api(serving.url, "task_runs/filter", **wanted)
        return {run["name"]: run["run_count"] for run in found}

    # The server records it in the background.
    eventually(lambda: runs().get("weights team/llama") == 2, lambda: f"two attempts in {runs()}")
    run_dir = output / "runs" / "uptrain-1"
    found = read_initial_weights(run_dir)
    assert found is not None
    assert found.commit == hub.repositories["team/llama"].commit
    assert "memory emptied before every segment" in (run_dir / "report.md").read_text()
    # What had arrived before the kill was not fetched again.
    assert hub.held is not None
    sent = [each.path for each in hub.requests if each.method == "GET" and "/storage/" in each.path]
    others = [path for path in sent if sha256(hub.held) not in path]
    assert len(others) == len(set(others)) > 1
    assert not [*tmp_path.rglob("*.incomplete")]
    serving.stop()

"""One run of `benchmarks.memory_gain` or `benchmarks.uptrain`: train a form, then score it.

In a process of its own, which prints the losses of held-out documents as its last line, as JSON. A
run folder that holds part of the training is continued from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory_forms import FORMS
from benchmarks.report import environment, run
from infini_model.config import Config, dump_config, load_config
from infini_model.data.loading.stream import open_split
from infini_model.data.manifest import SPLITS
from infini_model.evaluation.context import CheckpointContext, EvalContext
from infini_model.evaluation.tasks.by_position import LongDocuments, find_long_documents, measure
from infini_model.runtime.storage import content_key
from infini_model.training.__main__ import main as train

# Beyond these first segments of a document only a memory, or a window, tells what came before.
NEAR = 8
# Names of the losses without a part of the attention.
WITHOUT = {"memory": "knocked_out", "window": "without_window"}


def train_and_score(
    form: str, config: Config, dataset: Path, run_dir: Path, near: int = NEAR
) -> dict[str, Any]:
    """Start such a process, and wait for its result; `near` is that of `score`."""
    began, file = time.monotonic(), run_dir.parent / f"{run_dir.name}.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    where = [f"--config={file}", f"--run-dir={run_dir}"]
    if config.model.initial_weights is not None:
        run(["-m", "infini_model", "weights", *where])
    what = [form, f"--dataset={dataset}", f"--near={near}", *where]
    ended = run(["-m", "benchmarks.memory_trial", *what], threads=1)
    seconds, about = time.monotonic() - began, environment()
    print(f"{run_dir.name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return {
        **json.loads(ended.last_line),
        "seconds": round(seconds),
        "cpu": about["machine"]["cpu"],
        "torch": about["versions"]["torch"],
        "commit": about["commit"],
    }


def common_key(config: Config, dataset: Path, near: int = NEAR) -> str:
    """What compared runs have in common: the tokens, and what decides the weights and the scores.

    Neither the dataset's key is part of it nor a setting that has its default, so that results
    outlive refactorings.
    """
    tokens = hashlib.sha256()
    for split in SPLITS:
        stream = open_split(dataset, split)
        tokens.update(f"{split} {stream.documents} ".encode())
        for index in range(stream.documents):  # each ends with the token that ends documents
            tokens.update(stream.document(index).astype(np.int64).tobytes())
    decisive: Any = {"model": True, "packing": True, "training": True}
    decisive["evaluation"] = {"loss_by_position"}
    settings = config.model_dump(mode="json", include=decisive, exclude_defaults=True)
    return content_key({"tokens": tokens.hexdigest(), "near": near, **settings})[:12]


def folder_name(trial: tuple[Any, ...], key: str) -> str:
    """The name of a trial's run folder."""
    return re.sub(r"[^\w.]+", "-", "-".join(map(str, (*trial, key))))


def score(context: EvalContext, near: int) -> dict[str, Any]:
    """Parameters, and sums of losses in nats and counts of targets, by document and by segment.

    By document they are of what lies beyond the first `near` segments. Losses are `fresh`, with all
    parts of the attention, `knocked_out`, without the memory, and `without_window`.
    """
    documents = find_long_documents(context)
    if not isinstance(documents, LongDocuments):
        raise SystemExit(documents)
    measured = measure(context, documents)
    kinds = {"counts": measured.counts, "fresh": measured.whole}
    kinds |= {WITHOUT[part]: sums for part, sums in measured.without.items()}
    return {
        "parameters": sum(each.numel() for each in context.model.parameters()),
        "documents": {name: _rounded(sums[:, near:].sum(1)) for name, sums in kinds.items()},
        "segments": {name: _rounded(sums.sum(0)) for name, sums in kinds.items()},
    }


def _rounded(sums: np.ndarray) -> list[float]:
    return [round(float(each), 2) for each in sums]


def main() -> None:
    """Train and score."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_trial", description=__doc__)
    parser.add_argument("form", choices=FORMS)
    for name in ("config", "dataset", "run-dir"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--near", type=int, default=NEAR, help="first segments not counted")
    options = parser.parse_args()
    where = [
        f"--config={options.config}",
        f"--dataset={options.dataset}",
        f"--run-dir={options.run_dir}",
    ]
    with FORMS[options.form].applied():
        if status := train(where):
            raise SystemExit(status)
        config = load_config(file=options.config)
        context = CheckpointContext(options.run_dir, options.dataset, config)
        print(json.dumps(score(context, options.near)))


if __name__ == "__main__":
    main()

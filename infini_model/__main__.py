"""The stages without Prefect: `python -m infini_model STAGE --config FILE …`.

STAGE is download, plan, shard or evaluate (training is `python -m infini_model.training`). It
reports progress and the result on stdout (see `infini_model.runtime.stage_protocol`). Exit status:
0 on success, 2 after an error that the user can fix, 1 with a traceback after any other.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infini_model.config import Config, load_config
from infini_model.runtime.errors import UserError
from infini_model.runtime.stage_protocol import ERROR, RESULT, write_message, write_progress


def _download(config: Config, _arguments: argparse.Namespace) -> dict[str, Any]:
    from infini_model.data.manifest import write_record
    from infini_model.data.sources.download import download

    corpus = download(config.data, config.run.output_dir, progress=write_progress)
    path = config.run.datasets_dir / ".corpora" / f"corpus-{corpus.fingerprint[:16]}.json"
    write_record(path, corpus)
    counts = corpus.model_dump(include={"documents", "bytes", "skipped", "fingerprint"})
    return {"corpus": str(path), "files": len(corpus.files), **counts}


def _plan(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    from infini_model.data.manifest import Corpus, read_record
    from infini_model.data.shards.plan import finished_dataset, plan_dataset

    if arguments.corpus is None:
        return finished_dataset(config).model_dump(mode="json")
    return plan_dataset(read_record(arguments.corpus, Corpus), config).model_dump(mode="json")


def _shard(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    from infini_model.data.manifest import Corpus, read_record
    from infini_model.data.shards.dataset import build_dataset

    corpus = read_record(arguments.corpus, Corpus)
    manifest = build_dataset(
        corpus,
        config.data,
        config.run.output_dir,
        datasets_dir=config.run.datasets_dir,
        progress=write_progress,
    )
    folder = (config.run.datasets_dir / manifest.folder_name).resolve()
    return {"folder": str(folder), "key": manifest.key}


def _evaluate(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    from infini_model.evaluation.report import evaluate_run
    from infini_model.evaluation.tracking import log_evaluation

    result = evaluate_run(arguments.run_dir, arguments.dataset, config, progress=write_progress)
    log_evaluation(arguments.run_dir, arguments.dataset, config, result)
    return result.model_dump(mode="json")


STAGES: dict[str, Callable[[Config, argparse.Namespace], dict[str, Any]]] = {
    "download": _download,
    "plan": _plan,
    "shard": _shard,
    "evaluate": _evaluate,
}


def main() -> int:
    """Run one stage; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m infini_model", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON configuration")
    parser.add_argument("--corpus", type=Path, help="plan, shard: file written by download")
    parser.add_argument("--dataset", type=Path, help="evaluate: dataset folder")
    parser.add_argument("--run-dir", type=Path, help="evaluate: run folder")
    arguments = parser.parse_args()
    try:
        config = load_config(file=arguments.config)
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        # Only this package: at "debug" other libraries log every font that they try.
        logging.getLogger("infini_model").setLevel(config.run.log_level.upper())
        result = STAGES[arguments.stage](config, arguments)
    except UserError as error:
        write_message(ERROR, {"kind": "user", "message": str(error)})
        return 2
    except ConnectionError as error:
        write_message(ERROR, {"kind": "network", "message": str(error)})
        return 2
    write_message(RESULT, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

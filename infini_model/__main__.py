"""The stages without Prefect: `python -m infini_model STAGE --config FILE …`.

STAGE is weights, download, screen, plan, shard or evaluate (training is
`python -m infini_model.training`). It reports progress and the result on stdout (see
`infini_model.runtime.stage_protocol`). Exit status: 0 on success, 2 after an error that the user
can fix, 1 after any other, with a traceback unless a retry may help.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infini_model.config import Config, load_config
from infini_model.data.build import build_dataset, plan_dataset, write_listing
from infini_model.data.downloads import download_shards
from infini_model.data.lookup import finished_dataset
from infini_model.data.screen import screen_sources
from infini_model.data.sources.files import Listing
from infini_model.data.sources.listing import list_sources, raw_files_lock
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, StageError, UserError
from infini_model.runtime.records import read_record
from infini_model.runtime.runs import is_started, read_run
from infini_model.runtime.stage_protocol import ERROR, RESULT, write_message, write_progress
from infini_model.training.initial_weights import find_initial_weights, record_initial_weights


def _weights(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    weights = find_initial_weights(config, write_progress)
    if arguments.run_dir is not None:
        record_initial_weights(arguments.run_dir, weights)
    return weights.model_dump(mode="json")


def _download(config: Config, _arguments: argparse.Namespace) -> dict[str, Any]:
    run = config.run
    # Until the listing names them, nothing else protects the files from being cleaned up.
    with storage.lock(raw_files_lock(run.output_dir), shared=True):
        listing = list_sources(
            config.data,
            run.output_dir,
            datasets_dir=run.datasets_dir,
            progress=write_progress,
        )
        return {"listing": str(write_listing(listing, config.data, run.datasets_dir))}


def _screen(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    listing, datasets_dir = read_record(arguments.listing, Listing), config.run.datasets_dir
    screened, found = screen_sources(listing, config.data, datasets_dir, write_progress)
    path = write_listing(screened, config.data, datasets_dir)
    return {"listing": str(path), "sources": {k: each.model_dump() for k, each in found.items()}}


def _plan(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.listing is None:
        return finished_dataset(config).model_dump(mode="json")
    listing = read_record(arguments.listing, Listing)
    return plan_dataset(listing, config).model_dump(mode="json")


def _shard(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    listing, data = read_record(arguments.listing, Listing), config.data_to_tokenize
    datasets_dir, store = config.run.datasets_dir, config.run.datasets_store
    manifest = build_dataset(listing, data, datasets_dir, store=store, progress=write_progress)
    name = manifest.folder_name
    folder = (datasets_dir / name).resolve()
    address = None if store is None else f"{store}/{name}"
    return {"folder": str(folder), "key": manifest.key, "address": address}


def _evaluate(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    # Imported here, as they import torch, which takes seconds.
    from infini_model.evaluation.mlflow import log_evaluation
    from infini_model.evaluation.report import evaluate_run
    from infini_model.training.trackers import send_evaluation, trackers_of

    trackers = trackers_of(arguments.run_dir, config)
    download_shards(arguments.dataset)
    result = evaluate_run(arguments.run_dir, arguments.dataset, config, progress=write_progress)
    log_evaluation(arguments.run_dir, arguments.dataset, config, result)
    # An interrupted run has more to send first, and scores on other data are not the run's.
    is_claimed = is_started(arguments.run_dir)
    own = read_run(arguments.run_dir).dataset_key if is_claimed else result.dataset_key
    if result.step >= result.last_step and result.dataset_key == own:
        send_evaluation(trackers, result.step, result.metrics)
    return result.model_dump(mode="json")


# Records of 100,000 partitions are millions of objects, none of them garbage; to look for some
# after every 700, as Python does, takes longer than to read them.
OBJECTS_BETWEEN_COLLECTIONS = 5_000_000
STAGES: dict[str, Callable[[Config, argparse.Namespace], dict[str, Any]]] = {
    "weights": _weights,
    "download": _download,
    "screen": _screen,
    "plan": _plan,
    "shard": _shard,
    "evaluate": _evaluate,
}


def main() -> int:
    """Run one stage; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m infini_model", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON configuration")
    parser.add_argument("--listing", type=Path, help="screen, plan, shard: file of a listing")
    parser.add_argument("--dataset", type=Path, help="evaluate: dataset folder")
    parser.add_argument("--run-dir", type=Path, help="evaluate, weights: run folder")
    arguments = parser.parse_args()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    try:
        config = load_config(file=arguments.config)
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        # Only this package: at "debug" other libraries log every font that they try.
        logging.getLogger("infini_model").setLevel(config.run.log_level.upper())
        result = STAGES[arguments.stage](config, arguments)
    except UserError as error:
        kind = "data" if isinstance(error, DataError) else "user"
        write_message(ERROR, {"kind": kind, "message": str(error)})
        return 2
    except ConnectionError as error:
        write_message(ERROR, {"kind": "network", "message": str(error)})
        return 2
    except StageError as error:
        write_message(ERROR, {"kind": "stage", "message": str(error)})
        return 1
    write_message(RESULT, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

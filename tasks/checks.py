"""What is refused before any work is done."""

from __future__ import annotations

from prefect import get_run_logger

from infini_model.config import Config
from infini_model.config.tree import RunConfig
from infini_model.runtime.claims import check_branch
from infini_model.runtime.errors import DeviceError, StoreError
from infini_model.runtime.object_store import ObjectStore
from infini_model.runtime.stored_runs import refresh_runs
from infini_model.training.initial_weights import InitialWeights
from infini_model.training.launch.devices import choose_gpus
from infini_model.training.memory_estimate import Machine, check_memory
from infini_model.training.model_shape import (
    UnknownShapeError,
    check_kernels,
    known_shape,
    with_objective,
)
from infini_model.training.trackers import trackers_of
from tasks.flow_run import current_owner


def refresh_and_check_stores(config: Config, *, builds_dataset: bool) -> None:
    """Bring the records of stored runs here; check the stores, a branch's parent and the trackers.

    Raises `StoreError` if a store ignores conditions, as `ObjectStore` does, and as `check_branch`
    and `trackers_of`.
    """
    trackers_of(config.run.runs_dir, config)
    refresh_runs(config.run.runs_dir, config.run.store)
    check_stores(config.run, builds_dataset=builds_dataset)
    check_branch(config, current_owner())


def check_stores(run: RunConfig, *, builds_dataset: bool) -> None:
    """Check that the stores of runs, and of a dataset that is built, honour conditional writes.

    Amazon S3, Google Cloud Storage and Azure do. With some servers that speak like S3, two machines
    would train in one run, and neither would notice. It takes six requests for each address. Raises
    `StoreError`, and as `ObjectStore` does.
    """
    datasets = "run.output_dir" if run.data_store is None else "run.data_dir"
    for setting, address in (
        ("run.output_dir", run.store),
        (datasets, run.datasets_store if builds_dataset else None),
    ):
        if address is not None and not ObjectStore(address).honours_conditions():
            raise StoreError(
                f"{setting}: {address}: the store ignores conditional writes, which keep two "
                "machines apart; use one that honours If-None-Match and If-Match"
            )


def check_gpus_of_evaluation(config: Config) -> None:
    """Check that this machine has the GPUs with which it evaluates what is trained on Ray.

    Raises `DeviceError` if it has not.
    """
    if config.launch.launcher == "local":
        return
    try:
        choose_gpus(config.launch.gpus)
    except DeviceError as error:
        raise DeviceError(f"{error}, where the run is evaluated; set launch.gpus=auto") from error


def check_training_memory(config: Config, weights: InitialWeights | None = None) -> None:
    """Log what the training needs, unless only what is yet to be read says how large its model is.

    Warns, or raises `ConfigError`, as `check_memory` does, and `DeviceError` as `choose_gpus` and
    `check_kernels` do.
    """
    log = get_run_logger()
    if config.launch.launcher == "ray":
        log.info("Memory of the training: checked on the nodes of the Ray cluster")
        return
    machine = Machine.of(config)
    check_kernels(config.model, machine.device, compiled=config.launch.compile)
    try:
        shaped = known_shape(config) if weights is None else weights.shaped(config)
    except UnknownShapeError as unknown:
        log.info("Memory of the training: %s", unknown)
        return
    need = check_memory(with_objective(shaped), machine, is_pretrained=weights is not None)
    log.info("Memory of the training: %s", need)

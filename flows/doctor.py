"""The checks of `infini doctor` on this machine, with a remedy for each problem."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

import psutil

from flows.serving.access import mlflow_client, stored_secret
from flows.serving.connection import API_URL, AUTH_STRING, configured, get, served
from flows.serving.servers import prefect_dir
from infini_model.config import Config
from infini_model.runtime.errors import DeviceError, UnreachableError, UserError
from infini_model.runtime.machine import (
    available_cores,
    available_memory,
    c_compiler,
    lacking_on_gpu,
    package_versions,
)
from infini_model.training.launch.devices import find_driver, list_gpus, torch_cuda
from infini_model.training.memory_estimate import Machine, Need, advice
from infini_model.training.model_shape import UnknownShapeError, known_shape

GIB = 1 << 30
NEEDED_DISK_GIB = 5
# NCCL exchanges buffers between the processes of a machine through it.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only measured, nothing is written there
NEEDED_SHARED_GIB = 1
PACKAGES = ("torch", "prefect", "mlflow", "datasets", "pyarrow", "tokenizers", "gigatoken")


@dataclass(frozen=True)
class Finding:
    """The result of one check; `remedy` is empty if there is no problem."""

    subject: str
    found: str
    remedy: str = ""


def _versions() -> Iterator[Finding]:
    versions = package_versions(*PACKAGES)
    yield Finding("Python", versions["python"])
    for package in PACKAGES:
        found = versions.get(package)
        yield Finding(package, found or "missing", "" if found else "make install")


def _devices() -> Iterator[Finding]:
    free, total = (size / GIB for size in (available_memory(), psutil.virtual_memory().total))
    found = f"{available_cores()} cores, {free:.1f} of {total:.1f} GiB of main memory free"
    yield Finding("CPU", found)
    try:
        gpus = list_gpus()
    except DeviceError as error:
        remedy = "make nvidia-smi work; CUDA_VISIBLE_DEVICES may only list GPUs that it shows"
        yield Finding("GPU", str(error), remedy)
        return
    for gpu in gpus:
        memory = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        yield Finding(f"GPU {gpu.identifier}", f"{gpu.name}, {memory}, {gpu.busy_percent}% busy")
    if not gpus:
        yield Finding("GPU", "none; training runs on the CPU")
        return
    yield _driver()
    yield _flash_attn(min(gpu.capability or (0, 0) for gpu in gpus))
    yield _kernels()


def _driver() -> Finding:
    """Whether the NVIDIA driver is new enough for the CUDA version of torch."""
    driver, built = find_driver(), torch_cuda()
    if driver is None:
        return Finding("driver", "NVML does not respond", "install NVIDIA's driver")
    found = f"{driver.version}, supports CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    if built is None:
        remedy = "install torch with CUDA: pip install --force-reinstall torch"
        return Finding("driver", f"{found}; torch is built without CUDA", remedy)
    found = f"{found}; torch is built for {built[0]}.{built[1]}"
    # Within a major version, an older driver runs binaries built for a newer CUDA.
    old = driver.cuda[0] < built[0]
    return Finding("driver", found, f"update the driver to support CUDA {built[0]}" if old else "")


def _flash_attn(capability: tuple[int, int]) -> Finding:
    """Which flash-attn a training uses on GPUs of this compute capability, with heads of 128."""
    from infini_model.model.kernels.attention import flash_attn_package

    package = flash_attn_package(capability, 128)
    if package is not None:
        return Finding(package, importlib.metadata.version(package))
    if 9 <= capability[0] <= 11:
        return Finding("flash-attn-4", "not installed", "pip install 'infini-model[flash-attn-4]'")
    version = ".".join(map(str, capability))
    return Finding("flash-attn", f"none for compute capability {version}; PyTorch's own is used")


def _kernels() -> Finding:
    """Triton, which builds the kernels of the memory, and what it needs for that."""
    if (lack := lacking_on_gpu()) is not None:
        return Finding("kernels", f"there is no {lack.what}", lack.remedy)
    import triton

    return Finding("kernels", f"built by Triton {triton.__version__} and {c_compiler()}")


def _training(config: Config) -> Finding:
    """What the training of this configuration needs, and the settings with which it fits."""
    subject = "training memory"
    try:
        shaped = known_shape(config)
        try:
            machine = Machine.of(config)
        except DeviceError as error:
            return Finding(subject, f"{error}; {_on_gpus(shaped)}", "run it where there are GPUs")
    except UnknownShapeError as unknown:
        return Finding(subject, str(unknown))
    except UserError as error:
        return Finding(subject, str(error), "correct the setting")
    need = Need.of(shaped, machine)
    if shortage := need.shortage():
        return Finding(subject, shortage, advice(shaped, machine))
    return Finding(subject, str(need))


def _on_gpus(config: Config) -> str:
    """What the training would need on GPUs that are not in this machine."""
    processes = (config.launch.processes or 1) * config.launch.num_nodes
    machine = Machine("cuda", processes, config.launch.processes or 1, True, 0, 0)
    gpus = "1 GPU (launch.processes)" if processes == 1 else f"{processes} GPUs"
    return f"on {gpus} it needs {Need.of(config, machine)}"


def _disks(config: Config) -> Iterator[Finding]:
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free / GIB
        remedy = "" if free >= NEEDED_SHARED_GIB else "increase it: docker run --shm-size=8g"
        yield Finding("shared memory", f"{SHARED_MEMORY}, {free:.1f} GiB free", remedy)
    folder = config.run.output_dir.resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # it has no name
            free = shutil.disk_usage(existing).free / GIB
    except OSError as error:
        found = f"{existing}: cannot be written: {error.strerror}"
        yield Finding("output folder", found, "choose another with --output-dir")
        return
    remedy = "" if free >= NEEDED_DISK_GIB else "free some space or choose another --output-dir"
    yield Finding("output folder", f"{folder}, {free:.0f} GiB free", remedy)


def _server(subject: str, url: str, auth_string: str | None, variables: str) -> Finding:
    """Whether a server answers a request that may require "user:password"."""
    try:
        status = get(url, auth_string).status_code
    except UnreachableError as error:
        return Finding(subject, f"{url} does not answer: {error}", "start it, or unset its address")
    if status == HTTPStatus.UNAUTHORIZED:
        return Finding(subject, f"{url} answers 401: it requires a password", f"set {variables}")
    if status != HTTPStatus.OK:
        return Finding(subject, f"{url} answers {status}", "check its address and its log")
    return Finding(subject, f"{url} answers")


def _prefect(config: Config, secret: str | None) -> Finding:
    own = served(config).get("api_url")
    url = configured(API_URL) or own
    if url is None:
        return Finding("Prefect API", "not configured; each command starts its own")
    auth_string = secret if url == own else configured(AUTH_STRING)
    version = f"{url.rstrip('/')}/admin/version"
    return _server("Prefect API", version, auth_string, AUTH_STRING)


def _mlflow(config: Config, secret: str | None) -> Finding:
    if not config.tracking_uri.startswith("http"):
        return Finding("MLflow", config.tracking_uri)
    known = {**os.environ, **mlflow_client(secret, config.tracking_uri)}
    user, password = known.get("MLFLOW_TRACKING_USERNAME"), known.get("MLFLOW_TRACKING_PASSWORD")
    auth_string = f"{user}:{password}" if user and password else None
    version = f"{config.tracking_uri.rstrip('/')}/version"
    variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    return _server("MLflow", version, auth_string, variables)


def _servers(config: Config) -> Iterator[Finding]:
    try:
        secret = stored_secret(prefect_dir(config))
    except UserError as error:
        yield Finding("secret", str(error), "choose another --output-dir")
        return
    yield _prefect(config, secret)
    mlflow, is_set = _mlflow(config, secret), config.tracking.tracking_uri is not None
    source = "" if is_set or "MLFLOW_TRACKING_URI" not in os.environ else " (MLFLOW_TRACKING_URI)"
    experiment = config.tracking.experiment_name
    yield replace(mlflow, found=f"{mlflow.found}{source}; experiment {experiment}")


def examine(config: Config) -> list[Finding]:
    """Check versions, devices, disk and servers, without changing anything."""
    return [*_versions(), *_devices(), _training(config), *_disks(config), *_servers(config)]

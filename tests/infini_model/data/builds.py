"""Builds on machines that share nothing but an object store, and builds that are interrupted.

The latter are for processes of their own, which have little to import.
"""

import itertools
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainings import PRELOADED

from infini_model.config import Config, DataConfig, validate
from infini_model.data.build import Dataset, build_dataset, plan_dataset
from infini_model.data.datasets import Datasets
from infini_model.data.downloads import download_shards
from infini_model.data.engines import LocalEngine
from infini_model.data.lookup import finished_dataset
from infini_model.data.manifest import Manifest
from infini_model.data.sources.listing import list_sources
from infini_model.runtime.object_store import ObjectStore


@dataclass
class Machine:
    """A machine: its working folder, and the address of the datasets."""

    folder: Path
    address: str | None
    made: list[str] = field(default_factory=list)

    def config(self, data: DataConfig) -> Config:
        run = {"output_dir": self.folder, "data_dir": self.folder, "data_store": self.address}
        return validate({"run": run, "data": data.model_dump()})

    def build(self, data: DataConfig) -> Manifest:
        """Build a dataset; `made` then has the keys of the partitions that were made for it."""

        def engine(config, tokenizer):
            self._engine = LocalEngine(config, tokenizer)
            return self

        self.made = []
        listing = list_sources(data, self.folder, datasets_dir=self.folder)
        return build_dataset(
            listing, self.config(data).data, self.folder, store=self.address, make_engine=engine
        )

    def make(self, specs, datasets, advance):
        """Make partitions, as an engine does, and note their keys."""
        self.made = [spec.key for spec in specs]
        self._engine.make(specs, datasets, advance)

    def plan(self, data: DataConfig) -> Dataset:
        listing = list_sources(data, self.folder, datasets_dir=self.folder)
        return plan_dataset(listing, self.config(data))

    def finished(self, data: DataConfig) -> Dataset:
        return finished_dataset(self.config(data))

    def download(self, data: DataConfig) -> Path:
        """Download the shards of the dataset; returns its folder."""
        folder = self.finished(data).folder
        download_shards(folder)
        return folder


def _work_with(environment: Mapping[str, str], work: Callable[..., Any], *arguments: Any) -> Any:
    os.environ |= environment
    return work(*arguments)


def in_a_fork(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns in a new process, with this one's environment; raise what it raises.

    It is forked from the server of the trainings, which has imported most of what it needs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_work_with, dict(os.environ), work, *arguments).result()


def verify_dataset(folder: Path) -> Manifest | None:
    """The dataset in a folder, as whoever is about to use it finds it."""
    return Datasets(folder.parent).find(folder.name)


def killed_in_a_request(
    machine: Machine, task: str, data: DataConfig, method: str, calls: int
) -> None:
    """Build or download until this process is killed, after so many calls of a store's method."""
    plain, moments = getattr(ObjectStore, method), itertools.count()

    def die(*arguments, **named):
        if next(moments) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **named)

    setattr(ObjectStore, method, die)
    getattr(machine, task)(data)


def killed_in_an_access(data: DataConfig, output_dir: Path, moment: int) -> None:
    """Build until this process is killed, before its n-th access to the output folder."""
    moments = itertools.count()
    accesses = ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.symlink", "os.rmdir")

    def die(event, arguments):
        is_access = event in accesses and str(arguments[0]).startswith(str(output_dir))
        if is_access and next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    build_dataset(list_sources(data, output_dir), data, output_dir / "datasets")


def with_full_disk(data: DataConfig, output_dir: Path, limit: int) -> None:
    """Build where no file can have more than `limit` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    build_dataset(list_sources(data, output_dir), data, output_dir / "datasets")

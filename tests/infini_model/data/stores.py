"""Machines that share nothing but an object store."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infini_model.config import Config, DataConfig, validate
from infini_model.data.keeping.staging import staged_dataset
from infini_model.data.manifest import Manifest
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.shards.engine import LocalEngine
from infini_model.data.shards.plan import Plan, finished_dataset, plan_dataset
from infini_model.data.sources.download import download

PROGRAM = """
import json, logging, os, signal, sys
from pathlib import Path
from infini_model.config import validate
from infini_model.runtime.errors import UserError
from stores import Machine

logging.basicConfig(level=logging.INFO)
data, address, folder, task = sys.argv[1:5]
machine = Machine(Path(folder), address)
config = validate({"data": json.loads(data)}).data
try:
    {"build": machine.build, "stage": machine.stage}[task](config)
except (UserError, ConnectionError) as error:
    print(error)
    sys.exit(2)
"""


@dataclass
class Machine:
    """A machine: its working folder, and the address of the datasets."""

    folder: Path
    address: str
    made: list[str] = field(default_factory=list)

    def config(self, data: DataConfig) -> Config:
        """The configuration of a command on this machine."""
        run = {"output_dir": self.folder, "data_dir": self.folder, "data_store": self.address}
        return validate({"run": run, "data": data.model_dump()})

    def build(self, data: DataConfig) -> Manifest:
        """Build a dataset; `made` then has the keys of the partitions that were made for it."""

        def engine(config, tokenizer):
            local = LocalEngine(config, tokenizer)
            self._engine = local
            return self

        self.made = []
        config = self.config(data)
        listing = download(data, self.folder, datasets_dir=self.folder)
        return build_dataset(
            listing,
            config.data,
            self.folder,
            datasets_dir=self.folder,
            store=self.address,
            make_engine=engine,
        )

    def make(self, specs, store, advance):
        """Make partitions, as an engine does, and note their keys."""
        self.made = [spec.key for spec in specs]
        self._engine.make(specs, store, advance)

    def plan(self, data: DataConfig) -> Plan:
        """What there is to do."""
        listing = download(data, self.folder, datasets_dir=self.folder)
        return plan_dataset(listing, self.config(data))

    def finished(self, data: DataConfig) -> Plan:
        """The dataset to train on."""
        return finished_dataset(self.config(data))

    def stage(self, data: DataConfig) -> Path:
        """Copy the shards of the dataset; returns its folder."""
        with self.staged(data) as folder:
            return folder

    @contextlib.contextmanager
    def staged(self, data: DataConfig) -> Iterator[Path]:
        """The same, and use the copies while the block runs."""
        folder = self.finished(data).folder
        with staged_dataset(folder, data.cache_dir, data.cache_gigabytes):
            yield folder

    def start(self, data: DataConfig, task: str, before: str = "") -> subprocess.Popen:
        """The same in a process of its own, with `before` run first."""
        arguments = [data.model_dump_json(), self.address, str(self.folder), task]
        program = PROGRAM.replace("\ndata, address", f"\n{before}\ndata, address")
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )

"""A profile of a few steps: where their time and their memory go, as PyTorch records it.

`<run>/profile/` gets a trace of each rank, for https://ui.perfetto.dev or chrome://tracing, on a
GPU the history of its memory, for https://pytorch.org/memory_viz, and a table of the dearest
operators of rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from infini_model.config.training import ProfileConfig
from infini_model.runtime.errors import UserError
from infini_model.runtime.storage import atomic_file
from infini_model.training.callbacks import Callback, Status
from infini_model.training.setup import TrainingSetup

FOLDER = "profile"
OPERATORS = f"{FOLDER}/operators.txt"
# The ten dearest operators, and the step itself.
OPERATORS_SHOWN = 11
# Allocations that the history of the memory holds, the newest ones.
ALLOCATIONS = 1_000_000

log = logging.getLogger(__name__)


def profile_files(run_dir: Path) -> list[Path]:
    """The files of a run's profile, of all ranks whose machine has this folder."""
    return sorted((run_dir / FOLDER).glob("[!.]*"))


class Profiler(Callback):
    """Profiles the steps that `logging.profile` names, which take longer for it.

    The step before the first of them warms the profiler up.
    """

    def __init__(
        self, settings: ProfileConfig, setup: TrainingSetup, expect_long_work: Callable[[], None]
    ) -> None:
        self._first, self._count = settings.start, settings.steps
        self._setup, self._expect_long_work = setup, expect_long_work
        self._is_cuda = setup.world.device.type == "cuda"
        self._profile: profile | None = None
        # The newest step that has begun.
        self._step = 0

    def on_start(self, step: int) -> None:
        """Warn if it is too late for these steps."""
        if step + 1 >= self._first and self._setup.world.is_main:
            log.warning(
                "logging.profile: nothing is profiled, since the training resumes from step %d; "
                "set logging.profile.start to %d or more",
                *(step, step + 2),
            )

    def before_step(self, number: int) -> None:
        """Start before the step that warms up, and write after the last one."""
        if number == self._first + self._count:
            self._stop()
        elif number == self._first - 1:
            self._start()
        elif self._profile is not None:
            self._synchronize()
            self._profile.step()
        self._step = number

    def expect_long_work(self) -> None:
        """Write what there is before a validation or a checkpoint, which are no part of a step."""
        if self._step >= self._first:
            self._stop()

    def on_end(self, status: Status) -> None:  # noqa: ARG002
        """Write what there is if the training ends among these steps."""
        self._stop()

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._setup.world.device)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self._count, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._profile.start()

    def _stop(self) -> None:
        stopped, self._profile = self._profile, None
        if stopped is not None:
            self._expect_long_work()
            self._synchronize()
            stopped.stop()
            if self._is_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, found: profile) -> None:
        """Write the files of this rank; what cannot be written is a warning."""
        world, folder = self._setup.world, self._setup.run_dir / FOLDER
        try:
            with atomic_file(folder / f"rank-{world.rank}.json.gz") as temporary:
                # It compresses what is called so.
                packed = temporary.with_name(f"{temporary.name}.gz")
                found.export_chrome_trace(str(packed))
                packed.replace(temporary)
            if self._is_cuda:
                with atomic_file(folder / f"rank-{world.rank}-memory.pickle") as temporary:
                    torch.cuda.memory._dump_snapshot(str(temporary))  # type: ignore[no-untyped-call]
            if world.is_main:
                dearest = found.key_averages().table(
                    sort_by=f"self_{world.device.type}_time_total", row_limit=OPERATORS_SHOWN
                )
                with atomic_file(self._setup.run_dir / OPERATORS) as temporary:
                    title = f"Steps {self._first} to {self._step}, rank 0"
                    temporary.write_text(f"{title}\n{dearest}\n", encoding="utf-8")
                log.info("Profile of steps %d to %d: %s", self._first, self._step, folder)
        except (OSError, RuntimeError, UserError) as error:
            log.warning("cannot write the profile: %s", error)

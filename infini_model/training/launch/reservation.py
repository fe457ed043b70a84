"""Reserve the devices of a training: each GPU, or the CPU, trains one run at a time.

A training holds a lock file for each of its devices in the folder `devices/` of the output folder.
The kernel releases the locks when the holder ends, however it ends, so that no server is needed.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from infini_model.config import Config
from infini_model.runtime.errors import DeviceError
from infini_model.runtime.holders import Holder, hold, holder_of
from infini_model.runtime.storage import lock, make_folder, named_os_errors
from infini_model.training.launch.devices import Gpu, choose_gpus

POLL_SECONDS = 0.5
# Between two lines that say what a training waits for.
REPEAT_SECONDS = 60.0


def _slots(config: Config) -> tuple[dict[str, Gpu | None], int]:
    """The devices that the settings allow, the preferred first, and how many are needed.

    Each is named by its lock file; None is the CPU.
    """
    gpus, processes = choose_gpus(config.launch.gpus), config.launch.processes
    if not gpus:
        return {f"cpu-{socket.gethostname()}.lock": None}, 1
    needed = processes or len(gpus)
    if needed > len(gpus):
        raise DeviceError(f"launch.processes={needed}: only {len(gpus)} GPUs were chosen")
    # A list means its first GPUs; auto means any.
    allowed = gpus if config.launch.gpus == "auto" else gpus[:needed]
    return {f"gpu-{gpu.uuid.removeprefix('GPU-')}.lock": gpu for gpu in allowed}, needed


def _label(gpu: Gpu | None) -> str:
    return "the CPU" if gpu is None else f"GPU {gpu.identifier}"


@contextlib.contextmanager
def reserve(
    config: Config,
    run_dir: Path,
    *,
    on_line: Callable[[str], None],
    stop: Callable[[], Exception | None] = lambda: None,
) -> Iterator[list[Gpu]]:
    """Hold the devices of a training while the block runs; yields its GPUs, none on the CPU.

    Waits until all of them are free at the same time. Nodes of one training that run on the same
    machine share its devices. While waiting, `on_line` is called once a minute with a line that
    names the devices and who holds them, and `stop` is polled: what it returns is raised.

    Raises:
        DeviceError: A GPU that does not exist, or fewer GPUs than processes.
        UserError: The output folder or the run folder cannot be written.
    """
    slots, needed = _slots(config)
    wanted = ", ".join(map(_label, slots.values()))
    if needed < len(slots):
        wanted = f"{needed} of {len(slots)} GPUs"
    folder, holder = make_folder(config.run.output_dir / "devices"), Holder.current(run_dir)
    shared_with = holder.run if config.launch.num_nodes > 1 else None

    def take(stack: contextlib.ExitStack) -> tuple[list[Gpu | None], dict[str, Holder]]:
        """Acquire all needed slots, released by `stack`; or none, and say who holds which."""
        taken, others = [], dict[str, Holder]()
        # One training at a time: two that need each other's devices could both fail forever.
        with lock(folder / ".lock"), contextlib.ExitStack() as held:
            for file, gpu in slots.items():
                if not held.enter_context(hold(folder / file, holder)):
                    other = holder_of(folder / file) or Holder()
                    if other.run != shared_with:
                        others[_label(gpu)] = other
                        continue
                taken.append(gpu)
                if len(taken) == needed:
                    stack.enter_context(held.pop_all())
                    return taken, {}
        return [], others

    note, next_line = waiting_note(run_dir), 0.0
    with contextlib.ExitStack() as stack:
        try:
            while not (found := take(stack))[0]:
                if time.monotonic() >= next_line:
                    next_line = time.monotonic() + REPEAT_SECONDS
                    on_line(_note_waiting(note, wanted, found[1]))
                if reason := stop():
                    raise reason
                time.sleep(POLL_SECONDS)
        finally:
            with contextlib.suppress(OSError):
                note.unlink()
        yield [gpu for gpu in found[0] if gpu is not None]


def waiting_note(run_dir: Path) -> Path:
    """The file that says what a run waits for and who holds it; it exists while the run waits."""
    return run_dir / "logs" / "waiting"


def _note_waiting(note: Path, wanted: str, others: Mapping[str, Holder]) -> str:
    """Write the note of a run that waits; returns a line that says more."""
    runs = dict.fromkeys(Path(other.run).name or str(other) for other in others.values())
    make_folder(note.parent)
    with named_os_errors(note):
        note.write_text(f"Waiting for {wanted}, held by {', '.join(runs)}", encoding="utf-8")
    held = (f"{label} is held by {o}, which trains {o.run}" for label, o in others.items())
    return f"Waiting for {wanted}: {'; '.join(held)}"

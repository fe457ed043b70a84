"""The command `infini export`: the newest model of a run as a folder or a file, or on the hub."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from flows.runs import dataset_of, find_run_folder
from infini_model.config.locations import expanded, is_url
from infini_model.config.tree import RunConfig
from infini_model.data.manifest import read_manifest
from infini_model.data.sources.files import brief, hub_errors
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.evaluation.model_card import CURVE, Use, model_card
from infini_model.model.hf.adapter import is_adapter_folder, read_adapter
from infini_model.model.hf.config import model_type, read_config
from infini_model.runtime.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    UnreachableError,
    UserError,
)
from infini_model.runtime.runs import CHECKPOINTS, MODEL, newest_checkpoint
from infini_model.runtime.storage import TEMPORARY, atomic_file, make_folder, named_os_errors
from infini_model.runtime.stored_runs import refresh_run
from infini_model.training.checkpoint import read_state
from infini_model.training.export import CODE, check_target, export_model, is_exported
from infini_model.training.gguf import check_gguf, write_gguf

GGUF = ".gguf"


@dataclass(frozen=True)
class Form:
    """The form of an export: its format, and whether adapters are merged.

    `llama_cpp` is the folder of llama.cpp's sources, for GGUF.
    """

    format: Literal["huggingface", "remote-code", "gguf"]
    merge: bool = False
    llama_cpp: Path | None = None


@dataclass(frozen=True)
class _Model:
    """The newest checkpoint of a run, to be written in a form."""

    run_dir: Path
    dataset: Path
    checkpoint: Path
    step: int
    tokenizer: Tokenizer
    form: Form

    @property
    def title(self) -> str:
        """The checkpoint, for messages."""
        return f"step {self.step} of {self.run_dir.name}"

    @property
    def use(self) -> Use:
        """The way in which readers of the model card open the model."""
        if self.form.format == "gguf":
            return "gguf"
        folder = self.checkpoint / MODEL
        if is_adapter_folder(folder) and not self.form.merge:
            return "adapter"
        config = read_config(folder, {})
        if config.bidirectional:
            return "diffusion"
        return "plain" if model_type(config) != "infini_llama" else self.form.format

    def write_folder(self, folder: Path) -> None:
        """Write a folder as Hugging Face has them. Raises as `export_model` does."""
        form = self.form
        export_model(
            *(self.checkpoint, folder, self.tokenizer),
            merge=form.merge,
            with_code=form.format == "remote-code",
        )

    def write_gguf(self, file: Path) -> None:
        """Write a GGUF file. Raises as `export_model` and `write_gguf` do."""
        assert self.form.llama_cpp is not None  # noqa: S101 - `check_gguf` has found it
        with (
            atomic_file(file) as temporary,
            TemporaryDirectory(prefix=f"{TEMPORARY}{file.name}-", dir=file.parent) as staging,
        ):
            self.write_folder(Path(staging, MODEL))
            write_gguf(Path(staging, MODEL), temporary, self.form.llama_cpp)


def export_run(places: RunConfig, name: str | None, target: str, form: Form) -> list[str]:
    """Write a run to the folder, or the GGUF file, `target`; returns what to say about it.

    Raises `UserError` in one line if there is no such run, no checkpoint or no dataset, if the
    folder holds other files, or the model has no such form.
    """
    if is_url(target):
        raise UserError(f"--to: got {target!r}: takes a path of this machine")
    path = expanded(target).resolve()
    if form.format == "gguf":
        if path.suffix != GGUF or path.is_dir():
            raise UserError(f"--to: got {target!r}: --format gguf takes a file, such as model.gguf")
        model = _find(places, name, form)
        model.write_gguf(path)
        use = f'llama-cli -m {shlex.quote(str(path))} -p "Once upon a time"'
    else:
        check_target(path)
        model = _find(places, name, form)
        model.write_folder(path)
        use = f'infini generate --checkpoint {shlex.quote(str(path))} --prompt "Once upon a time"'
        if (path / CODE).is_file():
            use = "transformers opens it once it may run the code in it: docs/evaluate.md"
    return [f"Exported {model.title} to {path}", use]


def push_run(
    places: RunConfig,
    name: str | None,
    repository: str,
    form: Form,
    *,
    license_id: str,
    private: bool,
) -> list[str]:
    """Push a run to the hub in one commit, with a model card; returns what to say about it.

    A model that is there already is replaced, and other files stay.

    Raises `UserError` in one line as `export_run` does, if the run has no report, or the hub
    refuses it; `UnreachableError` if the hub does not answer.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    if repository.count("/") != 1:
        raise UserError(f"--push: got {repository!r}; takes OWNER/NAME")
    model, api = _find(places, name, form), HfApi()
    if model.use == "adapter" and Path(read_adapter(model.checkpoint / MODEL).base).is_dir():
        raise ConfigError("--push: the run has adapters of weights on this machine; add --merge")
    manifest = read_manifest(model.dataset)
    card = model_card(model.run_dir, model.step, manifest, repository, license_id, model.use)
    with TemporaryDirectory(prefix=TEMPORARY, dir=make_folder(places.output_dir)) as staging:
        files = _stage(model, card, Path(staging, MODEL))
        with _push_errors(f"--push {repository}"):
            url = api.create_repo(repository, private=private or None, exist_ok=True)
            before = [] if form.format == "gguf" else api.list_repo_files(repository)
            stale = [each for each in before if is_exported(each) and each not in files]
            additions = [CommitOperationAdd(each, str(path)) for each, path in files.items()]
            deletions = [CommitOperationDelete(each) for each in stale]
            api.create_commit(
                repository, [*additions, *deletions], commit_message=f"Push {model.title}"
            )
    return [f"Pushed {model.title} to {url}", "Its README.md is the model card; edit it there."]


def _stage(model: _Model, card: str, folder: Path) -> dict[str, Path]:
    """Write the files of a commit to a temporary folder; returns them by their names there."""
    if model.form.format == "gguf":
        model.write_gguf(folder / f"{model.run_dir.name}{GGUF}")
    else:
        model.write_folder(folder)
    with named_os_errors(folder):
        (folder / "README.md").write_text(card, encoding="utf-8")
        if (curve := model.run_dir / CURVE).is_file():
            make_folder((folder / CURVE).parent)
            shutil.copyfile(curve, folder / CURVE)
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.*"))}


@contextlib.contextmanager
def _push_errors(what: str) -> Iterator[None]:
    """Turn what `huggingface_hub` raises of an upload into one line that starts with `what`."""
    with hub_errors(what):
        try:
            yield
        except UserError:
            raise
        except RuntimeError as error:  # of a file, by what stopped it
            raise error.__cause__ or UnreachableError(f"{what}: {brief(error)}") from error
        except ValueError as error:  # of the metadata, or a quota
            raise DataError(f"{what}: {' '.join(str(error).split())}") from error


def _find(places: RunConfig, name: str | None, form: Form) -> _Model:
    """Find the newest checkpoint of a run, and check that it has this form."""
    run_dir = find_run_folder(places, name)
    refresh_run(run_dir, places.store, checkpoint=True)
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir / CHECKPOINTS}: no checkpoint found; train first")
    dataset = dataset_of(run_dir, places)
    tokenizer = load_dataset_tokenizer(dataset)
    if form.format == "gguf":
        check_gguf(checkpoint / MODEL, tokenizer, form.llama_cpp, merge=form.merge)
    return _Model(run_dir, dataset, checkpoint, read_state(checkpoint).step, tokenizer, form)

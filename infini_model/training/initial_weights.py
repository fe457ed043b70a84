"""Pretrained weights to begin a run from: found and checked before anything else is done.

The stage `weights` resolves `model.initial_weights`, a folder or a name on the hub. The run folder
keeps what it found as `initial_weights.json`, and the ranks look nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from infini_model.config import Config, ModelConfig
from infini_model.config.tree import MODEL_SPEC
from infini_model.data.manifest import TokenizerSample
from infini_model.runtime.errors import CheckpointError, ConfigError, DataError
from infini_model.runtime.records import Record, read_record, write_record
from infini_model.runtime.runs import INITIAL_WEIGHTS, weights_fingerprint
from infini_model.runtime.stage_protocol import OnProgress
from infini_model.runtime.storage import content_key
from infini_model.training.run_status import saved_step

if TYPE_CHECKING:
    from infini_model.training.distributed import World

ADVICE = "choose another run.name or folder"


class InitialWeights(Record):
    """The weights that `model.initial_weights` names.

    `commit` is that of the repository on the hub; None for a folder. `fingerprint` is that of the
    config.json and the safetensors files in `folder`, the same for a repository and a copy of it.
    `tokenizer`, what they were trained with, is None if their folder does not say.
    """

    name: str
    commit: str | None
    folder: Path
    fingerprint: str
    model: ModelConfig
    tokenizer: TokenizerSample | None = None

    def pinned_in(self, config: Config) -> Config:
        """`config` with the name at this commit, for the tokenizer that `spec: model` means."""
        at = "" if self.commit is None else f"@{self.commit}"
        return config.updated(model={"initial_weights": self.public_name + at})

    def shaped(self, config: Config) -> Config:
        """`config` with the shape of these weights, and what is set beside them."""
        return config.updated(model=self.model.updated(**config.model.beside_initial_weights))

    @property
    def public_name(self) -> str:
        """The repository on the hub, without a revision, or the folder."""
        return str(self.folder) if self.commit is None else self.name.partition("@")[0]


def find_initial_weights(config: Config, progress: OnProgress | None = None) -> InitialWeights:
    """Fetch and check `model.initial_weights`; of the weights only the headers are read.

    The files are read once for their checksums, which are kept. `progress(done, total)` counts the
    bytes of a download.

    Raises as `fetch_folder` does, `ConfigError` for weights that the settings do not fit,
    `CheckpointError` for those of another kind and for a tensor that is missing, misshapen or
    quantised, and `UserError` on a full disk.
    """
    # Imported late, as torch takes seconds to load and flows only need the record.
    from infini_model.data.tokenizers.load import tokenizer_of, why_none
    from infini_model.data.tokenizers.tokenizer import sample_of
    from infini_model.model.hf.adapter import is_adapter_folder
    from infini_model.model.llama import InfiniLlama

    name = config.model.initial_weights
    if name is None:
        raise ConfigError("model.initial_weights: is null, so there is nothing to begin from")
    folder, commit = fetch_folder(name, "model.initial_weights", progress)
    if is_adapter_folder(folder):
        raise ConfigError(
            f"model.initial_weights: {name} is a LoRA adapter; infini export --merge makes whole "
            "weights of it"
        )
    changes = config.model.beside_initial_weights
    if config.training.objective != "causal":
        changes |= {"bidirectional": True}
    model = InfiniLlama.check_pretrained(folder, **changes)
    if config.training.objective == "causal" and model.bidirectional:
        raise ConfigError(f"training.objective: causal, but {name} is bidirectional")
    if config.training.objective == "block_diffusion" and not model.has_past:
        raise ConfigError(f"model.memory: missing; {name} has none, and block_diffusion needs one")
    is_own = config.data.tokenizer.spec == MODEL_SPEC
    own = None
    if is_own or not config.model.ignore_tokenizer:
        own = tokenizer_of(folder, name, config.data.tokenizer.eos_token if is_own else None)
    if is_own and config.data.folder is None:
        entries = model.vocab_size or 0
        if own is None:
            raise ConfigError(f"data.tokenizer.spec: model, but {name} {why_none(folder)}")
        if own.vocab_size > entries:
            raise ConfigError(
                f"data.tokenizer.spec: the tokenizer of {name} has {own.vocab_size} tokens, "
                f"more than the {entries} of its embedding"
            )
    return InitialWeights(
        name=name,
        commit=commit,
        folder=folder.resolve(),
        fingerprint=_fingerprint(folder, config.run.datasets_dir),
        model=model,
        tokenizer=None if own is None else sample_of(own),
    )


def fetch_folder(
    name: str, key: str, progress: OnProgress | None = None
) -> tuple[Path, str | None]:
    """The folder of weights that `name`, the value of `key`, means, and its commit on the hub.

    Raises `ConfigError` that names `key` if it can only be a folder and is none, `DataError` if it
    is none and the hub refuses it, `UnreachableError` if the hub does not answer.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder, None
    if folder.exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"{key}: {name} is not a folder")
    from infini_model.data.sources.hub import fetch_weights, pin_repository

    repository, _, revision = name.partition("@")
    try:
        commit = pin_repository(repository, revision or None, "model")
        return fetch_weights(repository, commit, progress), commit
    except DataError as error:
        raise DataError(f"{key}: there is no folder {name}, and on the hub: {error}") from error


def _fingerprint(folder: Path, datasets_dir: Path) -> str:
    from infini_model.data.sources.files import fingerprint, local_files
    from infini_model.model.hf.config import CONFIG
    from infini_model.model.hf.weights import weight_files
    from infini_model.runtime.fact_cache import fact_cache

    paths = [folder / CONFIG, *weight_files(folder)]
    facts = fact_cache(datasets_dir)
    files = fingerprint(local_files(map(str, paths)), facts)
    facts.save()
    content = [[path.name, file.fingerprint] for path, file in zip(paths, files, strict=True)]
    return f"sha256:{content_key(content)}"


def check_frozen(weights: InitialWeights, config: Config) -> None:
    """Raise `CheckpointError` if the weights that a LoRA run does not save are gone or changed."""
    if not weights.folder.is_dir():
        raise CheckpointError(
            f"{weights.folder}: is gone; training.lora needs these weights of "
            f"model.initial_weights={weights.name} whenever the run resumes"
        )
    if _fingerprint(weights.folder, config.run.datasets_dir) != weights.fingerprint:
        raise CheckpointError(
            f"{weights.folder}: has other weights than those the run began with; {ADVICE}"
        )


def read_initial_weights(run_dir: Path) -> InitialWeights | None:
    """What a run began from; None for random weights. Raises `DataError` for a damaged record."""
    path = run_dir / INITIAL_WEIGHTS
    return read_record(path, InitialWeights) if path.is_file() else None


def record_initial_weights(run_dir: Path, weights: InitialWeights) -> None:
    """Write the record that the ranks of a run read.

    Raises `CheckpointError` if the run began from other weights.
    """
    before = weights_fingerprint(run_dir)
    has_begun = before is not None or saved_step(run_dir) is not None
    if has_begun and before != weights.fingerprint:
        raise CheckpointError(
            f"{run_dir}: the run began with {before or 'random weights'}, not with "
            f"model.initial_weights={weights.name} ({weights.fingerprint}); {ADVICE}"
        )
    write_record(run_dir / INITIAL_WEIGHTS, weights)


def weights_of_run(config: Config, run_dir: Path, world: World) -> InitialWeights | None:
    """The initial weights of a run, on every rank; rank 0 reads the record in the run folder.

    Raises `CheckpointError` if the record is missing or of other weights.
    """
    weights = world.broadcast(lambda: read_initial_weights(run_dir), InitialWeights)
    name, path = config.model.initial_weights, run_dir / INITIAL_WEIGHTS
    if weights is None and name is not None:
        raise CheckpointError(
            f"{path}: is missing; python -m infini_model weights --config FILE "
            f"--run-dir {run_dir} writes it"
        )
    if weights is not None and weights.name != name:
        raise CheckpointError(
            f"{path}: model.initial_weights is {weights.name!r}, not {name!r}; {ADVICE}"
        )
    return weights

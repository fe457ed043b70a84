"""The model card of a published run: its report, its data and its settings, as a README.md.

It names the files that the run was trained on without their folders, and quotes none of their text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import yaml

from infini_model.config import Config, HubSource
from infini_model.config.data import Source
from infini_model.data.manifest import Manifest
from infini_model.evaluation.pages import bullets
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.records import read_bytes
from infini_model.runtime.runs import REPORT, read_evaluation, read_run_config
from infini_model.training.initial_weights import read_initial_weights

# What opens a model: transformers as it is, what its format says, or this package alone.
Use = Literal["plain", "huggingface", "remote-code", "gguf", "adapter", "diffusion"]
# The library by which the hub says that a model opens.
LIBRARIES: dict[Use, str] = {
    "plain": "transformers",
    "remote-code": "transformers",
    "gguf": "gguf",
    "adapter": "peft",
}
CURVE = "plots/loss.png"


def model_card(
    run_dir: Path, step: int, manifest: Manifest, repository: str, license_id: str, use: Use
) -> str:
    """Return the README.md of a run's checkpoint of `step` on the hub, with its metadata.

    It shows the picture `CURVE` if the run has it.

    Raises `CheckpointError` if the run has no report of this checkpoint, `DataError` if a record of
    the run cannot be read.
    """
    from huggingface_hub import ModelCard, ModelCardData

    if read_evaluation(run_dir).get("step") != step:
        raise CheckpointError(
            f"{run_dir.name}: has no report of step {step}, from which the model card is made; "
            f"infini evaluate run.name={run_dir.name} writes it"
        )
    config, sections = read_run_config(run_dir), _sections(run_dir / REPORT)
    summary, *others = sections.get("Summary", "").split("\n\n")
    base = read_initial_weights(run_dir)
    sources = () if config.data.folder is not None else config.data.named_sources.values()
    on_hub = {each.repository for each in sources if isinstance(each, HubSource)}
    data = ModelCardData(
        license=license_id,
        library_name=LIBRARIES.get(use, "infini-model"),
        pipeline_tag="text-generation",
        tags=["infini-llama"],
        base_model=base.public_name if base is not None and base.commit else None,
        base_model_relation="adapter" if base is not None and use == "adapter" else None,
        datasets=sorted(on_hub) or None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_suffix(".md")),
        name=repository.partition("/")[2],
        repository=repository,
        use=use,
        summary=summary,
        metrics=next((each for each in others if each.startswith("| Metric |")), ""),
        curve=CURVE if (run_dir / CURVE).is_file() else None,
        data=_data(config, manifest),
        model=sections.get("Model and training", ""),
        settings=_settings(config),
    )
    return str(card)


def _sections(report: Path) -> dict[str, str]:
    """Read the sections of a report by title; a title that a sample repeats is the first one's."""
    _, *parts = re.split(r"^## ", read_bytes(report).decode(), flags=re.MULTILINE)
    titled = (part.partition("\n\n") for part in reversed(parts))
    return {title: text.rstrip() for title, _, text in titled}


def _data(config: Config, manifest: Manifest) -> str:
    """Return the size of the dataset, and its sources unless it was not made by this run."""
    text = (
        f"{manifest.corpus.documents:,} documents, {manifest.tokens:,} tokens of a vocabulary of "
        f"{manifest.tokenizer.vocab_size:,}"
    )
    if config.data.folder is not None:
        return f"{text}."
    named = config.data.named_sources.items()
    sources = [f"{name}: {_source(each)}" if name else _source(each) for name, each in named]
    return f"{text}:\n\n{bullets(sources)}"


def _source(source: Source) -> str:
    if isinstance(source, HubSource):
        page = f"https://huggingface.co/datasets/{source.repository}"
        parts = filter(None, (source.configuration, source.split, source.revision))
        return f"[{source.repository}]({page}) ({', '.join(parts)})"
    return f"files {', '.join(f'`{_public(path)}`' for path in source.paths)}"


def _public(path: str) -> str:
    """Return a page of the web without its query, which may be secret; else the name alone."""
    url = urlsplit(path)
    return (
        f"{url.scheme}://{url.hostname}{url.path}" if url.scheme[:4] == "http" else Path(path).name
    )


def _settings(config: Config) -> str:
    tree = config.model_dump(mode="json", include={"packing", "training"})
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)).rstrip()

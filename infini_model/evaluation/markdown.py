"""The words of a report, in Markdown."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from infini_model.config import Config
from infini_model.data.manifest import Manifest
from infini_model.evaluation.sample import Sample
from infini_model.evaluation.score import Score
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.metrics_file import Line
from infini_model.training.checkpoints.checkpoint import Position

# The share of a step that may be waiting for data.
MOST_WAITING = 0.01
CAPTIONS = {
    "loss": "Loss of training and validation",
    "learning_rate": "Learning rate",
    "gradient_norm": "Norm of the gradient before it is clipped",
    "throughput": "Tokens per second, and the share of a step that waits for data",
    "loss_by_segment": "Loss by segment of the window",
}


def fenced(text: str) -> str:
    """`text` as a code block that nothing in it can close.

    Control characters, which could reach a terminal, become U+FFFD.
    """
    text = text.replace("\r\n", "\n")
    text = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its first column to the left and the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def model_section(
    model: InfiniLlama, config: Config, manifest: Manifest, position: Position
) -> str:
    """What was trained, on what, and for how long."""
    shape = model.config
    parameters = sum(p.numel() for p in model.parameters())
    own = sum(
        p.numel()
        for name, p in model.named_parameters()
        if name.endswith(("gate", "memory_key_shift"))
    )
    context = config.packing.context_length
    memory = {"none": "none (segments are apart)"}.get(
        shape.memory, f"{shape.memory}{', keys shifted' if shape.memory_key_shift else ''}"
    )
    dataset = f"`{manifest.name}`, key `{manifest.key[:16]}`, {manifest.tokens:,} tokens"
    if position.dataset_key != manifest.key:
        dataset += f" (trained on another, key `{position.dataset_key[:16]}`)"
    rows = [
        ("Parameters", f"{parameters:,}, of which {own:,} are the memory's gates and key shifts"),
        (
            "Shape",
            f"{shape.num_hidden_layers} layers of width {shape.hidden_size}, "
            f"{shape.num_attention_heads} query and {shape.key_value_heads} key-value heads, "
            f"feed-forward {shape.intermediate_size}, vocabulary {shape.vocab_size:,}",
        ),
        (
            "Context",
            f"{context:,} tokens in {context // shape.segment_length} segments of "
            f"{shape.segment_length:,}",
        ),
        ("Memory", memory),
        ("Dataset", dataset),
        ("Steps", f"{position.step:,} of {position.last_step(config):,}"),
        ("Tokens read", f"{position.consumed * context:,}"),
        ("Seed", str(position.seed)),
    ]
    return table(("What was trained", ""), rows).replace("---:", "---")


def scores_section(scores: dict[str, Score], without_memory: Score | None, *, whole: bool) -> str:
    """Loss and perplexity of the splits, and what the memory adds to them."""
    rows, notes = [], []
    for split, scored in scores.items():
        if scored.loss is None or scored.perplexity is None:
            rows.append((split, "–", "–", "0", "0"))
            notes.append(f"The {split} split has no whole window, so it has no score.")
            continue
        rows.append(
            (
                split,
                f"{scored.loss:.4f}",
                f"{scored.perplexity:,.3f}",
                f"{scored.tokens:,}",
                f"{scored.windows:,}",
            )
        )
    text = table(("Split", "Loss (nats per token)", "Perplexity", "Tokens", "Windows"), rows)
    if not whole:
        notes.append("`evaluation.max_batches` limits the scores to the first windows of a split.")
    compared = next((scored for scored in scores.values() if scored.loss is not None), None)
    if without_memory is not None and without_memory.loss is not None and compared is not None:
        notes.append(_memory_note(compared, without_memory))
    return "\n\n".join([text, *notes])


def _memory_note(compared: Score, without: Score) -> str:
    """The loss past the first segment, with the memory and with it emptied."""
    difference = (without.loss or 0.0) - (compared.loss or 0.0)
    word = "lower" if difference >= 0 else "higher"
    return (
        f"With the memory the loss is {abs(difference):.4f} {word} than with the same weights and "
        f"the memory emptied at every segment border ({without.loss:.4f}). The first segment has "
        "no memory to read; the picture of the loss by segment shows the others."
    )


def sample_section(sample: Sample | None) -> str:
    """Prompt, continuation and original."""
    if sample is None:
        return "There is no held-out document to continue."
    parts = [
        f"Document {sample.document} of the {sample.split} split; the model saw its first "
        f"{sample.prompt_tokens:,} tokens:",
        fenced(sample.prompt),
        "It went on:",
        fenced(sample.continuation) if sample.continuation else "(it ended the document)",
        "The document goes on:",
        fenced(sample.original) if sample.original else "(it ends here)",
    ]
    return "\n\n".join(parts)


def reproduce_section(run_dir: Path) -> str:
    """The commands that make this again."""
    config = shlex.quote(str(run_dir / "config.yaml"))
    name = shlex.quote(run_dir.name)
    return (
        "```sh\n"
        f"infini run --config {config} run.name={name}-again  # the same run once more\n"
        f"infini evaluate --config {config} run.name={name}  # this report once more\n"
        "```"
    )


def speed_section(lines: Sequence[Line]) -> str:
    """How fast the steps were, and whether the data kept up with them."""
    timed = [line for line in lines if line.get("train/step_seconds", 0.0) > 0.0]
    if not timed:
        return "No step was timed."
    rate = statistics.median(line["train/tokens_per_second"] for line in timed)
    waited = sum(line.get("train/data_wait_seconds", 0.0) for line in timed)
    share = waited / sum(line["train/step_seconds"] for line in timed)
    told = f"{rate:,.0f} tokens a second; {share:.2%} of the steps' time was waiting for data."
    if share <= MOST_WAITING:
        return told
    return (
        f"{told} That is over {MOST_WAITING:.0%}: put the dataset folder on a disk of this "
        "machine, leave memory free for the system to keep the shards in, and cores for the loader."
    )


def pictures_section(pictures: Sequence[Path], run_dir: Path) -> str:
    """The plots by paths relative to the report."""
    return "\n\n".join(
        f"![{CAPTIONS[path.stem]}]({path.relative_to(run_dir).as_posix()})" for path in pictures
    )

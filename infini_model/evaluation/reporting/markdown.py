"""Markdown helpers, and the sections of a report that do not come from a task."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from infini_model.evaluation.subject import Subject
from infini_model.model.layers import MEMORY_PARAMETERS
from infini_model.runtime.metrics_file import Line

# Acceptable share of a step spent waiting for data.
MAX_WAIT_SHARE = 0.01


def fenced(text: str) -> str:
    """`text` as a code block whose fence is longer than any in the text.

    Control characters, which a terminal might interpret, become U+FFFD.
    """
    text = text.replace("\r\n", "\n")
    text = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its first column left-aligned and the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def model_section(subject: Subject) -> str:
    """A table of the model, its dataset and the length of its training."""
    model, config, manifest = subject.model, subject.config, subject.manifest
    position, shape = subject.position, subject.model.config
    parameters = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for name, p in model.named_parameters() if name.endswith(MEMORY_PARAMETERS))
    counts = f"{parameters:,}, including {own:,} of the memory"
    if model.lora is not None:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        counts += f"; {trained:,} are trained by LoRA, the others frozen"
    context = config.packing.context_length
    shifts = {"keys": shape.memory_key_shift, "queries": shape.memory_query_shift}
    memory = ", ".join(
        [shape.memory, *(f"{name} shifted" for name, is_on in shifts.items() if is_on)]
    )
    if shape.memory == "none":
        memory = "none (segments are independent)"
    sees_all = shape.bidirectional and shape.memory == "none"
    segments = (
        f"{context:,} tokens in {context // shape.segment_length} segments of "
        f"{shape.segment_length:,}"
    )
    dataset = f"`{manifest.name}`, key `{manifest.key[:16]}`, {manifest.tokens:,} tokens"
    if position.dataset_key != manifest.key:
        dataset += f" (trained on a different one, key `{position.dataset_key[:16]}`)"
    rows = [
        ("Parameters", counts),
        (
            "Shape",
            f"{shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, "
            f"{shape.num_attention_heads} query and {shape.key_value_heads} key-value heads, "
            f"feed-forward {shape.intermediate_size}, vocabulary {shape.vocab_size:,}",
        ),
        ("Objective", config.training.objective),
        ("Context", f"{context:,} tokens, seen as a whole" if sees_all else segments),
        ("Memory", "none" if sees_all else memory),
        ("Dataset", dataset),
        ("Steps", f"{position.step:,} of {subject.last_step:,}"),
        ("Tokens read", f"{position.samples_seen * context:,}"),
        ("Seed", str(position.seed)),
    ]
    return table(("", ""), rows).replace("---:", "---")


def reproduce_section(run_dir: Path) -> str:
    """The commands that reproduce the run and the report."""
    config = shlex.quote(str(run_dir / "config.yaml"))
    name = shlex.quote(run_dir.name)
    return (
        "```sh\n"
        f"infini run --config {config} run.name={name}-again  # repeat the run\n"
        f"infini evaluate --config {config} run.name={name}  # repeat this report\n"
        "```"
    )


def speed_section(lines: Sequence[Line]) -> str:
    """Training throughput, and whether data loading kept up."""
    timed = [line for line in lines if line.get("train/step_seconds", 0.0) > 0.0]
    if not timed:
        return "No steps were timed."
    rate = statistics.median(line["train/tokens_per_second"] for line in timed)
    waited = sum(line.get("train/data_wait_seconds", 0.0) for line in timed)
    share = waited / sum(line["train/step_seconds"] for line in timed)
    summary = f"{rate:,.0f} tokens per second; {share:.2%} of step time was spent waiting for data."
    if share <= MAX_WAIT_SHARE:
        return summary
    return (
        f"{summary} That is over {MAX_WAIT_SHARE:.0%}: put the dataset folder on a local disk, "
        "and leave memory free for the page cache and CPU cores free for the loader."
    )


def picture(caption: str, path: Path, run_dir: Path) -> str:
    """A Markdown image, with its path relative to the report."""
    return f"![{caption}]({path.relative_to(run_dir).as_posix()})"

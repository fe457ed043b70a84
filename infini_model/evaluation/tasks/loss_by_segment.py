"""Loss by segment of the window, with the memory and with it emptied before every segment."""

from __future__ import annotations

from infini_model.data.manifest import Split
from infini_model.evaluation.plots import plot_segments
from infini_model.evaluation.score import Score
from infini_model.evaluation.subject import HELD_OUT, Pass, Subject
from infini_model.evaluation.tasks.task import Picture, TaskResult


class Task:
    """How the loss falls along the window, and how much of that is due to the memory."""

    title = "Loss by segment"

    def scores(self, subject: Subject) -> set[Pass]:
        """Both splits, and one of them again with an empty memory."""
        split = _compared(subject)
        again = {Pass(split, empty_memory=True)} if split else set()
        return {Pass(each) for each in HELD_OUT} | again

    def run(self, subject: Subject) -> TaskResult:
        """Score the splits, then one of them again with an empty memory."""
        scored = {split: subject.score(split) for split in HELD_OUT if subject.sample_size(split)}
        if not scored:
            return TaskResult(section="There are no windows to score.")
        compared = _compared(subject)
        emptied: dict[str, Score] = {}
        if compared:
            emptied[str(compared)] = subject.score(compared, empty_memory=True)
        curves = {str(split): score for split, score in scored.items()}
        path = plot_segments(
            curves,
            emptied,
            subject.model.config.segment_length,
            subject.plots_dir / "loss_by_segment.png",
        )
        metrics, section = {}, "The model has no memory, or the window has only one segment."
        for split, without in emptied.items():
            if (loss := curves[split].loss) is None or without.loss is None:
                continue
            metrics[f"evaluation/{split}_loss_without_memory"] = without.loss
            section = _memory_note(loss, without.loss)
        return TaskResult(
            metrics=metrics,
            section=section,
            pictures=[Picture(path=path, caption="Loss by segment of the window")],
            details={
                "with_memory": {split: score.model_dump() for split, score in curves.items()},
                "memory_emptied": {split: score.model_dump() for split, score in emptied.items()},
            },
        )


def _compared(subject: Subject) -> Split | None:
    """The split to score with an empty memory; None if that makes no difference."""
    one_segment = subject.config.packing.context_length == subject.model.config.segment_length
    if subject.model.config.memory == "none" or one_segment:
        return None
    return next((split for split in HELD_OUT if subject.sample_size(split)), None)


def _memory_note(loss: float, without: float) -> str:
    difference = without - loss
    word = "lower" if difference >= 0 else "higher"
    return (
        f"With the memory the loss is {abs(difference):.4f} {word} than with the memory emptied "
        f"before every segment ({without:.4f}), with the same weights. The first segment has "
        "no memory to read; the plot shows the effect on the later ones."
    )

"""Loss and perplexity on the held-out splits."""

from __future__ import annotations

from infini_model.evaluation.context import HELD_OUT, EvalContext, Pass, Score
from infini_model.evaluation.pages import table
from infini_model.evaluation.task import EvaluationTask, TaskResult


class Loss(EvaluationTask):
    """The mean loss over the targets of each split, and its perplexity."""

    title = "Scores"

    def work(self, context: EvalContext) -> dict[Pass | str, int]:
        return {Pass(split): context.sample_size(split) for split in HELD_OUT}

    def run(self, context: EvalContext) -> TaskResult:
        metrics, rows, notes, summary = {}, list[tuple[str, ...]](), [], []
        for split in HELD_OUT:
            score = context.score(split)
            if score.loss is None or score.perplexity is None:
                rows.append((split, "–", "–", "–", "0", "0"))
                notes.append(
                    f"The {split} split is too small for one window and was not scored; more "
                    f"documents, a larger `data.splits.{split}` or a smaller "
                    "`packing.context_length` help."
                )
                continue
            for name, part in {"": score, **score.by_source}.items():
                if part.loss is None or part.perplexity is None:
                    continue
                place = f"evaluation/{name}/{split}" if name else f"evaluation/{split}"
                metrics[f"{place}_loss"] = part.loss
                metrics[f"{place}_perplexity"] = part.perplexity
                if part.bits_per_byte is not None:
                    metrics[f"{place}_bits_per_byte"] = part.bits_per_byte
                numbers = (f"{part.loss:.4f}", f"{part.perplexity:,.3f}", _bits(part))
                title = f"{split}: {name}" if name else split
                rows.append((title, *numbers, f"{part.tokens:,}", f"{part.windows:,}"))
            summary.append(
                f"On the {split} split the loss is **{score.loss:.4f} nats per token**, a "
                f"perplexity of {score.perplexity:,.3f}, {_bits(score)} bits per byte."
            )
        if context.config.training.objective != "causal":
            notes.append(
                "The loss bounds the negative log-likelihood from above; each window is scored "
                "with one draw of the noise, the same in every report."
            )
        if context.manifest.conversations:
            notes.append("Of conversations only the tokens that are learned are scored.")
        limit = context.config.evaluation.max_windows
        if limit is not None:
            notes.append(
                f"`evaluation.max_windows` limits the scores to a fixed sample of {limit:,} "
                "windows per split, the same as for validation during training."
            )
        numbers = ("Loss (nats per token)", "Perplexity", "Bits per byte")
        header = ("Split", *numbers, "Tokens", "Windows")
        return TaskResult(
            metrics=metrics,
            section="\n\n".join([table(header, rows), *notes]),
            summary=summary,
        )


def _bits(score: Score) -> str:
    return "–" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"

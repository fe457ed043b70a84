"""The report of a model that was trained on prompts and answers."""

import pytest
from curves import curve

from infini_model.data.loading.windows import open_windows
from infini_model.data.shards.stream import open_split
from infini_model.evaluation.reporting.report import evaluate_run
from infini_model.training.loop import train


@pytest.mark.parametrize("objective", ["causal", "masked_diffusion"])
def test_the_report_scores_answers_and_answers_a_prompt(
    pairs, make_pairs_config, tmp_path, objective
):
    run_dir, config = tmp_path / "run", make_pairs_config(objective)
    train(config, pairs, run_dir)
    result = evaluate_run(run_dir, pairs, config)
    score, sample = (result.tasks[task].details for task in ("loss", "sample"))
    windows = open_windows(pairs, "validation", config.packing, 64)
    assert score["validation"]["tokens"] == score["validation"]["windows"] == len(windows)
    logged = curve(run_dir, "validation/loss")[12]
    assert score["validation"]["loss"] == pytest.approx(logged, abs=1e-6)
    report = (run_dir / "report.md").read_text()
    assert "| Answers |" in report
    why = "are prompts and answers" if objective == "causal" else "sees a window as a whole"
    assert why in result.tasks["loss_by_position"].section
    # Answers of the first segment have nothing to remember, those of later ones do.
    is_compared = "evaluation/validation_loss_without_memory" in result.metrics
    assert is_compared == (objective == "causal")
    stream = open_split(pairs, sample["split"])
    document = stream.document(sample["document"])[:-1].tobytes().decode()
    assert document == sample["prompt"] + sample["original"]
    assert sample["prompt"].endswith(("?", "assistant:\n"))

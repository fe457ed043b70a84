"""A small fake run: dataset, checkpoints and metrics written by the project's own code."""

import hashlib
import json

import torch

from infini_model.config import load_config
from infini_model.data.build import build_dataset
from infini_model.data.sources.listing import list_sources
from infini_model.evaluation.context import CheckpointContext
from infini_model.evaluation.report import evaluate_run
from infini_model.evaluation.tasks import load_task
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import resolve_precision
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.training.checkpoint import HostCopy, TrainerState, save_checkpoint
from infini_model.training.distributed import World

WORLD = World(0, 1, torch.device("cpu"))
TEXT = "the memory of a segment is what the next one reads and `more` ```of``` it"
WORDS = TEXT.split(" ")


def document(number):
    generator = torch.Generator().manual_seed(number)
    picks = torch.randint(len(WORDS), (12 + number,), generator=generator)
    return " ".join(WORDS[i] for i in picks) + f" {number}.\n"


def settings(root, **overrides):
    dotted = {
        "data.source.paths": [str(root / "texts" / "*.txt")],
        "packing.context_length": 32,
        "model.segment_length": 8,
        "model.hidden_size": 16,
        "model.intermediate_size": 24,
        "model.vocab_size": 256,
        "launch.gpus": "cpu",
        "training.batch_size": 2,
        "training.max_steps": 40,
        "evaluation.batch_size": 3,
        "evaluation.sample.prompt_tokens": 20,
        "evaluation.sample.max_new_tokens": 15,
        "data.splits": {"train": 0.4, "validation": 0.3, "test": 0.3},
        "run.output_dir": str(root / "outputs"),
    } | overrides
    return load_config(overrides=[f"{key}={json.dumps(value)}" for key, value in dotted.items()])


def make_dataset(root, config):
    (root / "texts").mkdir(exist_ok=True)
    for number in range(30):
        (root / "texts" / f"{number}.txt").write_text(document(number))
    corpus = list_sources(config.data, config.run.output_dir)
    return (
        config.run.datasets_dir
        / build_dataset(corpus, config.data, config.run.datasets_dir).folder_name
    )


def make_run(run_dir, config, steps=(20, 40), std=0.3):
    torch.manual_seed(0)
    model = InfiniLlama(config.model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in steps:
        for parameter in model.parameters():  # each checkpoint is another model
            torch.nn.init.normal_(parameter, std=std)
        settings = config.model_dump(mode="json")
        precision = resolve_precision(config.training.precision, WORLD.device).name
        position = TrainerState(
            step=step,
            windows_read=2 * step,
            seed=0,
            world_size=1,
            dataset_key="k" * 64,
            config=settings,
            precision=precision,
            global_batch=2,
        )
        save_checkpoint(run_dir, HostCopy(WORLD).take(model, optimizer), position, keep=2)
    metrics = MetricsFile(run_dir, None)
    for step in range(41):  # enough for a moving mean
        values = {
            "train/loss": 5.0 - step / 20,
            "train/learning_rate": 1e-3 * (1 - step / 80),
            "train/grad_norm": 2.0 / (step + 1),
            "train/tokens_per_second": 9000.0 + step,
            "train/step_seconds": 0.1,
            "train/data_wait_seconds": 0.002,
        }
        metrics.append(
            step, values | ({"validation/loss": 5.1 - step / 20} if step % 20 == 0 else {})
        )
    metrics.close()
    return model


class Made:
    """A dataset and a run in the folder `root`, evaluated with different settings.

    Tests share it and do not change its files.
    """

    def __init__(self, root, steps=(40,), **own):
        self.root, self.own, self.steps = root, own, steps
        self.dataset = make_dataset(root, self.config())
        self.run_dir = self.run(root / "outputs" / "runs" / "first", self.config())

    def config(self, **overrides):
        return settings(self.root, **self.own | overrides)

    def run(self, run_dir, config):
        if not run_dir.exists():
            make_run(run_dir, config, self.steps)
        return run_dir

    def context(self, **overrides):
        """Of the run, or of one with another model."""
        config, run_dir = self.config(**overrides), self.run_dir
        if config.model != self.config().model:
            name = hashlib.sha256(config.model.model_dump_json().encode()).hexdigest()
            run_dir = self.run(self.root / name, config)
        return CheckpointContext(run_dir, self.dataset, config)

    def result(self, task, **overrides):
        return load_task(task).run(self.context(**overrides))

    def evaluated(self, **overrides):
        """The result, and the progress that was reported."""
        config, seen = self.config(**overrides), []
        result = evaluate_run(
            self.run_dir, self.dataset, config, progress=lambda *pair: seen.append(pair)
        )
        return result, seen

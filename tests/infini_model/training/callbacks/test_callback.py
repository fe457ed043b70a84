"""What a callback of somebody else's sees of a training, and what it cannot change."""

import os
import signal
import threading

import pytest
from curves import curve

from infini_model.runtime.errors import NonFiniteError
from infini_model.training.callbacks.callback import Callback
from infini_model.training.checkpoints.checkpoint import newest_checkpoint
from infini_model.training.loop import train
from infini_model.training.parallel.distributed import World


class Witness(Callback):
    """Notes the hooks; does something at the end of a step, if told to."""

    def __init__(self, at=None, act=None):
        self.events, self.pauses, self.at, self.act = [], 0, at, act

    def on_start(self, step):
        self.events.append(("start", step))

    def before_step(self):
        self.events.append(("before step",))

    def after_gradients(self):
        self.events.append(("gradients",))

    def after_backward(self, step):
        assert step.is_finite
        self.events.append(("backward", step.number))

    def on_non_finite(self, step):
        assert not step.is_finite
        self.events.append(("not finite", step.number))

    def metrics(self, step, seconds):
        assert seconds > 0
        return {"mine/double": 2.0 * step.number}

    def after_step(self, step, metrics):
        assert metrics["mine/double"] == 2.0 * step.number
        assert metrics["train/loss"] == step.loss
        self.events.append(("step", step.number))
        if step.number == self.at:
            self.act()

    def before_pause(self):
        self.pauses += 1

    def evaluation_metrics(self, evaluation):
        return {f"mine/{evaluation.split}": evaluation.loss}

    def after_evaluation(self, evaluation, metrics):
        split = evaluation.split
        assert metrics[f"mine/{split}"] == metrics[f"{split}/loss"] == evaluation.loss > 0
        self.events.append((split, evaluation.step))

    def after_checkpoint(self, step, seconds):
        self.events.append(("checkpoint", step))

    def on_end(self, status):
        self.events.append(("end", status))


def test_the_hooks_tell_the_story_of_the_training(dataset, make_config, tmp_path, monkeypatch):
    witness, add_up = Witness(), World.sum

    def spy(world, values):
        witness.events.append(("sum",))
        return add_up(world, values)

    monkeypatch.setattr(World, "sum", spy)
    train(make_config(), dataset, tmp_path / "run", [witness])
    expected = [("start", 0), ("validation", 0)]
    for step in range(1, 13):
        expected += [("before step",), ("gradients",), ("backward", step), ("step", step)]
        expected += [("checkpoint", step)] if step % 4 == 0 else []
        expected += [("validation", step)] if step in (5, 10, 12) else []
    expected += [("test", 12), ("end", "FINISHED")]
    assert [event for event in witness.events if event != ("sum",)] == expected
    assert witness.pauses > 0
    assert curve(tmp_path / "run", "mine/double") == {step: 2.0 * step for step in range(1, 13)}
    # Gradients are announced before a rank waits for the loss of the others: so heartbeats tell
    # which rank of a hang is behind. The first sum is of the targets, by which they are scaled.
    first = witness.events.index(("before step",))
    assert witness.events[first : first + 5] == [
        ("before step",),
        ("sum",),
        ("gradients",),
        ("sum",),
        ("backward", 1),
    ]


def test_it_hears_that_the_training_was_stopped(dataset, make_config, tmp_path):
    stop = Witness(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    train(make_config(), dataset, tmp_path / "stopped", [stop])
    assert stop.events[-1] == ("end", "KILLED")
    # The signal is shared with the next step, which is saved.
    assert newest_checkpoint(tmp_path / "stopped").name == "step-4"


def test_a_step_that_is_not_finite_ends_it_before_the_weights_change(
    dataset, make_config, tmp_path
):
    witness = Witness()
    config = make_config(training={"learning_rate": 1e30})
    with pytest.raises(NonFiniteError):
        train(config, dataset, tmp_path / "run", [witness])
    step = witness.events.count(("before step",))
    assert witness.events[-3:] == [("gradients",), ("not finite", step), ("end", "FAILED")]


def test_one_that_fails_at_the_end_keeps_no_other_from_ending(
    dataset, make_config, tmp_path, caplog
):
    class Failing(Callback):
        def after_evaluation(self, evaluation, metrics):
            raise OSError("no evaluation")

        def on_end(self, status):
            raise OSError("no end")

    witness = Witness()
    with pytest.raises(OSError, match="no evaluation"):
        train(make_config(), dataset, tmp_path / "run", [Failing(), witness])
    assert witness.events[-1] == ("end", "FAILED")
    assert "Failing failed at the end of the training" in caplog.text
    threads = {thread.name for thread in threading.enumerate()}
    assert not {name for name in threads if name.startswith(("loader", "checkpoint"))}

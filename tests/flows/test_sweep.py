"""What a sweep runs: all combinations, each with a name of its own."""

import pytest

from flows.presets import configure
from flows.sweep import runs_of, values_of
from infini_model.config import Config
from infini_model.runtime.errors import ConfigError


def swept(*texts: str, overrides: tuple[str, ...] = ()) -> list[Config]:
    """The runs of a sweep over the preset debug."""
    return runs_of(
        configure(["debug"], overrides=[*overrides, {"comparison": {"sweep": [*texts]}}])
    )


def test_all_combinations_are_run_and_the_first_key_varies_slowest() -> None:
    runs = swept("model.memory=linear,none", "run.seed=0,1", overrides=("training.max_steps=7",))
    assert [(run.model.memory, run.run.seed) for run in runs] == [
        *(("linear", 0), ("linear", 1)),
        *(("none", 0), ("none", 1)),
    ]
    assert [run.run.name for run in runs] == [
        *("debug-memory-linear-seed-0", "debug-memory-linear-seed-1"),
        *("debug-memory-none-seed-0", "debug-memory-none-seed-1"),
    ]
    alone = configure(["debug"], overrides=["training.max_steps=7", "run.seed=1"])
    named = alone.run.model_copy(update={"name": "debug-memory-linear-seed-1"})
    assert runs[1] == alone.model_copy(update={"run": named})


def test_a_name_is_the_beginning_of_all_names() -> None:
    runs = swept("training.learning_rate=1e-3,3e-4", overrides=("run.name=rates",))
    assert [run.run.name for run in runs] == [
        "rates-learning_rate-1e-3",
        "rates-learning_rate-3e-4",
    ]
    assert [run.training.learning_rate for run in runs] == [1e-3, 3e-4]


def test_values_that_a_name_cannot_hold_apart_are_numbered() -> None:
    names = [str(run.run.name) for run in swept("data.tokenizer.spec=team/a,team-a")]
    assert names == ["debug-spec-team-a-1", "debug-spec-team-a-2"]


def test_steps_take_the_place_of_epochs() -> None:
    runs = swept("training.epochs=1,2")
    assert [(run.training.epochs, run.training.max_steps) for run in runs] == [(1, None), (2, None)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1,2", [1, 2]),
        ("a=x", ["x"]),
        ("a=[1,2],[3]", [[1, 2], [3]]),
        ("a=null,{r: 8, alpha: 16}", [None, {"r": 8, "alpha": 16}]),
        ('a="0,3",1', ["0,3", 1]),
        ("a=", []),
        ("a", []),
        ("a=[1", []),
    ],
)
def test_commas_part_values_and_brackets_and_quotes_keep_them_together(
    text: str, values: list[object]
) -> None:
    assert values_of(text) == values


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["model.memory"], "is not of the form section.key=value"),
        (["run.seed="], r"run.seed: got ''"),
        (["training.warmup_step=1,2"], r"training.warmup_step: unknown key; did you mean"),
        (["comparison.runs=[a],[b]"], r"comparison.runs: cannot be swept"),
        (["run.seed=1,2", "run.seed=3"], r"run.seed: is given twice"),
    ],
)
def test_a_mistake_names_the_key(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        swept(*texts)
    assert "\n" not in str(caught.value)


def test_a_sweep_runs_on_one_machine() -> None:
    machines = ("launch.num_nodes=2", "launch.rdzv_endpoint=host:29500", "run.name=shared")
    with pytest.raises(ConfigError, match=r"launch.num_nodes: a sweep runs on one machine"):
        swept("run.seed=0,1", overrides=machines)

"""Mistakes on the command line: one line that names the cause, exit status 2, and nothing is made.

Which values a setting takes is tested in `infini_model/config`; here is how commands report it.
"""

import re
import sys
from pathlib import Path

import pytest
from commands import Environment, infini, infini_here, run, tiny, write_settings


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("run model.layers=2", "model.layers: unknown key"),
        ("preprocess texts/*.txt", "data.source.paths='texts/*.txt'"),
        ("run --max-steps many", "'--max-steps'"),
        ("run --no-such-option", "--no-such-option: unknown option"),
        ("evaluate --max-steps 3", "--max-steps: this command does not use it"),
        ("serve --no-gpu", "--no-gpu: this command does not use it"),
        ("run --steps 3", "--steps: unknown option; did you mean --max-steps?"),
        ("train --master_addr here", "--master-addr: unknown option; use launch.rdzv_endpoint"),
        ("runs --save_dir a", "--save-dir: unknown option; did you mean --output-dir?"),
        ("resume --save_dir a", "--save-dir: unknown option; did you mean --output-dir?"),
        ("resume --torch-compile 0", "--torch-compile: unknown option; it is launch.compile=VALUE"),
        ("run --config missing.yaml", "missing.yaml: cannot be read: No such file"),
        ("run --gpus 0,97", "launch.gpus=0,97: GPU 0 does not exist"),
        ("train --gpus all", "launch.gpus=all: no GPU"),
        ("serve --port 70000", "--port"),
        ("generate", "give either --prompt or --prompt-file"),
        ("generate --prompt-file nowhere.txt", "'--prompt-file': 'nowhere.txt': No such file"),
        ("generate --prompt-file -", "--prompt-file: is not UTF-8 text"),
        ("generate --prompt \udcff", "--prompt: is not UTF-8 text"),
        ("generate --prompt a --top-p 2", "evaluation.sample.top_p: got '2.0'"),
        ("generate --prompt a --checkpoint /nowhere", "/nowhere: has no tokenizer.json"),
        ("compare", "name two runs or more to compare"),
        ("compare here", "/runs/here: there is no such run; infini runs lists them"),
        ("compare --sweep run.seed=0", "--sweep: no setting has several values"),
    ],
)
def test_a_mistake_is_told_at_once(
    alone: Environment, output: Path, words: str, named: str
) -> None:
    done = infini_here(*words.split(), f"run.output_dir={output}", env=alone, stdin=b"\xff")
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert not output.exists()


def test_the_command_line_is_read_without_any_large_library(alone: Environment) -> None:
    large = {"torch", "prefect", "mlflow", "pyarrow", "numpy", "obstore"}
    # Prefect reads the address of its server when it is imported.
    code = f"import sys, flows.cli\nprint(sorted({large} & sys.modules.keys()))"
    code += "\nimport flows.dataset_commands, flows.serving.serve"
    done = run([sys.executable, "-c", f"{code}\nprint('prefect' in sys.modules)"], alone)
    assert done.stdout == "[]\nFalse\n", done.stdout + done.stderr


def test_an_unknown_run_is_told_without_large_libraries(tmp_path: Path, alone: Environment) -> None:
    commands = [
        ["compare", "here", "--sweep", "run.seed=0,1", "run.output_dir=nowhere"],
        ["generate", "--prompt", "x", "run.output_dir=nowhere"],
        ["cancel", "here", "--output-dir", "nowhere"],
        ["resume", "here", "--output-dir", "nowhere"],
    ]
    code = (
        "import contextlib, sys\n"
        "from flows.cli import main\n"
        f"for sys.argv[1:] in {commands}:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "print(sorted({'torch', 'prefect', 'mlflow'} & sys.modules.keys()))\n"
    )
    done = run([sys.executable, "-c", code], alone, cwd=tmp_path)
    assert done.stdout == "[]\n", done.stdout + done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == len(commands)
    assert all(re.search("/runs/(here|latest): .*no such run", each) for each in errors), errors


def test_what_cannot_work_is_refused_before_anything_is_downloaded(
    connected: Environment, text_files: Path, tmp_path: Path, output: Path
) -> None:
    settings = write_settings(tmp_path / "settings.yaml", tiny(text_files, output))
    too_large = ("model.hidden_size=65536", "model.num_hidden_layers=64")
    done = run(infini("run", "--config", settings, *too_large), connected)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: not enough memory")
    assert not (output / "raw").exists()
    assert not (output / "datasets").exists()

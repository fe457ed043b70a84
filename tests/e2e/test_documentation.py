"""The commands and the Python of the documentation, as far as they need no network, run."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import Environment, run, tiny, write_settings, write_texts
from llamas import write_llama

from infini_model.training.callbacks.mlflow_record import read_mlflow_record

pytestmark = pytest.mark.story
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
RUN = Path("outputs", "runs", "first")
# Commands on runs and datasets that are there. The others parse (tests/test_docs.py), and those of
# the README's list run in test_newcomer.py.
READERS = re.compile(r"infini (evaluate|generate|export|verify|clean|logs|runs)\b")
# Of an object store, a task of the reader's own, a run of LoRA.
ELSEWHERE = re.compile(r"s3://|lm_eval|--merge|quickstart-3")


@dataclass(frozen=True)
class Reader:
    """Someone who has the run `first`, and types into a shell what a page says."""

    folder: Path
    env: Environment

    @property
    def dataset(self) -> Path:
        """The folder of their dataset."""
        (found,) = (self.folder / "outputs" / "datasets").glob("tiny-*")
        return found

    def type(self, line: str) -> str:
        """What a line of shell prints; it must succeed."""
        done = run(["bash", "-ec", line], self.env, cwd=self.folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, line
        return done.stdout


@pytest.fixture(scope="module")
def reader(
    tmp_path_factory: pytest.TempPathFactory,
    session_environment: Environment,
    server: str,
    with_tables: Callable[[Path], Path],
) -> Reader:
    """A folder with `mine.yaml`, the run of it, a Llama, an `infini` and a home."""
    folder = tmp_path_factory.mktemp("reader")
    tree = tiny(write_texts(folder / "texts", 120), Path("outputs"), run={"name": "first"})
    tree["tracking"]["mlflow"] = True
    # What opens in transformers, and is long enough for every task of the evaluation.
    tree["model"]["memory"] = "none"
    tree["data"]["tokenizer"] = {"spec": "train", "vocab_size": 300}
    tree["packing"]["context_length"] = 256
    few = {"trials": 1, "depths": [0.0, 30.0, 60.0, 90.0]}
    tree["evaluation"] |= {"max_windows": 2, "passkey": few, "needles": few}
    tree["evaluation"] |= {"recall": {"sequences": 2}, "throughput": {"max_seconds": 0.1}}
    write_settings(folder / "mine.yaml", tree)
    write_llama(folder / "llama")
    (folder / "book.txt").write_text("river stone light")
    env = {
        **session_environment,
        "HOME": str(folder),
        "PREFECT_API_URL": server,
        "PREFECT_HOME": str(folder / "prefect"),
        "PATH": f"{Path(sys.executable).parent}:{session_environment['PATH']}",
        "MPLCONFIGDIR": str(folder),
    }
    made = Reader(folder, env)
    made.type("infini run --config mine.yaml")
    return made


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def lines(page: Path) -> list[str]:
    """The commands of a page on what is there, without their comments."""
    shell = "".join(blocks(page, "sh"))
    found = [line.partition("  #")[0].rstrip() for line in shell.splitlines()]
    return [line for line in found if READERS.match(line) and not ELSEWHERE.search(line)]


LINES = {line for page in DOCS.glob("*.md") for line in lines(page)}


@pytest.mark.parametrize("line", sorted(LINES - {*lines(ROOT / "README.md")}))
def test_a_command_of_the_pages_succeeds(line: str, reader: Reader) -> None:
    reader.type(line.replace("mine-0123456789abcdef", reader.dataset.name))


def test_the_stages_run_without_prefect(reader: Reader) -> None:
    (block,) = [each for each in blocks(DOCS / "training.md", "sh") if "torchrun" in each]
    for number, line in enumerate(block.splitlines()):
        # The second training is a new one, too; it is what is evaluated.
        run_dir = f"outputs/runs/direct-{min(number, 2)}"
        reader.type(line.replace("DATASET", str(reader.dataset)).replace("RUN", run_dir))
    assert (reader.folder / "outputs/runs/direct-2/evaluation.json").is_file()


@pytest.fixture(scope="module")
def debug(reader: Reader) -> Path:
    """What a training that diverged left to look at."""
    diverging = "run.name=diverged training.learning_rate=1e30 stages.train.retries=0"
    reader.type(f"! infini train --config mine.yaml --debug {diverging}")
    (folder,) = (reader.folder / "outputs" / "runs" / "diverged" / "debug").iterdir()
    return folder


def test_a_step_that_failed_can_be_repeated(reader: Reader, debug: Path) -> None:
    (line,) = [each for each in blocks(DOCS / "numbers.md", "sh") if "DATASET" in each]
    here = {"<run>": str(debug.parents[1]), "step-12": debug.name, "DATASET": str(reader.dataset)}
    for word, replacement in here.items():
        line = line.replace(word, replacement)
    reader.type(f"! {line}")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs(page: Path, reader: Reader, debug: Path) -> None:
    record = read_mlflow_record(reader.folder / RUN)
    here = {
        "runs/latest": "runs/first",
        '"bytes"': f'"{RUN / "model"}"',
        '"cuda"': '"cpu"',
        "path/to/Llama-3.2-1B": "llama",
        "path/to/folder": "saved",
        "models/first": str(RUN / "model"),
        "debug/step-12": str(debug),
        "http://127.0.0.1:5000": record["tracking_uri"],
        "<run id>": record["run_id"],
    }
    code = "\n".join(blocks(page, "python"))
    for word, replacement in here.items():
        code = code.replace(word, replacement)
    (reader.folder / "snippet.py").write_text(code)
    reader.type("python snippet.py")

"""The dependency rules of the project, checked on its imports.

Nothing is imported: the sources are parsed, so that an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("infini_model", "tasks", "flows", "deployments", "benchmarks")
# Maximum number of modules in a folder of the library, besides __init__.py.
MAX_MODULES = 12


def _rooms(names: str) -> tuple[str, ...]:
    return tuple(f"infini_model.{name}" for name in names.split())


# A package, and what must not be imported anywhere in it.
FORBIDDEN_IMPORTS: list[tuple[str, tuple[str, ...]]] = [
    ("infini_model", ("prefect", "flows", "tasks", "benchmarks", "deployments")),
    ("tasks", ("flows", "benchmarks")),
    ("flows", ("benchmarks",)),
    ("infini_model.config", ("torch",)),
    ("infini_model.config", _rooms("model data objectives training evaluation")),
    ("infini_model.runtime", _rooms("model data objectives training evaluation")),
    ("infini_model.model", _rooms("data objectives training evaluation")),
    ("infini_model.data", _rooms("model objectives training evaluation")),
    ("infini_model.objectives", _rooms("training evaluation")),
    ("infini_model.data.sources", _rooms("data.tokenizers data.shards data.loading")),
    ("infini_model.data.tokenizers", _rooms("data.shards data.loading")),
    ("infini_model.data.shards", _rooms("data.loading")),
    ("infini_model.training", _rooms("evaluation")),
    ("infini_model.cleaning", _rooms("model objectives evaluation")),
    *((room, _rooms("cleaning")) for room in _rooms("data model objectives training evaluation")),
]
# Optional or slow to import: imported only where they are used.
OPTIONAL = (
    *("datasets", "mlflow", "tensorboard", "torch.utils.tensorboard", "gigatoken", "flash_attn"),
    *("lm_eval", "markdown_it", "matplotlib", "transformers", "prefect", "obstore", "ray"),
)
# The client, the record of a run, the results of an evaluation, and the code stored with a model.
MAY_IMPORT_MLFLOW = (
    "flows.serving.guard",  # stands in front of MLflow's own server
    *_rooms("training.mlflow_client training.callbacks.mlflow_record"),
    *_rooms("evaluation.tracking evaluation.mlflow_model evaluation.pyfunc"),
)
# Run by MLflow as a file, when a logged model is loaded; nothing imports it.
RUN_BY_MLFLOW = "infini_model.evaluation.pyfunc"
# An address is not a reason to listen on all of a machine's networks; the others run what a
# stranger wrote.
FORBIDDEN_CALLS = ("torch.load", "eval", "exec", "os.system")
FORBIDDEN_ARGUMENTS = ("trust_remote_code", "shell")
OPEN_TO_ALL = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])")
# Calls that access a package, or its files, by name.
BY_NAME = (
    *("importlib.import_module", "import_module", "__import__"),
    *("importlib.resources.files", "resources.files", "files"),
)
PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")


class Import(NamedTuple):
    """`module` imports `name`, at `line`, when it is itself imported or only later."""

    module: str
    name: str
    line: int
    at_once: bool

    def enters(self, rooms: tuple[str, ...]) -> bool:
        return _within(self.name, rooms)

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


def _within(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


@functools.cache
def modules(root: Path) -> dict[str, ast.Module]:
    """The parsed sources of the product below `root`, by the name of the module."""
    found = {}
    for path in sorted(path for room in PRODUCT for path in (root / room).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return found


def imports(module: str, tree: ast.Module, *, is_package: bool) -> Iterator[Import]:
    """Every import in a module. `from a import b` may mean module a.b, so it counts as both."""
    later = set(_inside_functions(tree)) | set(_for_type_checkers(tree))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node, is_package=is_package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif _called(node) in BY_NAME:
            names = [
                argument.value
                for argument in node.args[:1]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
        for name in names:
            yield Import(module, name, node.lineno, node not in later)


def _inside_functions(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from ast.walk(node)


def _for_type_checkers(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                yield from ast.walk(statement)


def _absolute(module: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def _called(node: ast.AST) -> str | None:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else None


@functools.cache
def all_imports(root: Path) -> list[Import]:
    found = modules(root)
    packages = {name.rpartition(".")[0] for name in found} | set(PRODUCT)
    return [
        each
        for name, tree in found.items()
        for each in imports(name, tree, is_package=name in packages)
    ]


def forbidden_imports(root: Path) -> list[str]:
    """Imports that violate the dependency rules."""
    return [
        str(each)
        for each in all_imports(root)
        for room, closed in FORBIDDEN_IMPORTS
        if _within(each.module, (room,)) and each.enters(closed)
    ]


def eager_optional_imports(root: Path) -> list[str]:
    """Optional packages that importing the library would import."""
    return [
        str(each)
        for each in all_imports(root)
        if _within(each.module, ("infini_model",)) and each.at_once and each.enters(OPTIONAL)
        if each.module != RUN_BY_MLFLOW
    ]


def mlflow_outside_allowed_modules(root: Path) -> list[str]:
    return [
        str(each)
        for each in all_imports(root)
        if each.enters(("mlflow",)) and not _within(each.module, MAY_IMPORT_MLFLOW)
    ]


def import_cycles(root: Path) -> list[str]:
    """Modules of the library that import each other, eagerly or lazily: the first such cycle."""
    edges: dict[str, set[str]] = {
        name: set() for name in modules(root) if _within(name, ("infini_model",))
    }
    for each in all_imports(root):
        if each.module in edges and each.name in edges and each.name != each.module:
            edges[each.module].add(each.name)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [" is imported by ".join(error.args[1])]
    return []


def crowded_folders(root: Path) -> list[str]:
    """Folders of the library with too many modules."""
    folders = {path.parent for path in (root / "infini_model").rglob("*.py")}
    counts = {path: len([*path.glob("*.py")]) - (path / "__init__.py").exists() for path in folders}
    return [f"{path}: {count} modules" for path, count in counts.items() if count > MAX_MODULES]


def constants_said_twice(root: Path) -> list[str]:
    """Names of files, keys and the like that several modules of the library define alike."""
    places = defaultdict(list)
    for module, tree in modules(root).items():
        if not _within(module, ("infini_model",)):
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign):
                for constant in _string_constants(node):
                    places[constant].append(module)
    return [f"{name}: {found}" for name, found in places.items() if len(found) > 1]


def _string_constants(node: ast.Assign) -> Iterator[str]:
    """What an assignment defines, as in `A = "x"`, or several as in `A, B = "x", "y"`."""
    target, value = node.targets[0], node.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    for name, content in pairs:
        if isinstance(content, ast.Constant) and isinstance(content.value, str):
            yield f"{ast.unparse(name)} = {content.value!r}"


def dangers(root: Path) -> list[str]:
    """Calls that run untrusted code or listen on all networks."""
    found = [str(each) for each in all_imports(root) if each.enters(PICKLES)]
    for module, tree in modules(root).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found += [f"{module}:{node.lineno} {what}" for what in _dangers_of(node)]
            elif isinstance(node, ast.Constant) and OPEN_TO_ALL.search(str(node.value)):
                found.append(f"{module}:{node.lineno} {node.value!r}")
    return found


def _dangers_of(call: ast.Call) -> Iterator[str]:
    if _called(call) in FORBIDDEN_CALLS:
        yield f"calls {_called(call)}"
    for argument in call.keywords:
        off = isinstance(argument.value, ast.Constant) and argument.value.value is False
        if argument.arg in FORBIDDEN_ARGUMENTS and not off:
            yield f"passes {argument.arg}"


RULES = (
    forbidden_imports,
    eager_optional_imports,
    mlflow_outside_allowed_modules,
    import_cycles,
    crowded_folders,
    constants_said_twice,
    dangers,
)


@pytest.mark.parametrize("check", RULES)
def test_the_sources_keep_the_rule(check) -> None:
    assert check(ROOT) == []


def test_no_test_module_imports_another() -> None:
    """What tests share is in modules of its own, so that each can be run and moved by itself."""
    files = list((ROOT / "tests").rglob("*.py"))
    names = {path.stem for path in files if path.stem.startswith("test_")}
    found = [
        str(each)
        for path in files
        for each in imports(path.stem, ast.parse(path.read_text("utf-8")), is_package=False)
        if each.name.split(".")[-1] in names
    ]
    assert len(names) > 50
    assert found == []


def test_deployments_open_no_port_to_everyone() -> None:
    files = [path for path in (ROOT / "deployments").rglob("*") if path.is_file()]
    sources = [path for path in files if path.parent.name != "__pycache__"]
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    assert texts
    assert [path for path, text in texts.items() if OPEN_TO_ALL.search(text)] == []


def test_config_loads_without_torch_or_any_optional_package() -> None:
    """Checks transitive imports, which no single module shows."""
    at_once = [each for each in all_imports(ROOT) if each.at_once]
    reached, todo = set(), ["infini_model", "infini_model.config"]
    while todo:
        module = todo.pop()
        for each in at_once:
            if each.module == module and each.name not in reached:
                reached.add(each.name)
                todo.append(each.name)
    assert "pydantic" in reached
    assert [name for name in reached if _within(name, ("torch", *OPTIONAL))] == []


def make_tree(root: Path, **sources: str) -> Path:
    """A source tree; double underscores in a name stand for the dots of a module."""
    for name, source in sources.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(source)
    return root


@pytest.mark.parametrize(
    ("check", "module", "source"),
    [
        (forbidden_imports, "infini_model__runtime__runs", "def f():\n    import prefect.client\n"),
        (forbidden_imports, "infini_model__runtime__runs", "from flows import cli\n"),
        (forbidden_imports, "infini_model__data__loader", "from infini_model.model import llama\n"),
        (
            forbidden_imports,
            "infini_model__data__loader",
            "from ..model.llama import InfiniLlama\n",
        ),
        (
            forbidden_imports,
            "infini_model__model__llama",
            "from infini_model.data.loading import x\n",
        ),
        (forbidden_imports, "infini_model__model__layers", "from ..data import loader\n"),
        (forbidden_imports, "infini_model__data__loader", "from infini_model import objectives\n"),
        (
            forbidden_imports,
            "infini_model__runtime__runs",
            "from infini_model.training import loop\n",
        ),
        (forbidden_imports, "infini_model__data__sources__hub", "from ..tokenizers import bpe\n"),
        (forbidden_imports, "infini_model__config", "def f():\n    import torch\n"),
        (
            forbidden_imports,
            "infini_model__config",
            "import importlib\nimportlib.import_module('torch')",
        ),
        (
            forbidden_imports,
            "infini_model__config",
            "from importlib.resources import files\nfiles('deployments')",
        ),
        (forbidden_imports, "tasks__train", "from flows.train import train\n"),
        (
            eager_optional_imports,
            "infini_model__model__llama",
            "try:\n    import flash_attn\nfinally: 0\n",
        ),
        (eager_optional_imports, "infini_model__a", "class A:\n    from datasets import load\n"),
        (eager_optional_imports, "infini_model__a", "from torch.utils import tensorboard\n"),
        (mlflow_outside_allowed_modules, "flows__cli", "def f():\n    import mlflow\n"),
        (
            mlflow_outside_allowed_modules,
            "infini_model__training__loop",
            "from mlflow import log\n",
        ),
        (mlflow_outside_allowed_modules, "tasks__evaluate", "def f():\n    import mlflow\n"),
        (dangers, "infini_model__a", "from pickle import loads\n"),
        (dangers, "infini_model__a", "import torch\ntorch.load('x', weights_only=True)\n"),
        (dangers, "tasks__a", "import subprocess\nsubprocess.run('ls', shell=True)\n"),
        (dangers, "infini_model__a", "def f(on):\n    load('x', trust_remote_code=on)\n"),
        (dangers, "flows__a", "HOST = '0.0.0.0'\n"),
        (dangers, "flows__a", "def f(port):\n    return f'http://0.0.0.0:{port}'\n"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, check, module: str, source: str) -> None:
    assert len(check(make_tree(tmp_path, **{module: source}))) >= 1


def test_a_cycle_is_found_even_through_functions(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        infini_model__a="from infini_model.b import c\n",
        infini_model__b="def c():\n    from infini_model import d\n",
        infini_model__d="import infini_model.a\n",
    )
    (found,) = import_cycles(root)
    assert set(found.split(" is imported by ")) == {f"infini_model.{name}" for name in "abd"}


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    make_tree(tmp_path, **{f"infini_model__data__m{number}": "" for number in range(MAX_MODULES)})
    assert crowded_folders(tmp_path) == []
    (found,) = crowded_folders(make_tree(tmp_path, infini_model__data__one_more=""))
    assert found.endswith("data: 13 modules")


def test_a_constant_that_is_said_twice_is_found(tmp_path: Path) -> None:
    sources = {"infini_model__a": 'A, B = "a", "b"\n', "infini_model__b": 'A = "other"\n'}
    assert constants_said_twice(make_tree(tmp_path / "one", **sources)) == []
    root = make_tree(tmp_path / "two", **sources, infini_model__c='B = "b"\n')
    assert constants_said_twice(root) == ["B = 'b': ['infini_model.a', 'infini_model.c']"]


def test_what_the_rules_allow_is_let_through(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        infini_model__data__hub="def f():\n    import datasets\n",
        infini_model__model__hf_checkpoint=(
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers\n"
        ),
        infini_model__training__loop=(
            "from infini_model.model import llama\nfrom ..data import loader\n"
        ),
        infini_model__training__callbacks__mlflow_record="def f():\n    import mlflow\n",
        infini_model__evaluation__pyfunc="import mlflow\n",
        infini_model__prefecture="VERSION = '10.0.0.0'\nmodel.eval()\n",
        tasks__train="import prefect\nfrom infini_model.data import loader\n",
        flows__cli="from tasks import train\nrun(['ls'], shell=False)\n",
    )
    for check in RULES:
        assert check(root) == []

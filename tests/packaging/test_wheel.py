"""The wheel holds the package with its kernels, profiles and head, and no top-level `kernels`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "treeeagle_edge", "kernels", "profiles")


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("setuptools")
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in SOURCES:  # setuptools writes beside its sources: build from a copy
        path = repository / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
    ]
    subprocess.run([*command, "--wheel-dir", str(work), str(source)], check=True, stdout=subprocess.DEVNULL)
    return zipfile.ZipFile(next(work.glob("*.whl")))


def _sources(folder: Path, prefix: str) -> set[str]:
    files = (
        file
        for file in folder.rglob("*")
        if file.suffix in (".py", ".yaml") and "__pycache__" not in file.parts
    )
    return {f"{prefix}/{file.relative_to(folder).as_posix()}" for file in files}


def test_every_source_file_is_in_the_wheel_at_its_import_path(
    wheel: zipfile.ZipFile, repository: Path
) -> None:
    names = set(wheel.namelist())
    wanted = _sources(repository / "treeeagle_edge", "treeeagle_edge")
    wanted |= _sources(repository / "kernels", "treeeagle_edge/kernels")
    wanted |= _sources(repository / "profiles", "treeeagle_edge/profiles")
    assert wanted <= names, sorted(wanted - names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"treeeagle_edge"}


def test_the_native_kernels_travel_as_sources(wheel: zipfile.ZipFile, repository: Path) -> None:
    package, sources = "treeeagle_edge/kernels/native", repository / "kernels" / "native" / "src"
    wanted = {f"{package}/src/{source.name}" for source in sources.iterdir()}
    assert {f"{package}/src/te.h", f"{package}/src/dispatch.cpp"} <= wanted
    names = {name for name in wheel.namelist() if name.startswith(f"{package}/")}
    assert wanted == {name for name in names if name.startswith(f"{package}/src/")}
    assert {f"{package}/{module}.py" for module in ("__init__", "build", "loader", "library")} <= names
    assert not [name for name in wheel.namelist() if name.endswith((".so", ".o", ".dylib"))]


def test_the_head_and_the_type_marker_travel_along(wheel: zipfile.ZipFile) -> None:
    head = "treeeagle_edge/heads/smollm2-135m-eagle3"
    assert {f"{head}/config.json", f"{head}/model.safetensors", f"{head}/README.md"} <= set(wheel.namelist())
    assert "treeeagle_edge/py.typed" in wheel.namelist()


def test_the_metadata_names_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    texts = {name.rpartition("/")[2]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "treeeagle = treeeagle_edge.__main__:main" in wheel.read(texts["entry_points.txt"]).decode()
    metadata = wheel.read(texts["METADATA"]).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata
    assert "LICENSE" in texts


def test_an_unpacked_wheel_imports_as_promised(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "import importlib.util, treeeagle_edge, treeeagle_edge.kernels.view, treeeagle_edge.profiles;"
        "from treeeagle_edge.sources.model_names import resolve_head;"
        "print(treeeagle_edge.__file__); print(resolve_head('smollm2-135m-eagle3', ''));"
        "print(importlib.util.find_spec('kernels'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    package, head, kernels = done.stdout.splitlines()
    assert package == str(tmp_path / "treeeagle_edge" / "__init__.py")
    assert head == str(tmp_path / "treeeagle_edge" / "heads" / "smollm2-135m-eagle3")
    assert kernels == "None"


# A machine with a card and PyTorch may lack the rest of what we declare: there, importing these fails.
BLOCKS = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in (
            *("gguf", "prompt_toolkit", "transformers", "matplotlib", "tokenizers", "accelerate"),
            *("safetensors", "huggingface_hub", "typer", "click", "rich", "psutil", "yaml", "pynvml"),
        ):
            raise ModuleNotFoundError(f"{name} is not there", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.slow
def test_an_unpacked_wheel_checks_a_card_with_few_packages(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Nothing is installed, nor needed beside PyTorch, NumPy, Triton and bitsandbytes; in tiny shapes on the CPU."""
    wheel.extractall(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(BLOCKS)
    saved = tmp_path / "found.json"
    command = [sys.executable, "-P", "-m", "treeeagle_edge.gpu_check", "--size", "test"]
    done = subprocess.run(
        [*command, "--minutes", "30", "--device", "cpu", "--save", str(saved)],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(saved.read_text())
    assert {section["status"] for section in document["sections"]} <= {"ok", "not on this device"}
    assert len(document["sections"]) >= 10
    assert document["environment"]["versions"]["treeeagle-edge"]


def test_kernels_is_no_top_level_package_while_testing() -> None:
    assert importlib.util.find_spec("kernels") is None
    assert importlib.util.find_spec("treeeagle_edge.kernels") is not None

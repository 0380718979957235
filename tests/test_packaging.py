"""What is published: a wheel and an sdist that need nothing but torch and numpy."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import flatshard
import flatshard.rehearsal

_ROOT = Path(__file__).parents[1]

# Stands for an environment without the extras: what flatshard does not require cannot be imported.
_ALONE = """
import sys
sys.modules.update(dict.fromkeys(("rich", "tyro", "yaml", "safetensors", "transformers", "tokenizers", "tqdm")))
import flatshard
assert "torch" not in sys.modules
assert flatshard.__file__.startswith(sys.argv[1]), flatshard.__file__
for name in flatshard.__all__:
    getattr(flatshard, name)
from flatshard.cli import main
assert main(["plan", "llama-1b", "--devices", "8", "--memory", "80GB"]) == 0
assert main(["train"]) == 2
"""


@pytest.mark.parametrize("module", [flatshard, flatshard.rehearsal])
def test_names_are_found_where_type_checkers_are_told(module):
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {
        name.name: node.module for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    homes = {name: f"{module.__name__}.{home}" for home, names in module._HOMES.items() for name in names}
    assert {name: home for name, home in told.items() if home != "flatshard"} == homes
    assert sorted(told) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.full
def test_the_wheel_and_the_sdist_install_alone(tmp_path):
    hooks = (
        f"from setuptools import build_meta as b; b.build_sdist({str(tmp_path)!r}); b.build_wheel({str(tmp_path)!r})"
    )
    left_out = shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__", "*.egg-info")
    shutil.copytree(_ROOT, tmp_path / "source", ignore=left_out)
    subprocess.run([sys.executable, "-c", hooks], cwd=tmp_path / "source", check=True, capture_output=True)
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "flatshard/engine/units/unit.py"} <= names
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        lines = file.read(metadata).decode().splitlines()
        file.extractall(tmp_path / "installed")
    assert {"flatshard/py.typed", "flatshard/cli.py", "flatshard_autoload.py"} <= names
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)
    assert [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line] == [
        "Requires-Dist: torch>=2.11",
        "Requires-Dist: numpy",
    ]
    installed = str(tmp_path / "installed")
    code = f"import sys; sys.path.insert(0, {installed!r})\n{_ALONE}"
    done = subprocess.run([sys.executable, "-c", code, installed], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'flatshard[train]'" in done.stderr

"""Every Python block and every command of README and docs runs, every link and name leads somewhere.

A block runs as one rank of a rehearsal, on a small model, with the names of `_names` and of its page. The commands of a
page run one after another, as a reader types them, in a folder that looks like the root of the repository. What cannot
run here says why in `NOT_RUN` or `NOT_TYPED`, and has to compile, or to be parsed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import flatshard
from flatshard.cli import parser
from flatshard.rehearsal import rehearse
from flatshard.train.settings import parse

_ROOT = Path(__file__).parents[1]
PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_FILES = [
    file
    for folder in ("flatshard", "tests", "benchmarks", "examples", "scripts")
    for file in (_ROOT / folder).rglob("*.py")
]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.S | re.M)

# Page and number of a block -> why it is only compiled.
NOT_RUN = {
    ("README.md", 0): "is examples/minimal.py, which tests/train/test_command.py runs",
    ("capture.md", 0): "needs a GPU; tests/gpu/test_capture.py runs such steps",
    ("ecosystem.md", 2): "needs peft; tests/ecosystem/test_peft.py does the same",
}
NOT_RUN |= {("finetune.md", number): "runs between the commands of its page" for number in (0, 1)}
SLOW = {("ecosystem.md", 1)}  # imports transformers
# What a command has in it -> why nobody types it here.
NOT_TYPED = {
    r"your_script|HOST|^srun|PYTORCH|MEGATRON-LM|upstream.py compare": "needs what only a reader has",
    r"^(pip|hf) ": "needs a network",
    r"benchmarks\.|tests/gpu": "needs a GPU, and hours",
    r"--model llama-8b": "needs 64 GB of host memory",
    r"runs/megatron-dcp": "needs a checkpoint of Megatron; tests/checkpoint/test_convert.py converts one",
}
WORLDS = {"meshes.md": 8, "concepts.md": 8, "recipes.md": 8}  # others: one rank


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class MyExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class Model(nn.Module):
    """Returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.experts = MyExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def blocks(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        code = [body for _, kind, body in _BLOCK.findall(page.read_text()) if kind == language]
        for number, body in enumerate(code):
            marks = [pytest.mark.full] if (page.name, number) in SLOW else []
            found.append(
                pytest.param(page.name, number, textwrap.dedent(body), id=f"{page.name}-{number}", marks=marks)
            )
    return found


def _names(page: str, number: int, folder: Path) -> dict[str, Any]:
    """What a block finds. Most have a plain model; some go on where a model is sharded."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    from flatshard.checkpoint import renamed

    torch.manual_seed(0)
    model: Any = Model()
    batch = torch.randn(4, 8)
    names: dict[str, Any] = {"torch": torch, "dist": dist, "dcp": dcp, "flatshard": flatshard, "contextlib": contextlib}
    names |= {name: getattr(flatshard, name) for name in flatshard.__all__}
    names |= {"init_device_mesh": init_device_mesh, "renamed": renamed, "Block": Block, "MyExperts": MyExperts}
    names |= {"Model": Model}
    names |= {"get_model_state_dict": get_model_state_dict, "set_model_state_dict": set_model_state_dict}
    names |= {"batch": batch, "block": Block(), "data": [batch, batch], "micro_batches": [batch, batch], "step": 1}
    names |= {"folder": str(folder / "weights"), "path": str(folder / "dcp"), "engine": Model()}
    names |= {"dp": 4, "cp": 2, "schedule": SimpleNamespace(step=lambda *args: None)}
    if page in ("checkpoints.md", "trust.md") or (page, number) in {("ecosystem.md", 3), ("out-of-memory.md", 1)}:
        flatshard.shard_model(model)
    if page == "ecosystem.md" and number == 1:
        names |= _transformers(folder)
    if page == "from-megatron-fsdp.md":
        from flatshard.megatron import fully_shard_model

        names |= {"data": [batch.bfloat16()] * 2}
        if number == 2:
            model = fully_shard_model(model, fsdp_unit_modules=[Block])
    if page == "meshes.md" and number > 0:
        names |= {"sparse": init_device_mesh("cpu", (2, 4), mesh_dim_names=("edp", "ep"))}
    if page == "meshes.md" and number == 3:
        stage = nn.Linear(2, 2)
        stage.weight.grad = torch.ones(2, 2)
        names |= {"stage": stage, "mesh": init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))}
    names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    if (page, number) == ("ecosystem.md", 3):
        mean = Model()
        flatshard.shard_model(mean)
        names |= {"mean": mean}
    if page == "checkpoints.md" and number == 3:
        dcp.save({"model": renamed(get_model_state_dict(model), add="module.")}, checkpoint_id=names["path"])
    return names


def _transformers(folder: Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "in")
    prompt = {"input_ids": torch.ones(1, 2, dtype=torch.int64), "max_new_tokens": 2, "pad_token_id": 0}
    return {"config": config, "prompt": prompt, "AutoModelForCausalLM": transformers.AutoModelForCausalLM}


def _train() -> None:
    model = Model()
    flatshard.shard_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.randn(2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("page", "number", "code"), blocks("python"))
def test_a_block_runs(page, number, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "continue" in code:  # part of a loop
        code = f"for _ in range(1):\n{textwrap.indent(code, '    ')}"
    compiled = compile(code.replace('"cuda"', '"cpu"'), f"{page}, block {number}", "exec")
    if (page, number) in NOT_RUN:
        return
    if page == "rehearsal.md":
        exec(compiled, {"train": _train})
        return
    with rehearse(WORLDS.get(page, 1), "free"):
        names = _names(page, number, tmp_path)
        try:
            exec(compiled, names)
        finally:
            flatshard.uninstall()


def test_the_snippet_of_the_readme_is_the_example_that_is_run():
    _, _, snippet = next(each for each in _BLOCK.findall((_ROOT / "README.md").read_text()) if each[1] == "python")
    assert (_ROOT / "examples" / "minimal.py").read_text().endswith(f'"""\n\n{snippet}')


_COMMAND = re.compile(r"(?:\w+=\S+ )*(?:flatshard [a-z]+ |(?:torchrun|make|python|pip|srun|hf|accelerate) )[^:]")


def _typed(page: Path) -> list[tuple[str, str]]:
    """The commands and Python blocks of a page, in order: a kind and a text."""
    found = []
    for _, kind, body in _BLOCK.findall(page.read_text()):
        if kind == "python":
            found.append((kind, textwrap.dedent(body)))
        else:
            lines = body.replace("\\\n", " ").splitlines()
            found += [("command", line.strip()) for line in lines if _COMMAND.match(line.strip())]
    return found


def _why_not(command: str) -> str | None:
    return next((why for what, why in NOT_TYPED.items() if re.search(what, command)), None)


def _commands() -> list[Any]:
    lines = []
    for page in PAGES:
        for kind, line in _typed(page):
            found = re.match(r"(?:srun |torchrun .*-m )?(flatshard [a-z].*)", line)
            if kind == "command" and found:
                lines.append(pytest.param(shlex.split(found[1], comments=True)[1:], id=f"{page.name}: {found[1]}"))
    return lines


@pytest.mark.parametrize("arguments", _commands())
def test_a_command_parses(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if arguments[0] != "train":
        parser().parse_args(arguments)
        return
    for place, argument in enumerate(arguments):
        if argument == "--config":
            Path(arguments[place + 1]).parent.mkdir(parents=True, exist_ok=True)
            Path(arguments[place + 1]).write_text("")
    parse(arguments[1:])


def _pages_with_commands() -> list[Any]:
    typed = [page for page in PAGES if any(kind == "command" and not _why_not(line) for kind, line in _typed(page))]
    return [pytest.param(page, id=page.name) for page in typed]


@pytest.fixture
def root(tmp_path):
    """A folder like the root of the repository, for what commands write, and the environment to type them in."""
    folder, programs = tmp_path / "root", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for entry in _ROOT.iterdir():
        if entry.name != "runs" and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for name, module in {"flatshard": "flatshard", "torchrun": "torch.distributed.run", "python": None}.items():
        script = f'#!/bin/sh\nexec {sys.executable} {f"-m {module}" if module else ""} "$@"\n'
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(_ROOT)}
    return folder, environment


@pytest.mark.full
@pytest.mark.limit(600)
@pytest.mark.parametrize("page", _pages_with_commands())
def test_commands_run_as_a_reader_types_them(page, root):
    folder, environment = root
    if page.name == "finetune.md":
        _checkpoint(folder / "qwen3-0.6b")
    for kind, text in _typed(page):
        if (kind == "python" and page.name != "finetune.md") or _why_not(text):
            continue
        command = ["python", "-c", text] if kind == "python" else ["sh", "-c", text]
        terminals = 2 if "localhost:29500" in text else 1
        pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started = [subprocess.Popen(command, cwd=folder, env=environment, **pipe) for _ in range(terminals)]
        printed = [each.communicate(timeout=500)[0] for each in started]
        assert [each.returncode for each in started] == [0] * terminals, f"{text}\n{''.join(printed)}"


def _checkpoint(folder: Path) -> None:
    """A small model of the kind that the page downloads, with a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 260}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    wrapped.save_pretrained(folder)


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        file, _, part = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if part and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            assert part in {_slug(heading) for heading in headings}, link


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((_ROOT / "docs" / "decisions").glob("*.md"))], ids=lambda page: page.name
)
def test_files_and_tests_that_a_page_names_are_there(page):
    for file, test in re.findall(
        r"`((?:tests|benchmarks|flatshard|examples|scripts)/[\w/.-]+)(?:::(\w+))?`", page.read_text()
    ):
        assert (_ROOT / file).exists(), file
        assert not test or f"\ndef {test}(" in (_ROOT / file).read_text(), test
    for name in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text()):  # or from the package on
        assert any(file.as_posix().endswith(f"/{name}") for file in _FILES), name


def test_the_reference_has_every_public_name():
    told = re.findall(r"^::: (flatshard[.\w]*)\.(\w+)$", (_ROOT / "docs" / "api.md").read_text(), re.M)
    packages = {
        name: importlib.import_module(name) for name in ("flatshard", "flatshard.checkpoint", "flatshard.rehearsal")
    }
    public = {(name, each) for name, package in packages.items() for each in package.__all__ if each != "checkpoint"}
    assert set(told) == public
    assert len(told) == len(public)


def test_the_site_is_built_without_a_warning(tmp_path):
    """With the reference where mkdocstrings is installed (pip install '.[docs]')."""
    pytest.importorskip("mkdocs")
    config, has_reference = _ROOT / "mkdocs.yml", importlib.util.find_spec("mkdocstrings") is not None
    if not has_reference:
        text = re.sub(r"  - mkdocstrings:.*?(?=^nav:)", "", config.read_text(), flags=re.S | re.M)
        config = tmp_path / "mkdocs.yml"
        config.write_text(text.replace("docs_dir: docs", f"docs_dir: {_ROOT / 'docs'}"))
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "--site-dir", str(site)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (site / "recipes" / "index.html").exists()
    assert ("doc-heading" in (site / "api" / "index.html").read_text()) is has_reference

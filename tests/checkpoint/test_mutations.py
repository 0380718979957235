"""Random harm to checkpoints of every form: an error that says so, or the very weights; no crash, no code."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flatshard.checkpoint import CheckpointError, convert, export_safetensors, load, load_safetensors, save
from flatshard.checkpoint.files import INDEX, SINGLE
from tests.checkpoint import mutations
from tests.checkpoint.cases import PLACES, assert_same, full_state, groups_of, make, train, trained
from tests.checkpoint.mutations import hurt

SPARE = 96 << 20  # bytes that a load may take beyond what the process has; the model has 30 kB, a lie 1 MB to 2**64


def _saved(rank, world, folder):
    """Checkpoints of one model by two ranks, one of each form."""
    model, optimizer = trained(rank, world, PLACES[1])
    save(f"{folder}/own", model, optimizer, {"rng": torch.get_rng_state()} if rank == 0 else None)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    export_safetensors(model, f"{folder}/one")
    export_safetensors(model, f"{folder}/many", "3KB")
    whole = full_state(model)
    if rank == 0:
        tensors = {name.removeprefix("model."): value for name, value in whole.items()}
        Path(folder, "archive").mkdir()
        torch.save({"model": tensors}, f"{folder}/archive/a.pt")
        del tensors["head.weight"]  # tied
        for name, files in (("foreign", 1), ("foreigners", 3)):
            Path(folder, name).mkdir()
            homes = {key: f"model-{number % files}.safetensors" for number, key in enumerate(tensors)}
            for file in set(homes.values()):
                part = {key: value for key, value in tensors.items() if homes[key] == file}
                save_file(part, f"{folder}/{name}/{SINGLE if files == 1 else file}")
            if files > 1:
                Path(folder, name, INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))


@contextmanager
def little_memory():
    """Within, this process can have `SPARE` bytes more than it has now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Target:
    """A model, trained a little, that checkpoints are loaded into."""

    def __init__(self):
        self.model = make(2)
        self.renew()
        train(self.model, self.optimizer, 1, 0, 1)
        self.before = full_state(self.model, self.optimizer)
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def renew(self):
        self.optimizer = torch.optim.AdamW(groups_of(self.model), fused=True)

    def restore(self):
        self.model.load_state_dict(self.weights)
        self.renew()
        train(self.model, self.optimizer, 1, 0, 1)
        self.model.load_state_dict(self.weights)
        self.before = full_state(self.model, self.optimizer)

    def unchanged(self):
        assert_same(full_state(self.model, self.optimizer), self.before)


def _own(path, target):
    load(path, target.model, target.optimizer)
    return target.model.state_dict()


def _safetensors(path, target):
    load_safetensors(target.model, path)
    return target.model.state_dict()


def _converted(path, target):
    """Through `convert`; names and shapes that are not the model's are what a strict load refuses."""
    source = path / "a.pt" if (path / "a.pt").exists() else path
    out = path.with_name("out.pt")
    out.unlink(missing_ok=True)
    convert(source, out, model_only=True)
    found = torch.load(out, weights_only=True)
    found = found.get("model", found)
    wanted = {name: value.shape for name, value in target.weights.items()}
    if {
        name: getattr(value, "shape", None)
        for name, value in {"head.weight": found.get("embed.weight"), **found}.items()
    } != wanted:
        raise CheckpointError(f"{path}: not of this model")
    return found


# form -> ways of harm, how it is read
FORMS = {
    "own": ([hurt, mutations.forge_manifest], [_own, _own, _converted]),
    "one": ([hurt, mutations.forge_safetensors], [_safetensors, _safetensors, _converted]),
    "many": ([hurt, mutations.forge_safetensors], [_safetensors, _safetensors, _converted]),
    "foreign": ([hurt, mutations.forge_safetensors], [_safetensors, _converted]),
    "foreigners": ([hurt, mutations.forge_safetensors], [_safetensors, _converted]),
    "dcp": ([hurt, mutations.forge_metadata], [_converted]),
    "archive": ([hurt, mutations.forge_archive], [_converted]),
}


def _told_apart(form, path, harm, found, good):
    """What was read is what was saved; or, where nothing in a file can tell, what is in the file."""
    same = all(torch.equal(value, good[name]) for name, value in found.items() if name in good)
    if same or harm.startswith("archive:"):  # made up, with its own checksums: another checkpoint
        return
    assert form in ("foreign", "foreigners"), f"{harm}: silently other weights"
    inside = {}
    for file in sorted(path.glob("*.safetensors")):
        inside.update(load_file(file))
    assert all(torch.equal(value, inside[name]) for name, value in found.items() if name in inside), harm


def _mutated(rank, world, folder, form, count, seed):
    """How many of the harms were refused, and how many did nothing."""
    torch.set_num_threads(1)
    os.chdir(folder)
    good, bad = Path(folder, form), Path(folder, f"bad-{form}")
    target, draw = Target(), random.Random(f"{form} {seed}")
    ways, readers = FORMS[form]
    kept = _read_good(good, form, target)
    assert len(kept) > 10
    refused = 0
    for number in range(count):
        harm = mutations.harmed(good, bad, ways, draw)
        read = draw.choice(readers)
        where = f"{form} {seed} {number}: {harm}, {read.__name__}"
        try:
            with little_memory():
                found = read(bad, target)
        except CheckpointError as error:
            refused += 1
            text = str(error)
            if "MemoryError" in text or "allocate memory" in text:
                raise AssertionError(f"{where}: {text}") from error
            if form == "own" and read is _own:
                _is_named(harm, text, where)
            target.unchanged()
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        else:
            _told_apart(form, bad, harm, found, kept)
            if read is not _converted:
                target.restore()
        assert not Path("executed").exists(), where
        left = [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]
        assert not left, (where, left)
    return refused


def _read_good(good, form, target):
    found = {"own": _own, "dcp": _converted, "archive": _converted}.get(form, _safetensors)(good, target)
    kept = {name: value.clone() for name, value in found.items()}
    target.restore()
    return kept


def _is_named(harm, text, where):
    kind, _, file = harm.partition(" ")
    if harm.startswith(("manifest:", "swapped")):
        assert "manifest.json" in text or "bad-own" in text, (where, text)
    elif file != "manifest.json":
        assert file in text, (where, text)
        assert "'" in text, (where, text)  # the tensor
    elif kind in ("missing", "renamed"):
        assert "has no manifest.json" in text, (where, text)
    else:
        assert "bad-own/manifest.json" in text, (where, text)


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    rank_pool.run(2, _saved, (str(folder),))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_random_harm_is_refused_or_does_nothing(ranks, saved, form):
    (refused,) = ranks(1, _mutated, str(saved), form, 50, 0)
    assert refused >= 30


@pytest.mark.full
@pytest.mark.limit(600)
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("form", FORMS)
def test_much_random_harm(ranks, saved, form, seed):
    ranks(1, _mutated, str(saved), form, 150, seed)


def test_what_is_taken_here_the_safetensors_library_takes_too(tmp_path):
    """Of files without checksums: what is taken here it takes too, and reads the same."""
    draw = random.Random(1)
    good = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.tensor(True), "d": torch.empty(0, 2)}
    for number in range(100):
        path = tmp_path / f"{number}.safetensors"
        save_file(good, path)
        header, data = mutations.read_header(path)
        harm = mutations.lie(header, draw)
        mutations.write_header(path, header, data)
        ours = theirs = None
        with suppress(SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError):
            theirs = load_file(path)
        with suppress(CheckpointError):
            convert(path, tmp_path / f"{number}.pt")
            ours = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        if theirs is None:
            assert ours is None, harm
        elif ours is not None:
            assert_same(ours, theirs)


def test_pipes_are_refused_and_links_are_followed(tmp_path):
    model = torch.nn.Linear(2, 3)
    save(tmp_path / "own", model, progress=False)
    export_safetensors(model, tmp_path / "out", progress=False)
    for file in (tmp_path / "own" / "manifest.json", tmp_path / "own" / "rank-00000.safetensors"):
        file.rename(tmp_path / "kept")
        os.mkfifo(file)
        with pytest.raises(CheckpointError, match=f"{file.name}.*not a regular file"):
            load(tmp_path / "own", model, progress=False)
        file.unlink()
        file.symlink_to(tmp_path / "kept")  # as caches of models have them
        load(tmp_path / "own", model, progress=False)
        file.unlink()
        (tmp_path / "kept").rename(file)
    (tmp_path / "out" / SINGLE).unlink()
    os.mkfifo(tmp_path / "out" / SINGLE)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_safetensors(model, tmp_path / "out", progress=False)

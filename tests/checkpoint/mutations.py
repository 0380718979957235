"""Harm to checkpoints, of every form: what disks and copies do to them, and what somebody makes up.

Each kind of harm takes a folder and a `random.Random`, and says what it did. Harm of the first sort leaves checksums as
they are; `forge` makes new ones, so that only the sense of what is said can tell.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flatshard.checkpoint.files import _CHECK
from flatshard.checkpoint.manifest import _checks, _encoded

# What no size, name, dtype or place of a small model is.
_LIES = [
    -1,
    2**31,
    2**40,
    2**60,
    2**64,
    10**30,
    True,
    None,
    0.5,
    "",
    "../outside",
    "/etc/hostname",
    "x\0y",
    [],
    {},
    [[]],
]
_LIES += ["F128", {"tensor": "model/none"}, {"code": "1"}, [2**40, 2**40], [-1, -1], [0] * 70, "rank-99999.safetensors"]


class Bomb:
    """Makes a folder where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def hurt(folder: Path, draw: random.Random) -> str:
    """What happens to files: bits, ends, places, and other files in their place."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    kinds = [
        "flip",
        "flip",
        "flip",
        "cut",
        "missing",
        "renamed",
        "noise",
        "pickle",
        "longer",
        "zeros",
        "moved",
        "swapped",
    ]
    kind = draw.choice(kinds)
    place = draw.randrange(len(content))
    if kind == "flip":
        content[place] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "noise":
        content[:] = draw.randbytes(len(content))
    elif kind == "pickle":
        content[:] = pickle.dumps(Bomb()).ljust(len(content), b"\0")
    elif kind == "longer":
        content += draw.randbytes(9)
    elif kind == "zeros":
        content[place : place + 400] = bytes(len(content[place : place + 400]))
    elif kind == "moved":
        length, other = draw.randrange(8, 200), draw.randrange(len(content))
        content[place : place + length] = content[other : other + length]
    if kind in ("missing", "renamed"):
        file.unlink() if kind == "missing" else file.rename(file.with_name("other"))
    elif kind == "swapped":
        other = draw.choice(files)
        content, theirs = other.read_bytes(), file.read_bytes()
        file.write_bytes(content)
        other.write_bytes(theirs)
    else:
        file.write_bytes(content)
    return f"{kind} {file.name}"


def lie(tree: Any, draw: random.Random) -> str:
    """Change one thing, anywhere in nested lists and dicts."""
    path = []
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            tree.append(draw.choice(_LIES)) if isinstance(tree, list) else tree.update(more=1)
            return f"added at {path}"
        key = draw.choice(keys)
        path.append(key)
        if isinstance(tree[key], (dict, list)) and draw.random() < 0.8:
            tree = tree[key]
            continue
        kind = draw.choice(["said", "said", "said", "near", "gone", "twice"])
        if kind == "gone":
            del tree[key]
        elif kind == "twice" and isinstance(tree, list):
            tree.append(tree[key])
        elif kind == "near" and type(tree[key]) is int:
            tree[key] += draw.choice([-8, -1, 1, 4, 1 << 20])
        else:
            tree[key] = draw.choice(_LIES)
        return f"{kind} {path}"


# Of flatshard's own


def forge_manifest(folder: Path, draw: random.Random) -> str:
    """A manifest that lies, with the checksums of its lies."""
    file = folder / "manifest.json"
    body = json.loads(file.read_bytes())["body"]
    harm = _forge_rank_file(folder, body, draw) if draw.random() < 0.25 else lie(body, draw)
    if harm.startswith("near ['saved']"):
        return "none: the time is another"
    with suppress(LookupError, TypeError, AttributeError):  # nothing that has checksums, after some lies
        for key, check in _checks(body).items():
            body["tensors"][key]["check"] = check
    digest = hashlib.sha256(_encoded(body)).hexdigest()
    file.write_text(json.dumps({"sha256": digest, "body": body}))
    return f"manifest: {harm}"


def _forge_rank_file(folder: Path, body: Any, draw: random.Random) -> str:
    """The header of a rank's file lies, and the manifest has the checksum of that."""
    rank = draw.randrange(len(body["files"]))
    file = folder / f"rank-{rank:05d}.safetensors"
    header, data = read_header(file)
    own = [name for name in header if name.startswith(("extra/", "__metadata__"))]
    name = draw.choice(own)
    if name == "__metadata__" and draw.random() < 0.5:
        extra = [json.loads(header[name]["flatshard.extra"])]
        harm = lie(extra, draw)
        header[name]["flatshard.extra"] = json.dumps(extra[0] if extra else 7)
    else:
        harm = lie(header[name], draw)
    write_header(file, header, data)
    length = file.stat().st_size - len(data)
    digest = hashlib.sha256(file.read_bytes()[:length]).hexdigest()
    body["files"][rank] = {"bytes": length + len(data), "header": length, "sha256": digest}
    return f"header of rank {rank}, {name}: {harm}"


# Of safetensors


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(file: Path, header: Any, data: bytes, length: int | None = None) -> None:
    """A file with this header, and flatshard's checksum of it if it has one."""

    def encoded():
        text = json.dumps(header, separators=(",", ":")).encode()
        return (len(text) if length is None else length).to_bytes(8, "little") + text

    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and _CHECK in metadata:
        metadata[_CHECK] = f"{0:08x}"
        metadata[_CHECK] = f"{zlib.crc32(encoded()):08x}"
    file.write_bytes(encoded() + data)


def forge_safetensors(folder: Path, draw: random.Random) -> str:
    """A header, or an index, that lies."""
    file = draw.choice(sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")))
    if file.suffix == ".json":
        index = json.loads(file.read_bytes())
        harm = lie(index["weight_map"] if draw.random() < 0.8 else index, draw)
        file.write_text(json.dumps(index))
        return f"index: {harm}"
    header, data = read_header(file)
    if draw.random() < 0.1:
        length = draw.choice([0, 7, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
        write_header(file, header, data, length)
        return f"header: length {length}"
    names = [name for name in header if name != "__metadata__"]
    if draw.random() < 0.15 and len(names) > 1:
        one, two = draw.sample(names, 2)
        what = draw.choice(["data_offsets", "shape", "dtype"])
        header[one][what] = header[two][what]
        write_header(file, header, data)
        return f"header: {one} has {what} of {two}"
    harm = lie(header, draw)
    write_header(file, header, data)
    return f"header: {harm}"


# Of torch


def forge_metadata(folder: Path, draw: random.Random) -> str:
    """An index of DCP that lies, or that runs code."""
    file = folder / ".metadata"
    found = pickle.loads(file.read_bytes())
    kind = draw.choice(["place", "place", "size", "chunk", "dtype", "bomb", "gone", "planner", "class"])
    lies = [value for value in _LIES if not isinstance(value, (dict, list))]
    name, entry = draw.choice([item for item in found.state_dict_metadata.items() if hasattr(item[1], "size")])
    if kind == "place":
        info = draw.choice(list(found.storage_data.values()))
        what = draw.choice(["relative_path", "offset", "length"])
        value = draw.choice(
            [*lies, *([getattr(info, what) + draw.choice([-64, 1, 64])] if what != "relative_path" else [])]
        )
        object.__setattr__(info, what, value)
    elif kind == "size":
        entry.size = draw.choice([(2**40,), (2**31, 2**31), (-1,), (1,), 5, None, (*entry.size, 1)])
    elif kind == "chunk":
        chunk = draw.choice(entry.chunks)
        chunk.sizes = draw.choice([(2**40,), (-1,) * len(entry.size), (0,) * len(entry.size), None])
    elif kind == "dtype":
        entry.properties.dtype = draw.choice([torch.int32, torch.float64, "float32", None])
    elif kind == "gone":
        found.storage_data.pop(draw.choice(list(found.storage_data)))
    elif kind == "planner":
        found.planner_data[name] = draw.choice([(), ("model",), (name, name), 7, ("optimizer", "state")])
    elif kind == "class":
        found.storage_meta = draw.choice([Path, random.Random, draw])  # no part of an index
    content = pickle.dumps(found)
    if kind == "bomb":
        found.planner_data["bomb"] = Bomb()
        content = pickle.dumps(found)
    file.write_bytes(content)
    return f".metadata: {kind} of {name}"


def forge_archive(folder: Path, draw: random.Random) -> str:
    """A file of torch.save of which a part is another's, with the checksums of that."""
    file = next(path for path in folder.iterdir() if path.suffix == ".pt")
    with zipfile.ZipFile(io.BytesIO(file.read_bytes())) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    name = draw.choice(list(parts))
    kind = draw.choice(["bomb", "cut", "noise", "flip", "compressed", "twice", "gone"])
    if kind == "bomb":
        name = next(each for each in parts if each.endswith("data.pkl"))
        parts[name] = pickle.dumps(Bomb(), 2)
    elif kind == "noise":
        parts[name] = draw.randbytes(len(parts[name]))
    elif kind == "cut":
        parts[name] = parts[name][: draw.randrange(len(parts[name]))]
    elif kind == "flip":
        name = next(each for each in parts if each.endswith("data.pkl"))
        changed = bytearray(parts[name])
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        parts[name] = bytes(changed)
    elif kind == "gone":
        del parts[name]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED) as new:
        for each, content in parts.items():
            new.writestr(each, content)
        if kind == "twice":
            new.writestr(name, parts[name])
    return f"archive: {kind} {name}"


def harmed(good: Path, bad: Path, ways: list[Callable[[Path, random.Random], str]], draw: random.Random) -> str:
    """A copy of a checkpoint with one harm; says which."""
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)
    return draw.choice(ways)(bad, draw)

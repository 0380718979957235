"""Training data: the tokens, conversations among them, and the rows of each batch."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from flatshard.train.bundled_text import bundled_text
from flatshard.train.model import NO_TARGET
from flatshard.train.settings import Mistake, TrainSettings

_VALIDATION_PART = 20  # one twentieth of the tokens is for validation
Message = dict[str, str]
# Returns the text of messages; with True, followed by the beginning of an answer.
Render = Callable[[Sequence[Message], bool], str]


@dataclass(frozen=True)
class Text:
    """All documents as one sequence of tokens. Without a tokenizer, tokens are bytes.

    For conversations, ``answers`` is a mask of tokens that count in the loss, and ``render`` turns messages into text.
    """

    tokens: Tensor
    vocab: int
    name: str
    tokenizer: Any = None
    answers: Tensor | None = None
    render: Render | None = None

    @property
    def fingerprint(self) -> str:
        """The number of tokens, and a checksum of the first and last of them."""
        ends = torch.cat([self.tokens[:4096], self.tokens[-4096:]]).numpy().tobytes()
        return f"{len(self.tokens):,} tokens (checksum {crc32(ends):08x})"

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt; for conversations, of a message of the user with this text."""
        if self.render is None:
            return _encode(self.tokenizer, text)
        return _encode(self.tokenizer, self.render([{"role": "user", "content": text}], True), special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, to be shown: a replacement for control characters, which may upset a terminal."""
        if self.tokenizer is not None:
            return _shown(str(self.tokenizer.decode(list(tokens))))
        if self.vocab <= 256:
            # Models may have more tokens than there are bytes. No text has the byte 255: it is shown as a replacement.
            return _shown(bytes(min(token, 255) for token in tokens).decode(errors="replace"))
        return " ".join(map(str, tokens))  # without a tokenizer, the meaning of tokens is unknown

    def beginning(self) -> list[int]:
        """The first five tokens or, of bytes, the first words in forty bytes."""
        start = self.tokens[:40].tolist()
        if self.tokenizer is None and self.vocab <= 256:
            return start[: bytes(start).rfind(b" ") + 1] or start
        return start[:5]


def load_text(settings: TrainSettings) -> Text:
    """Load the data of a run. Files of bytes or tokens are memory-mapped. Mistake if the data cannot be used."""
    path = settings.data
    file = settings.tokenizer_file
    tokenizer = None if file is None else _tokenizer(file)
    vocab = 256 if tokenizer is None else int(tokenizer.get_vocab_size())
    answers = render = None
    if path is not None and path.suffix == ".jsonl":
        render = chat_template(file and file.parent)
        tokens, answers = load_chat(path, partial(_encode, tokenizer, special=False), render)
    elif path is None or (path.is_file() and path.suffix != ".bin"):
        tokens = _text(path, tokenizer)
    elif path.is_dir():
        tokens, vocab = _dataset(path, settings, tokenizer, vocab)
    elif tokenizer is None and settings.vocab is None:
        raise Mistake(f"--data {path}: has tokens; give --tokenizer FILE, or --vocab N, the vocabulary size")
    else:
        tokens = _binary(path, settings.token_dtype)
    name = path.name if path else "bundled stories"
    text = Text(tokens, settings.vocab or vocab, name, tokenizer, answers, render)
    _check(text, settings)
    return text


def _shown(text: str) -> str:
    return "".join("\ufffd" if unicodedata.category(each) == "Cc" and each not in "\r\n\t" else each for each in text)


def _encode(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """The tokens of a text. For a rendered conversation, whose template has written special tokens, add none."""
    if tokenizer is None:
        return list(text.encode())
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


def _binary(path: Path, dtype: str) -> Tensor:
    kind = getattr(torch, dtype)
    size, rest = divmod(path.stat().st_size, kind.itemsize)
    if rest:
        raise Mistake(f"--data {path}: its size is not a multiple of {kind.itemsize} bytes; give another --token-dtype")
    return torch.from_file(str(path), shared=False, size=size, dtype=kind)


def _text(path: Path | None, tokenizer: Any) -> Tensor:
    if path is not None and tokenizer is None:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    try:
        text = bundled_text() if path is None else path.read_text()
    except UnicodeDecodeError as error:
        raise Mistake(f"--data {path}: is not UTF-8 text; a file of tokens must end in .bin") from error
    return torch.tensor(_encode(tokenizer, text), dtype=torch.int32)


def _tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise Mistake("--tokenizer: tokenizers is not installed: pip install 'flatshard[hf]'") from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other type
        raise Mistake(f"--tokenizer {path}: {error}") from error


def _dataset(path: Path, settings: TrainSettings, tokenizer: Any, vocab: int) -> tuple[Tensor, int]:
    """The tokens of all documents of a dataset, with the end token after each, and the vocabulary size."""
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise Mistake(f"--data {path}: for a folder, datasets must be installed: pip install datasets") from error
    try:
        dataset = load_from_disk(str(path))
    except Exception as error:
        raise Mistake(f"--data {path}: is not a dataset that save_to_disk has written: {error}") from error
    if isinstance(dataset, DatasetDict):
        dataset = dataset["train" if "train" in dataset else next(iter(dataset))]
    if settings.column not in dataset.column_names:
        raise Mistake(f"--column {settings.column}: the columns of {path} are {', '.join(dataset.column_names)}")
    end = [] if settings.end_token is None else [settings.end_token]
    packed: list[Tensor] = []
    for number, document in enumerate(dataset[settings.column]):
        if isinstance(document, str):
            document = _encode(tokenizer, document)
        elif not isinstance(document, list):
            what = f"row {number} of column {settings.column} is {document!r}"
            raise Mistake(f"--data {path}: {what}, neither text nor a list of tokens; remove such rows")
        elif tokenizer is None and settings.vocab is None:
            raise Mistake(f"--data {path}: has tokens; give --tokenizer FILE, or --vocab N, the vocabulary size")
        packed.append(torch.tensor([*document, *end], dtype=torch.int32))
    return torch.cat(packed) if packed else torch.empty(0, dtype=torch.int32), max(vocab, max(end, default=0) + 1)


def load_chat(path: Path, encode: Callable[[str], Sequence[int]], render: Render) -> tuple[Tensor, Tensor]:
    """The tokens of all conversations (lines of JSON), and a mask of the assistant's answers, which the loss counts."""
    tokens: list[int] = []
    answers: list[bool] = []
    for messages in _conversations(path):
        for text, is_answer in _turns(messages, render):
            ids = encode(text)
            tokens += ids
            answers += [is_answer] * len(ids)
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(answers)


def _conversations(path: Path) -> Iterator[list[Message]]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            messages = json.loads(line)["messages"]
            cleaned = [{"role": each["role"], "content": each["content"]} for each in messages]
        except UnicodeDecodeError as error:
            raise Mistake(f"--data {path}, line {number}: is not UTF-8") from error
        except (ValueError, KeyError, TypeError) as error:
            form = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
            raise Mistake(f"--data {path}, line {number}: must have the form {form}") from error
        if not all(isinstance(text, str) for each in cleaned for text in each.values()):
            raise Mistake(f"--data {path}, line {number}: roles and contents must be strings")
        if not any(each["role"] == "assistant" for each in cleaned):
            raise Mistake(f"--data {path}, line {number}: no message has the role assistant; remove the line")
        yield cleaned


def _turns(messages: Sequence[Message], render: Render) -> Iterator[tuple[str, bool]]:
    """A conversation in parts of text, each with whether it is an answer of the assistant."""
    done = ""
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:place], True), render(messages[: place + 1], False)
            if not (before.startswith(done) and after.startswith(before)):
                raise Mistake("--tokenizer: its chat template changes a message when others follow; use another one")
            yield before[len(done) :], False
            yield after[len(before) :], True
            done = after


def chat_template(folder: Path | None) -> Render:
    """The chat template of the tokenizer in ``folder``, as Transformers finds it, or else ChatML."""
    if folder is None or not (folder / "tokenizer_config.json").exists():
        return _chatml
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise Mistake("--data: a chat template needs transformers: pip install 'flatshard[hf]'") from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # of any type, like those of configurations
        raise Mistake(f"--data: the tokenizer in {folder} has no chat template that can be read: {error}") from error
    if not tokenizer.chat_template:
        return _chatml

    def render(messages: Sequence[Message], answers_next: bool) -> str:
        made = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answers_next)
        return str(made)

    return render


def _chatml(messages: Sequence[Message], answers_next: bool) -> str:
    text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    return text + "<|im_start|>assistant\n" * answers_next


def _check(text: Text, settings: TrainSettings) -> None:
    """Mistake if the text is too short, or a token is outside of the vocabulary."""
    data, context = settings.data or "the bundled text", settings.context
    training, held = _parts(text, settings)
    if training <= context or (settings.val_every and held <= context):
        what = "bytes" if text.tokenizer is None and text.vocab == 256 else "tokens"
        part = f", {held} of them for validation" if settings.val_every else ""
        size = f"{data} has {len(text.tokens)} {what}{part}"
        raise Mistake(f"{size}; --context {context} needs more: give a smaller --context, or more data")
    # On a GPU, a kernel would fail without naming the token.
    most = int(text.tokens.numpy().max())  # torch has no maximum of unsigned integers; 1 GB takes a tenth of a second
    if most >= text.vocab:
        raise Mistake(
            f"{data} has token {most}; the vocabulary is 0 to {text.vocab - 1}: "
            "give a larger --vocab, the --tokenizer that made the tokens, or their --token-dtype"
        )


def _parts(text: Text, settings: TrainSettings) -> tuple[int, int]:
    """The numbers of tokens for training and, at the end of the text, for validation."""
    held = len(text.tokens) // _VALIDATION_PART if settings.val_every else 0
    return len(text.tokens) - held, held


@lru_cache(maxsize=4)
def _epoch(rows: int, slack: int, seed: int, number: int) -> tuple[Tensor, int]:
    """The order of an epoch's rows, and the offset of its first row in the tokens."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.randperm(rows, generator=draw), int(torch.randint(slack + 1, (), generator=draw))


def batch_rows(text: Text, settings: TrainSettings, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's (tokens, targets) of a step, counted from 1, both of shape (rows, context).

    Rows are consecutive windows of the tokens. Each epoch reads every row once, in another order and with another
    offset. The concatenated rows of all ranks depend only on the seed and the step, not on the number of ranks, so a
    run that is continued reads the rows that it would have read without a break.
    """
    context, rows = settings.context, settings.rows_per_rank(world)
    training, _ = _parts(text, settings)
    windows = (training - 1) // context
    slack = training - 1 - windows * context
    if windows > 1:
        windows, slack = windows - 1, slack + context
    first = (step - 1) * settings.batch + rank * rows
    starts = []
    for row in range(first, first + rows):
        order, begin = _epoch(windows, slack, settings.seed, row // windows)
        starts.append(begin + int(order[row % windows]) * context)
    return _windows(text, torch.tensor(starts), context)


def validation_rows(text: Text, settings: TrainSettings, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's (tokens, targets) for validation, with the same number of rows on every rank."""
    training, held = _parts(text, settings)
    rows = min(settings.val_rows, (held - 1) // settings.context) // world
    if not rows:
        raise Mistake(
            f"--val-every {settings.val_every}: needs one row of --context {settings.context} for each of {world} "
            f"processes; {held} tokens are for validation, and --val-rows is {settings.val_rows}"
        )
    numbers = torch.arange(rank * rows, (rank + 1) * rows)
    return _windows(text, training + numbers * settings.context, settings.context)


def _windows(text: Text, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    parts = [slice(start, start + context + 1) for start in starts.tolist()]
    window = torch.stack([text.tokens[part].long() for part in parts])
    tokens, targets = window[:, :-1], window[:, 1:]
    if text.answers is not None:
        counts = torch.stack([text.answers[part] for part in parts])[:, 1:]
        targets = targets.masked_fill(~counts, NO_TARGET)
    return tokens, targets


def loss_scale(text: Text, settings: TrainSettings, step: int) -> float:
    """The factor that turns the mean loss over all tokens of a batch into the mean over tokens that count."""
    if text.answers is None:
        return 1.0
    _, targets = batch_rows(text, settings, step, 0, 1)
    return targets.numel() / max(1, int((targets != NO_TARGET).sum()))

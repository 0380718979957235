"""Conversations as training data: lines of JSON with messages. Only the assistant's messages count in the loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatshard.train.settings import Mistake

Message = dict[str, str]
# Returns the text of messages; with True, followed by the beginning of an answer.
Render = Callable[[Sequence[Message], bool], str]


def load_chat(path: Path, encode: Callable[[str], Sequence[int]], render: Render) -> tuple[Tensor, Tensor]:
    """The tokens of all conversations, and a mask of those that are answers of the assistant."""
    tokens: list[int] = []
    answers: list[bool] = []
    for messages in _conversations(path):
        for text, is_answer in _parts(messages, render):
            ids = encode(text)
            tokens += ids
            answers += [is_answer] * len(ids)
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(answers)


def _conversations(path: Path) -> Iterator[list[Message]]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            messages = json.loads(line)["messages"]
            found = [{"role": each["role"], "content": each["content"]} for each in messages]
        except (ValueError, KeyError, TypeError) as error:
            form = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
            raise Mistake(f"--data {path}, line {number}: must have the form {form}") from error
        if not all(isinstance(text, str) for each in found for text in each.values()):
            raise Mistake(f"--data {path}, line {number}: roles and contents must be strings")
        if not any(each["role"] == "assistant" for each in found):
            raise Mistake(f"--data {path}, line {number}: no message has the role assistant; remove the line")
        yield found


def _parts(messages: Sequence[Message], render: Render) -> Iterator[tuple[str, bool]]:
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
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    if not tokenizer.chat_template:
        return _chatml

    def render(messages: Sequence[Message], answers_next: bool) -> str:
        made = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answers_next)
        return str(made)

    return render


def _chatml(messages: Sequence[Message], answers_next: bool) -> str:
    text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    return text + "<|im_start|>assistant\n" * answers_next

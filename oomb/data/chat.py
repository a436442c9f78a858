"""Tokenize conversations with a chat template and find the tokens that the assistant says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
SHAREGPT = (
    'this is the ShareGPT format; rename its keys to "messages", "role" (human to user, gpt to assistant) and "content"'
)
REMEDY = "give the tokenizer a chat template with {% generation %} … {% endgeneration %} around the assistant's turns"
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]


def is_sharegpt(value: Any) -> bool:
    """Return whether a value is a conversation in the ShareGPT format, judged by its first turn."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and {"from", "value"} <= set(value[0])


def checked_messages(value: Any, key: str, where: str) -> Messages:
    """Return the messages of a record. Raise ValueError if they are not in the expected format.

    Args:
        value: The record's value.
        key: Its key in the record.
        where: File and line, for messages.
    """
    expected = f'{where}: "{key}" must be a list of {{"role": "…", "content": "…"}}'
    if not isinstance(value, list):
        raise ValueError(f"{expected}, found a {type(value).__name__}")
    if is_sharegpt(value):
        raise ValueError(f"{expected}; {SHAREGPT}")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'{expected}; message {number} has no "role"')
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise ValueError(f'{expected}; message {number} has no "content" of text')
        # Tables fill missing keys with None, which a template would take for a value.
        messages.append({name: part for name, part in message.items() if part is not None or name == "content"})
    return messages


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Name the conversation in errors of its chat template."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{where}: the chat template rejects this conversation: {error}") from error


class Chat:
    """Chat template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"{where}: messages need a chat template and this tokenizer has none; pass the tokenizer of a chat "
                'model with --tokenizer_name, or give {"prompt": "…", "completion": "…"}'
            )
        self._tokenizer = tokenizer
        self._added = np.array(sorted(getattr(tokenizer, "added_tokens_decoder", {})), dtype=np.int64)

    def assistant_turns(self, messages: Messages, tools: Any, where: str) -> tuple[list[int], Spans]:
        """Return the token ids of a conversation, and the token spans that the assistant says."""
        with _named(where):
            has_markers = _MARKER.search(self._tokenizer.get_chat_template(None, tools)) is not None
        if has_markers:
            text, turns = self._marked(messages, tools, where)
            return self._tokens(text, turns, where)
        text = self._render(messages, tools, where)
        turns = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            head = self._render(messages[:index], tools, where, reply=True) if index else ""
            is_last = index == len(messages) - 1
            upto = text if is_last else self._render(messages[: index + 1], tools, where)
            if not (text.startswith(head) and text.startswith(upto) and len(head) <= len(upto)):
                raise ValueError(
                    f"{where}: the chat template writes message {index}, or what precedes it, differently when the "
                    f"conversation ends there, so the assistant's part cannot be found; {REMEDY}"
                )
            turns.append((len(head), len(upto)))
        return self._tokens(text, turns, where)

    def answer(self, prompt: Messages, completion: Messages, tools: Any, where: str) -> tuple[list[int], Spans]:
        """Return the token ids of a prompt and its completion, and the span of the completion."""
        text = self._render(prompt + completion, tools, where)
        head = self._render(prompt, tools, where, reply=completion[0]["role"] == ASSISTANT)
        if not text.startswith(head):
            raise ValueError(
                f"{where}: the chat template writes the prompt differently when a completion follows; give both as "
                '"messages"'
            )
        return self._tokens(text, [(len(head), len(text))], where)

    def _marked(self, messages: Messages, tools: Any, where: str) -> tuple[str, Spans]:
        """Return the text of a conversation, and the character spans between the template's markers.

        `apply_chat_template` can return a token mask, but it relies on token offsets. Many tokenizers leave whitespace
        out of those, so turns that begin or end with whitespace would be masked wrongly.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self._tokenizer.special_tokens_map, "tools": tools, "return_assistant_tokens_mask": True}
        with _named(where):
            [text], [turns] = render_jinja_template(
                [messages], chat_template=self._tokenizer.get_chat_template(None, tools), **options
            )
        return text, [(int(start), int(stop)) for start, stop in turns]

    def _render(self, messages: Messages, tools: Any, where: str, *, reply: bool = False) -> str:
        with _named(where):
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=reply
            )

    def _tokens(self, text: str, turns: Spans, where: str) -> tuple[list[int], Spans]:
        """Return the token ids of a text, and the token spans of its character spans."""
        is_fast = bool(getattr(self._tokenizer, "is_fast", False))
        found = self._tokenizer(
            text, add_special_tokens=False, verbose=False, **({"return_offsets_mapping": True} if is_fast else {})
        )
        ids = list(found["input_ids"])
        fixed = np.flatnonzero(np.isin(ids, self._added)) if is_fast else np.empty(0, dtype=np.int64)
        ends = [found["offset_mapping"][index][1] for index in fixed]

        def token_at(char: int) -> int:
            # Tokenizers split text at added tokens first, so it is enough to start from the last one.
            last = int(np.searchsorted(ends, char, side="right")) - 1
            for first, start in ((int(fixed[last]) + 1, ends[last]), (0, 0)) if last >= 0 else ((0, 0),):
                before = self._tokenizer(text[start:char], add_special_tokens=False, verbose=False)["input_ids"]
                if ids[first : first + len(before)] == list(before):
                    return first + len(before)
            raise ValueError(
                f"{where}: a token spans the start or end of the assistant's turn "
                f"({text[max(char - 10, 0) : char + 10]!r}), so the loss cannot start or end there; {REMEDY}"
            )

        return ids, [(token_at(start), token_at(stop)) for start, stop in turns]

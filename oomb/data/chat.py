"""Conversations to tokens, and which of them are the assistant's."""

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
    'this is the ShareGPT form; rename its keys to "messages", "role" (human to user, gpt to assistant) and "content"'
)
REMEDY = "give the tokenizer a chat template with {% generation %} … {% endgeneration %} around what the assistant says"
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]


def is_sharegpt(value: Any) -> bool:
    """By its first turn."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and {"from", "value"} <= set(value[0])


def checked_messages(value: Any, key: str, where: str) -> Messages:
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
        # Tables fill what a message lacks with None, which a template would take for something.
        messages.append({name: part for name, part in message.items() if part is not None or name == "content"})
    return messages


@contextmanager
def _named(where: str) -> Iterator[None]:
    """What a template refuses, with the conversation."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{where}: the chat template does not take this conversation: {error}") from error


class Chat:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"{where}: the tokenizer has no chat template, so messages cannot be written out; name the tokenizer "
                'of a chat model with --tokenizer_name, or give {"prompt": "…", "completion": "…"}'
            )
        self._tokenizer = tokenizer
        self._added = np.array(sorted(getattr(tokenizer, "added_tokens_decoder", {})), dtype=np.int64)

    def assistant_turns(self, messages: Messages, tools: Any, where: str) -> tuple[list[int], Spans]:
        """Token ids of a conversation, and the spans of them that the assistant says."""
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
                    f"{where}: the chat template writes message {index}, or what leads up to it, otherwise when the "
                    f"conversation ends there, so the assistant's part cannot be told; {REMEDY}"
                )
            turns.append((len(head), len(upto)))
        return self._tokens(text, turns, where)

    def answer(self, prompt: Messages, completion: Messages, tools: Any, where: str) -> tuple[list[int], Spans]:
        """The same where all of the completion is to be learnt."""
        text = self._render(prompt + completion, tools, where)
        head = self._render(prompt, tools, where, reply=completion[0]["role"] == ASSISTANT)
        if not text.startswith(head):
            raise ValueError(
                f"{where}: the chat template writes the prompt otherwise when a completion follows; give both as "
                '"messages"'
            )
        return self._tokens(text, [(len(head), len(text))], where)

    def _marked(self, messages: Messages, tools: Any, where: str) -> tuple[str, Spans]:
        """A conversation written out, and the characters between the template's markers.

        `apply_chat_template` has a mask of them too, but by the offsets of tokens: those of many tokenizers leave out
        whitespace, and a turn that begins or ends with some is masked wrongly.
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
        """Spans of characters to spans of tokens."""
        is_fast = bool(getattr(self._tokenizer, "is_fast", False))
        found = self._tokenizer(
            text, add_special_tokens=False, verbose=False, **({"return_offsets_mapping": True} if is_fast else {})
        )
        ids = list(found["input_ids"])
        fixed = np.flatnonzero(np.isin(ids, self._added)) if is_fast else np.empty(0, dtype=np.int64)
        ends = [found["offset_mapping"][index][1] for index in fixed]

        def border(place: int) -> int:
            # Text is cut at added tokens before anything else, so it is enough to look from the last of them on.
            last = int(np.searchsorted(ends, place, side="right")) - 1
            for first, start in ((int(fixed[last]) + 1, ends[last]), (0, 0)) if last >= 0 else ((0, 0),):
                before = self._tokenizer(text[start:place], add_special_tokens=False, verbose=False)["input_ids"]
                if ids[first : first + len(before)] == list(before):
                    return first + len(before)
            raise ValueError(
                f"{where}: a token spans the beginning or the end of what the assistant says "
                f"({text[max(place - 10, 0) : place + 10]!r}), so the loss cannot begin or end there; {REMEDY}"
            )

        return ids, [(border(start), border(stop)) for start, stop in turns]

"""Conversations and completions: which tokens loss is computed on, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets_made import HELLO, examples, opened, texts_with_loss, write_lines
from families import build
from tokenizer import CHAT, MARKED, small_tokenizer

from oomb.data.encode import SEPARATOR_ID
from oomb.data.tokenize import Job, tokenize

THINKING = "{{ '<think>' if loop.last and message['role'] == 'assistant' }}"


@pytest.mark.parametrize("template", [CHAT, MARKED], ids=["by prefixes", "by markers"])
@pytest.mark.parametrize("first", [None, "<|end|>"])
def test_the_loss_of_a_conversation_is_on_the_assistants_turns(
    tmp_path: Path, template: str, first: str | None
) -> None:
    tokenizer = small_tokenizer(template, first=first)
    path = write_lines(tmp_path / "a.jsonl", {"messages": HELLO, "prompt": "of other use"})
    split = opened(path, tokenizer=tokenizer, max_length=500)
    assert split.packing == "documents"
    assert texts_with_loss(split, tokenizer) == [["Fine.<|stop|>\n", " Still\nfine, thank you.<|stop|>\n"]]
    [(ids, labels)] = examples(split.train)
    theirs = tokenizer.apply_chat_template(HELLO, return_dict=True, return_assistant_tokens_mask=template == MARKED)
    assert ids == theirs["input_ids"]
    if template == MARKED and first is not None:
        # Without trimmed offsets, the mask from transformers is right.
        assert [label != -100 for label in labels] == [bool(flag) for flag in theirs["assistant_masks"]]


def test_a_conversation_of_a_hundred_turns(tmp_path: Path) -> None:
    turns = [
        {"role": role, "content": f"\n {role} {number}\n\n"} for number in range(50) for role in ("user", "assistant")
    ]
    marked = small_tokenizer(MARKED)
    plain = small_tokenizer(CHAT.replace("{{ message['content'] }}", "{{ message['content'] | trim }}"))
    trimmed = [{**turn, "content": turn["content"].strip()} for turn in turns]
    path = write_lines(tmp_path / "a.jsonl", {"messages": turns})
    expected = write_lines(tmp_path / "b.jsonl", {"messages": trimmed})
    same = [examples(opened(p, tokenizer=t, max_length=9999).train) for p, t in ((path, plain), (expected, marked))]
    assert same[0] == same[1]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"messages": HELLO})
    # Templates of reasoning models drop all thoughts but the last.
    thinking = CHAT.replace("{{ message['content'] }}", THINKING + "{{ message['content'] }}")
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the chat template writes message 2, or .*% generation %"):
        opened(path, tokenizer=small_tokenizer(thinking))
    one_turn = write_lines(tmp_path / "b.jsonl", {"messages": HELLO[:3]})
    assert texts_with_loss(opened(one_turn, tokenizer=small_tokenizer(thinking)), small_tokenizer()) == [
        ["<think>Fine.<|stop|>\n"]
    ]


def test_a_token_across_the_border_of_a_turn_is_refused(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    merged = next(t for t in tokenizer.get_vocab() if len(t) == 4 and t.isalpha() and t.isascii())
    turns = [{"role": "user", "content": merged[:2]}, {"role": "assistant", "content": merged[2:]}]
    path = write_lines(tmp_path / "a.jsonl", {"messages": turns})
    with pytest.raises(ValueError, match=r"a\.jsonl:1: a token spans the start or end.*% generation %"):
        opened(path, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", r'a\.jsonl:1: "messages" must be a list of .*found a str'),
        ([{"content": "a"}], r'a\.jsonl:1: "messages" must be .*; message 0 has no "role"'),
        ([{"role": "user", "content": "a"}, {"role": "assistant"}], r'message 1 has no "content" of text'),
        ([{"role": "user", "content": 5}], r'message 0 has no "content" of text'),
        ([{"role": "bot", "content": "a"}], r"a\.jsonl:1: the chat template rejects.*no bots"),
        (
            [{"role": "user", "content": "a"}],
            r"nothing to train on: 1 conversation without a token to predict.*a\.jsonl:1",
        ),
        ([], r"nothing to train on: 1 empty document skipped.*a\.jsonl:1"),
    ],
)
def test_a_bad_conversation_is_named(tmp_path: Path, messages: Any, message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"messages": messages})
    refusal = "{% if messages and messages[0]['role'] == 'bot' %}{{ raise_exception('no bots') }}{% endif %}"
    with pytest.raises(ValueError, match=message):
        opened(path, tokenizer=small_tokenizer(refusal + CHAT))


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_the_sharegpt_form_is_recognized(tmp_path: Path, key: str) -> None:
    turns = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    path = write_lines(tmp_path / "a.jsonl", *[{"id": "1", key: turns}] * 30)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: .*ShareGPT format; rename .*human to user, gpt to assistant"):
        opened(path, tokenizer=small_tokenizer())
    write_lines(path, {"conversations": HELLO})
    with pytest.raises(ValueError, match=r'a\.jsonl:1: .*found "conversations"; rename "conversations" to "messages"'):
        opened(path, tokenizer=small_tokenizer())


@pytest.mark.parametrize(
    "row",
    [
        {"body": "a"},
        {"text": 5},
        {"messages": "hello"},
        {"messages": [{"role": "bot", "content": "a"}]},
        {"messages": HELLO, "tools": "search"},
        "not JSON",
    ],
)
def test_where_all_lines_are_wrong_the_first_is_named(tmp_path: Path, row: Any) -> None:
    path = write_lines(tmp_path / "a.jsonl", "", *[row] * 30)
    tokenizer = small_tokenizer("{% if messages[0]['role'] == 'bot' %}{{ raise_exception('no') }}{% endif %}" + CHAT)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: "):
        opened(path, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: "):
        tokenize(Job(dataset=str(path), output=tmp_path / "tokens", load_tokenizer=lambda: tokenizer))
    assert not (tmp_path / "tokens").exists()


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"messages": HELLO})
    with pytest.raises(ValueError, match=r"a\.jsonl:1: .* this tokenizer has none.*--tokenizer_name"):
        opened(path, tokenizer=small_tokenizer(None))
    with pytest.raises(ValueError, match=r"a\.jsonl:1: messages need a tokenizer with a chat template"):
        opened(path)


def test_a_conversation_whose_only_word_is_its_first_has_nothing_to_learn(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    word = {"messages": [{"role": "assistant", "content": "x"}]}
    said = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "?"}]}
    with pytest.raises(ValueError, match=r"nothing to train on: 1 conversation without a token to predict.*a\.jsonl:1"):
        opened(write_lines(tmp_path / "a.jsonl", word), tokenizer=tokenizer)
    split = opened(write_lines(tmp_path / "a.jsonl", word, said), tokenizer=tokenizer)
    assert texts_with_loss(split, tokenizer) == [["?"]]
    assert split.num_documents == 1


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("{% if tools %}{{ tools[0]['name'] }}{% endif %}" + CHAT)
    for tools in ([{"name": "search"}], json.dumps([{"name": "search"}])):
        path = write_lines(tmp_path / "a.jsonl", {"messages": HELLO, "tools": tools})
        [(ids, _)] = examples(opened(path, tokenizer=tokenizer, max_length=500).train)
        assert tokenizer.decode(ids).startswith("search<|turn|>system")
    path = write_lines(tmp_path / "a.jsonl", {"messages": HELLO, "tools": "search"})
    with pytest.raises(ValueError, match=r'a\.jsonl:1: "tools" is not JSON'):
        opened(path, tokenizer=tokenizer)


def test_the_loss_is_on_the_completion(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "2 + 2 =", "completion": " 4"})
    tokenizer = small_tokenizer(first="<|turn|>")
    split = opened(path, tokenizer=tokenizer)
    assert texts_with_loss(split, tokenizer) == [[" 4<|end|>"]]
    assert tokenizer.decode(examples(split.train)[0][0]) == "<|turn|>2 + 2 = 4<|end|>"
    [(ids, labels)] = examples(opened(path).train)
    assert ids == [*b"2 + 2 = 4", SEPARATOR_ID]
    assert labels == [-100] * 7 + ids[7:]
    # If a token would span the boundary, the prompt is tokenized alone, as at inference.
    merged = next(t for t in tokenizer.get_vocab() if len(t) == 4 and t.isalpha() and t.isascii())
    path = write_lines(tmp_path / "b.jsonl", {"prompt": merged[:2], "completion": merged[2:]})
    assert texts_with_loss(opened(path, tokenizer=tokenizer), tokenizer) == [[f"{merged[2:]}<|end|>"]]
    path = write_lines(tmp_path / "c.jsonl", {"prompt": HELLO[:2], "completion": HELLO[2:3]})
    assert texts_with_loss(opened(path, tokenizer=tokenizer), tokenizer) == [["Fine.<|stop|>\n"]]
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "a", "completion": 4})
    with pytest.raises(ValueError, match=r'd\.jsonl:1: "completion" must be a string, found a int'):
        opened(path)
    with pytest.raises(ValueError, match=r'd\.jsonl:1: "prompt" must be a string, found a list'):
        opened(write_lines(tmp_path / "d.jsonl", {"prompt": [], "completion": "a"}))


def test_examples_are_those_of_trl(tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    model, tokenizer = build("llama", vocab_size=512), small_tokenizer(MARKED, first="<|turn|>")
    tokenizer.pad_token = "<|stop|>"
    for rows in (
        [{"text": f"some words {i} here"} for i in range(3)],
        [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}"} for i in range(3)],
        [{"messages": HELLO[:3]}, {"messages": HELLO[1:]}],
    ):
        settings = trl.SFTConfig(
            output_dir=str(tmp_path), assistant_only_loss="messages" in rows[0], max_length=500,
            report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        table = datasets.Dataset.from_list(rows)
        trainer = trl.SFTTrainer(model, settings, train_dataset=table, processing_class=tokenizer)
        batches = [trainer.data_collator([row]) for row in trainer.train_dataset]
        theirs = [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]
        path = write_lines(tmp_path / "a.jsonl", *rows)
        split = opened(path, tokenizer=tokenizer, packing="documents", max_length=500)
        assert sorted(examples(split.train)) == sorted(theirs)

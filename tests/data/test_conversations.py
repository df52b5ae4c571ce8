"""Conversations as token ids: exactly the assistant's tokens count, behind the prompt that the engine would get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.config.schema_supervised import PairDataConfig, SftDataConfig
from verl.data.examples import load_conversations, load_pairs
from verl.data.rendering import Renderer, UnusableError
from verl.errors import DataError
from verl.models.tiny import EOS_ID, byte_tokenizer

SYSTEM, USER, ASSISTANT = 258, 259, 260
TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER, [EOS_ID], {})


def written(conversation: Any) -> str:
    """The tokens that count, as text, the end token as $."""
    ids = [i for i, own in zip(conversation.ids, conversation.written, strict=True) if own]
    return "".join("$" if i == EOS_ID else chr(i) for i in ids)


def test_one_turn_by_hand() -> None:
    found = RENDERER.answer("hi", "yes", "row")
    assert found.ids == [USER, *b"hi", ASSISTANT, *b"yes", EOS_ID]
    assert found.written == [False] * 4 + [True] * 4


TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("abc d", max_size=5)), max_size=7)


@given(TURNS)
def test_only_the_assistants_turns_count(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    reason = "no message of it has the role assistant" if all(role != "assistant" for role, _ in turns) else None
    if turns and turns[0][0] == "assistant":
        reason = "there is no prompt"
    if reason:
        with pytest.raises(UnusableError, match=reason):
            RENDERER.conversation(messages, "row")
        return
    found = RENDERER.conversation(messages, "row")
    assert written(found) == "".join(content + "$" for role, content in turns if role == "assistant")
    assert found.written[-1], "what comes behind the last answer is left out"
    # The tokens before an answer are the prompt that the engine gets there.
    text = TOKENIZER.decode(found.ids)
    last = max(i for i, (role, _) in enumerate(turns) if role == "assistant")
    assert text == TOKENIZER.apply_chat_template(messages[: last + 1], tokenize=False)


def test_what_a_template_writes_behind_the_end_token_is_left_out() -> None:
    """ChatML's line break behind <|im_end|>: the engine stops before it, so nothing samples it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    found = Renderer(tokenizer, [EOS_ID], {}).conversation(messages, "row")
    assert found.ids[-2:] == [ord("d"), EOS_ID]
    assert written(found) == "b$d$"


def test_a_template_without_end_token_gets_one() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert written(Renderer(tokenizer, [EOS_ID], {}).answer("a", "b", "row")) == "b$"


def test_a_prompt_that_is_no_prefix_is_refused() -> None:
    """A template that drops earlier answers (thoughts, say) shows the model another prompt than this row would."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}<|{{ m['role'] }}|>{{ m['content'] }}"
        "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    with pytest.raises(UnusableError, match="differently"):
        Renderer(tokenizer, [EOS_ID], {}).conversation(messages, "row")


def test_plain_text_without_a_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    plain = Renderer(tokenizer, [EOS_ID], {})
    assert plain.answer("ab", "c", "row").ids == [*b"abc", EOS_ID]
    assert written(plain.answer("ab", "c", "row")) == "c$"
    with pytest.raises(DataError, match="no chat template"):
        plain.conversation([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], "row")


# --- files ------------------------------------------------------------------------------------------------------------


def write(folder: Path, rows: list[dict[str, Any]], name: str = "data.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def sft(path: str, **settings: Any) -> Any:
    config = SftDataConfig(train_files=[path], **settings)
    return load_conversations(config.train_files, config, TOKENIZER, [EOS_ID])


def pairs(path: str, **settings: Any) -> Any:
    config = PairDataConfig(train_files=[path], **settings)
    return load_pairs(config.train_files, config, TOKENIZER, [EOS_ID])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]},
        {"prompt": "ab", "response": "c"},
        {"question": "ab", "answer": "c"},
        {"prompt": [{"role": "user", "content": "ab"}], "completion": [{"role": "assistant", "content": "c"}]},
    ],
    ids=["messages", "prompt-response", "question-answer", "prompt-completion"],
)
def test_the_fields_layouts(tmp_path: Path, row: dict[str, Any]) -> None:
    found = sft(write(tmp_path, [row]))
    assert (found.prompts[0], found.responses[0]) == ([USER, *b"ab", ASSISTANT], [ord("c"), EOS_ID])
    assert found.trained[0] == [1, 1]


def test_a_batch_by_hand(tmp_path: Path) -> None:
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    found = sft(write(tmp_path, [{"messages": turns}, {"messages": turns[:2]}]))
    batch = found.batch([0, 1], "train", [7, 8])
    assert batch.tensors["prompts"].tolist() == [[USER, 97, ASSISTANT]] * 2
    assert batch.tensors["responses"].tolist() == [
        [98, EOS_ID, USER, 99, ASSISTANT, 100, EOS_ID],
        [98, EOS_ID, 0, 0, 0, 0, 0],
    ]
    assert batch.tensors["response_mask"].int().tolist() == [[1, 1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert batch.tensors["attention_mask"].sum(1).tolist() == [10, 5]
    assert batch.non_tensor_batch["uid"].tolist() == ["train:7:example:0", "train:8:example:1"]


def test_examples_over_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "ab", "response": "cdef"}, {"prompt": "a", "response": "b"}])
    with pytest.raises(DataError, match=r"1 of 2 examples .* longer than data.max_length=7"):
        sft(path, max_length=7)
    left, right = sft(path, max_length=7, truncation="left"), sft(path, max_length=7, truncation="right")
    assert (left.truncated, len(left)) == (1, 2)
    assert (left.prompts[0], left.responses[0]) == ([*b"b", ASSISTANT], [*b"cdef", EOS_ID])
    assert (right.prompts[0], right.responses[0]) == ([USER, *b"ab", ASSISTANT], [*b"cde"])
    dropped = sft(path, max_length=7, truncation="drop")
    assert (dropped.dropped, len(dropped)) == (1, 1)
    with pytest.raises(DataError, match="no example that can be used"):
        sft(path, max_length=3, truncation="drop")


def test_bad_rows_and_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "a", "response": "b"}] * 3 + [{"prompt": "a", "response": None}])
    with pytest.raises(DataError) as caught:
        sft(path)
    assert "1 of 4 rows" in caught.value.what and "line 4: no value in column 'response'" in str(caught.value.value)
    found = sft(path, max_skipped_fraction=0.25)
    assert (len(found), [row.where for row in found.skipped]) == (3, ["line 4"])
    with pytest.raises(DataError, match=r"neither a column of messages nor a prompt and a response"):
        sft(write(tmp_path, [{"text": "a"}], "text.jsonl"))
    with pytest.raises(DataError) as caught:
        sft(path, response_key="respond")
    assert "did you mean response?" in str(caught.value.fix)


def test_a_dataset_is_known_by_its_content(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "c"}]
    renamed = [{"question": row["prompt"], "answer": row["response"]} for row in rows]
    one, same = sft(write(tmp_path, rows)), sft(write(tmp_path, renamed, "b.jsonl"))
    other = sft(write(tmp_path, rows[::-1], "c.jsonl"))
    assert one.content_hash == same.content_hash != other.content_hash


# --- pairs ------------------------------------------------------------------------------------------------------------


def said(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def test_a_pair_shares_what_it_begins_with(tmp_path: Path) -> None:
    found = pairs(write(tmp_path, [{"prompt": "q", "chosen": "yes", "rejected": "yea", "m": 0.5}]), margin_key="m")
    assert found.prompts[0] == found.prompts[1] == [USER, ord("q"), ASSISTANT, *b"ye"]
    assert found.responses[0] == [ord("s"), EOS_ID, 0], "a place behind the last token for the score"
    assert found.responses[1] == [ord("a"), EOS_ID, 0]
    assert found.trained[0] == [0, 0, 1]
    batch = found.batch([0], "train", [0])
    assert batch.tensors["margins"].tolist() == [0.5, 0.5]
    assert batch.non_tensor_batch["uid"].tolist() == ["train:0:example:0"] * 2


def test_layouts_of_pairs_mean_the_same(tmp_path: Path) -> None:
    ask, yes, no = {"role": "user", "content": "q"}, *({"role": "assistant", "content": c} for c in ("yes", "no"))
    rows = [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": [ask], "chosen": [yes], "rejected": [no]},
        {"chosen": [ask, yes], "rejected": [ask, no]},
        {"prompt": "q", "chosen": [ask, yes], "rejected": [ask, no]},
    ]
    found = [pairs(write(tmp_path, [row], f"{i}.jsonl")) for i, row in enumerate(rows)]
    assert len({dataset.content_hash for dataset in found}) == 1
    plain = pairs(write(tmp_path, [{"chosen": "q: yes", "rejected": "q: no"}]))
    assert plain.prompts[0] == [*b"q: "] and plain.responses[1] == [*b"no", EOS_ID, 0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "the value in column 'rejected' is empty"),
        ({"chosen": "a", "rejected": "b"}, "do not begin with the same prompt"),
        ({"chosen": said("x", "y"), "rejected": said("q", "z")}, "do not begin with the same prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "m": "x"}, "the margin in column 'm' is 'x', not a number"),
        (
            {"chosen": [{"role": "user", "content": "q"}], "rejected": "b"},
            "not end with a message of the assistant",
        ),
    ],
)
def test_pairs_that_teach_nothing(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError) as caught:
        pairs(write(tmp_path, [row]), margin_key="m" if "m" in row else None)
    assert reason in str(caught.value.value)


def test_a_pair_is_cut_on_both_sides_alike(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "abcdef", "chosen": "yes", "rejected": "n"}])
    found = pairs(path, max_length=8, truncation="left")  # 12 tokens: 4 are cut off both
    assert found.prompts[0] == found.prompts[1] == [*b"def", ASSISTANT]
    assert found.responses[1] == [ord("n"), EOS_ID, 0] and found.truncated == 1

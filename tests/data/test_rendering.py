"""Prompts to ids: templates, BOS, and the length limit on the very ids that are used (B058, B059, B062, B063)."""

from __future__ import annotations

import pytest

from verl.config import DataConfig
from verl.data.dataset import PromptDataset
from verl.data.rendering import cut, one_bos, special_prefix
from verl.data.rendering import render as render_rows
from verl.data.rows import PromptRow
from verl.errors import DataError

BOS_TEMPLATE = "{{ bos_token }} {% for m in messages %}<u> {{ m.content }} {% endfor %}<a>"


def render(rows, tokenizer, template_kwargs=None) -> list[list[int]]:
    ids, refused = render_rows(rows, tokenizer, template_kwargs)
    assert not refused
    return ids


def row(prompt) -> PromptRow:
    return PromptRow(prompt, "s", "1", {}, 0, location="f.jsonl, line 1")


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat_and_text_by_hand(make_tokenizer):
    tokenizer = make_tokenizer()
    assert render([row(chat("w0 w1")), row("w0 w1")], tokenizer) == [[3, 10, 11, 2, 4], [10, 11]]


def test_template_arguments_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer(template="{% if short %}w1{% else %}w2 w3{% endif %}")
    assert render([row(chat("x"))], tokenizer, {"short": True}) == [[11]]
    assert render([row(chat("x"))], tokenizer) == [[12, 13]]


@pytest.mark.parametrize(
    ("adds_bos", "template", "expected"),
    [
        (True, BOS_TEMPLATE, [1, 3, 10, 4]),  # both would add one: one is kept
        (True, "<u> w0 <a>", [1, 3, 10, 4]),  # the template forgot it
        (False, BOS_TEMPLATE, [1, 3, 10, 4]),  # the template's own
        (False, "<u> w0 <a>", [3, 10, 4]),  # a model that expects none
    ],
)
def test_exactly_one_bos_in_chat(make_tokenizer, adds_bos, template, expected):
    assert render([row(chat("w0"))], make_tokenizer(adds_bos, template)) == [expected]


@pytest.mark.parametrize(
    ("adds_bos", "text", "expected"),
    [(True, "w0", [1, 10]), (True, "<s> w0", [1, 10]), (True, "<s> <s> w0", [1, 10]), (False, "w0", [10])],
)
def test_exactly_one_bos_in_text(make_tokenizer, adds_bos, text, expected):
    assert render([row(text)], make_tokenizer(adds_bos)) == [expected]


def test_bos_between_messages_is_left_alone():
    # Chat formats that open every message with the BOS token (ChatML of some models).
    assert one_bos([1, 7, 2, 1, 8], prefix=[1], bos=1) == [1, 7, 2, 1, 8]
    assert one_bos([1, 7, 2, 1, 8], prefix=[], bos=1) == [1, 7, 2, 1, 8]


def test_prefix_is_what_the_tokenizer_adds(make_tokenizer):
    assert special_prefix(make_tokenizer(adds_bos=True)) == [1]
    assert special_prefix(make_tokenizer()) == []


def test_chat_rows_without_template_are_one_clear_error(make_tokenizer):
    tokenizer = make_tokenizer(template=None)
    rows = [row(chat("w0")), row("w1"), row(chat("w2"))]
    with pytest.raises(DataError, match=r"chat messages \(f\.jsonl, line 1\), but .* no chat template") as caught:
        render(rows, tokenizer)
    assert "model.tokenizer_path" in str(caught.value)
    assert render([row("w1")], tokenizer) == [[11]]


def test_rows_that_the_template_refuses_or_that_have_no_token(make_tokenizer):
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    template += "{{ messages[0].content }}"
    ids, refused = render_rows([row(chat("w0")), row(chat("bad")), row(chat(" "))], make_tokenizer(template=template))
    assert ids == [[10], [], []]
    assert refused == {1: "the chat template refuses it: roles must alternate", 2: "the prompt has no tokens"}


def test_keys_that_arrow_filled_with_none_do_not_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer(
        template="{% for m in messages %}{% if m.tool is defined %}w9{% else %}w1{% endif %}{% endfor %}"
    )
    assert render([row([{"role": "user", "content": "x", "tool": None}])], tokenizer) == [[11]]


def test_lone_surrogates_become_the_replacement_character(make_tokenizer):
    assert render([row("w0 \ud835 w1")], make_tokenizer()) == [[10, 0, 11]]


# --- the limit: 8 ids with the template; content of 4, 5, 6 words makes 7, 8, 9 ids


def load(write, row_of, words_of, tokenizer, counts, **fields) -> PromptDataset:
    path = write("a.jsonl", [row_of(chat(words_of(n))) for n in counts])
    config = DataConfig(train_files=str(path), max_prompt_length=8, **fields)
    return PromptDataset.load(config.train_files, config, tokenizer)


FULL = [3, 10, 11, 12, 13, 14, 15, 2, 4]  # the prompt of 9 ids


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("left", FULL[1:]), ("right", FULL[:8]), ("middle", FULL[:4] + FULL[5:])],
)
def test_truncation(write, row_of, words_of, make_tokenizer, truncation, expected):
    dataset = load(write, row_of, words_of, make_tokenizer(), (4, 5, 6), truncation=truncation)
    assert [len(ids) for ids in dataset.prompt_ids] == [7, 8, 8]
    assert dataset.prompt_ids[2] == expected
    assert (dataset.truncated, dataset.dropped) == (1, 0)


def test_odd_limits_in_the_middle():
    assert cut([0, 1, 2, 3, 4, 5], 3, "middle") == [0, 4, 5]
    assert cut([0, 1, 2], 1, "middle") == [2]


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_filter_drops_and_counts(write, row_of, words_of, make_tokenizer, truncation):
    dataset = load(
        write, row_of, words_of, make_tokenizer(), (4, 6, 5), truncation=truncation, filter_overlong_prompts=True
    )
    assert [len(ids) for ids in dataset.prompt_ids] == [7, 8] and (dataset.dropped, dataset.truncated) == (1, 0)
    assert [r.row_index for r in dataset.rows] == [0, 2]


def test_error_names_the_row_at_load_time(write, row_of, words_of, make_tokenizer):
    with pytest.raises(DataError) as caught:
        load(write, row_of, words_of, make_tokenizer(), (4, 5, 6))
    text = str(caught.value)
    assert "1 of 3" in text and "line 3: 9 tokens" in text and "data.max_prompt_length=8" in text


def test_nothing_left_after_filtering(write, row_of, words_of, make_tokenizer):
    with pytest.raises(DataError) as caught:
        load(write, row_of, words_of, make_tokenizer(), (6, 7, 8), filter_overlong_prompts=True)
    assert "3 of 3 prompts were filtered" in str(caught.value) and "max_prompt_length=8" in str(caught.value)


def test_the_bos_counts_towards_the_limit(write, row_of, words_of, make_tokenizer):
    dataset = load(write, row_of, words_of, make_tokenizer(adds_bos=True), (4, 5), truncation="left")
    assert [len(ids) for ids in dataset.prompt_ids] == [8, 8] and dataset.truncated == 1


def test_max_samples_counts_after_filtering(write, row_of, words_of, make_tokenizer):
    path = write("a.jsonl", [row_of(words_of(n)) for n in (9, 1, 9, 2, 3)])
    config = DataConfig(train_files=str(path), max_prompt_length=8, filter_overlong_prompts=True)
    dataset = PromptDataset.load(config.train_files, config, make_tokenizer(), max_samples=2)
    assert [r.row_index for r in dataset.rows] == [1, 3]
    plain = DataConfig(train_files=str(path), max_prompt_length=9)
    assert len(PromptDataset.load(plain.train_files, plain, make_tokenizer(), max_samples=2)) == 2
    with pytest.raises(DataError):
        PromptDataset.load(plain.train_files, plain, make_tokenizer(), max_samples=0)

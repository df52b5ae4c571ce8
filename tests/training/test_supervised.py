"""Supervised training: the losses of transformers' padded forward, and the same step whatever the micro-batches."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from verl.algorithms.metric import reduce_metrics
from verl.algorithms.value_loss import bradley_terry
from verl.config.schema_supervised import PairDataConfig, SftDataConfig, SupervisedOptimConfig
from verl.data.dataset import TokenRows
from verl.data.examples import ExampleDataset, Row, pair_example, sft_example
from verl.data.rendering import Conversation
from verl.errors import OutOfMemoryError, VerlError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm, load_classifier
from verl.models.policy import PolicyModel, ValueModel
from verl.protocol import DataProto
from verl.training.micro_batches import Limits
from verl.training.optimizer import MasterWeights, Optimizer
from verl.training.supervised import SupervisedModel

SFT = SftDataConfig(train_files=["x"])
PAIRS = PairDataConfig(train_files=["x"])


def dataset(examples: list) -> ExampleDataset:
    rows: list[Row] = [row for example in examples for row in example.rows]

    def store(lists: list[list[int]]) -> TokenRows:
        flat = np.array([i for ids in lists for i in ids], np.int32)
        return TokenRows(flat, np.array([len(ids) for ids in lists]))

    return ExampleDataset(
        store([row.prompt for row in rows]),
        store([row.response for row in rows]),
        store([[int(t) for t in row.trained] for row in rows]),
        np.array([example.margin for example in examples], np.float32),
        len(rows) // len(examples),
    )


def random_batch(seed: int, sizes: list[int], pairs: bool) -> tuple[DataProto, list[tuple[list[int], list[bool]]]]:
    """A batch, and the conversations that it was made of."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, 256, (n,), generator=generator).tolist()  # noqa: E731
    examples, plain = [], []
    for size in sizes:
        shared = draw(1 + size // 2)
        sides = [[*shared, side, *draw(size + side)] for side in range(1 + pairs)]
        chance = lambda n: (torch.rand(n, generator=generator) < 0.6).tolist()  # noqa: E731
        marks = [[False] * len(shared) + chance(len(s) - len(shared)) for s in sides]
        for mark in marks:
            mark[len(shared)] = True
        plain += list(zip(sides, marks, strict=True))
        conversations = [Conversation(ids, mark) for ids, mark in zip(sides, marks, strict=True)]
        examples.append(pair_example(*conversations, 0.25 * size, PAIRS) if pairs else sft_example(*conversations, SFT))
    data = dataset(examples)
    return data.batch(range(len(sizes)), "train", range(len(sizes))), plain


def model_of(folder: Path, pairs: bool, tokens: int) -> tuple[SupervisedModel, Optimizer, MasterWeights]:
    load = load_classifier if pairs else load_causal_lm
    hf = load(folder, torch.float32, attn_implementation=ATTENTION_NAME)
    weights = MasterWeights(hf, torch.float32)
    optimizer = Optimizer("train", weights, SupervisedOptimConfig(lr=0.1), 1e9)
    model = ValueModel(hf) if pairs else PolicyModel(hf)
    limits = Limits(None, tokens, share_prompts=pairs)
    return SupervisedModel(model, limits, weights, optimizer), optimizer, weights


@pytest.fixture(scope="session")
def scorer_dir(small_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with a random score head, as transformers writes it."""
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_pretrained(small_dir, num_labels=1, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("scorer")
    model.save_pretrained(folder)
    return folder


def test_the_loss_is_that_of_the_padded_forward(small_dir: Path) -> None:
    batch, plain = random_batch(0, [3, 9, 1, 6], pairs=False)
    found = reduce_metrics(model_of(small_dir, False, 20)[0].evaluate(batch))
    stock = AutoModelForCausalLM.from_pretrained(small_dir, dtype=torch.float32)
    total, count = 0.0, 0
    for ids, mark in plain:
        labels = torch.tensor([[i if m else -100 for i, m in zip(ids, mark, strict=True)]])
        loss = stock(input_ids=torch.tensor([ids]), labels=labels).loss.detach()
        total, count = total + float(loss) * sum(mark), count + sum(mark)
    assert found["val/loss"] == pytest.approx(total / count, abs=1e-5)


def test_scores_are_those_of_transformers(scorer_dir: Path) -> None:
    batch, plain = random_batch(1, [3, 9, 1, 6], pairs=True)
    found = reduce_metrics(model_of(scorer_dir, True, 200)[0].evaluate(batch))
    stock = AutoModelForSequenceClassification.from_pretrained(scorer_dir, dtype=torch.float32)
    scores = [stock(input_ids=torch.tensor([ids])).logits.item() for ids, _ in plain]
    chosen, rejected = torch.tensor(scores[::2]), torch.tensor(scores[1::2])
    margins = torch.tensor([0.25 * size for size in (3, 9, 1, 6)])
    assert found["val/score_chosen"] == pytest.approx(float(chosen.mean()), abs=1e-5)
    assert found["val/score_rejected"] == pytest.approx(float(rejected.mean()), abs=1e-5)
    expected = torch.log1p(torch.exp(-(chosen - rejected - margins))).mean()
    assert found["val/loss"] == pytest.approx(float(expected), abs=1e-5)
    assert found["val/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))


@pytest.mark.parametrize("pairs", [False, True], ids=["sft", "pairs"])
def test_the_gradient_is_that_of_the_mean_over_the_step(small_dir: Path, scorer_dir: Path, pairs: bool) -> None:
    batch, plain = random_batch(5, [4, 2, 7], pairs)
    model, optimizer, weights = model_of(scorer_dir if pairs else small_dir, pairs, 60)
    with patch.object(optimizer, "step", return_value={}):
        model.update(batch, 0.1)
    if pairs:
        stock = AutoModelForSequenceClassification.from_pretrained(scorer_dir, dtype=torch.float32)
        scores = torch.stack([stock(input_ids=torch.tensor([ids])).logits[0, 0] for ids, _ in plain])
        margins = torch.tensor([0.25 * size for size in (4, 2, 7)])
        torch.log1p(torch.exp(-(scores[::2] - scores[1::2] - margins))).mean().backward()
    else:
        stock = AutoModelForCausalLM.from_pretrained(small_dir, dtype=torch.float32)
        losses = []
        for ids, mark in plain:
            log_probs = stock(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            own = log_probs.gather(1, torch.tensor(ids)[1:, None])[:, 0]
            losses.append(-own[torch.tensor(mark)[1:]])
        torch.cat(losses).mean().backward()
    for name, parameter in stock.named_parameters():
        found = weights.masters[name].grad
        assert float((found - parameter.grad).norm()) <= 1e-4 * float(parameter.grad.norm()), name


def test_what_stops_a_step_names_keys_of_supervised_training(small_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, _ = random_batch(0, [3, 9], pairs=False)
    model, optimizer, weights = model_of(small_dir, False, 200)
    monkeypatch.setattr(optimizer, "_config", SupervisedOptimConfig(on_nonfinite="stop"))
    model.evaluate(batch)  # a model is checked at its first use
    next(iter(weights.masters.values())).data.fill_(float("nan"))
    with pytest.raises(VerlError, match=r"the model's gradient is not finite, and optim\.on_nonfinite=stop"):
        model.update(batch, 0.1)

    def refused(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    monkeypatch.setattr(PolicyModel, "forward", refused)
    for call in (lambda: model.update(batch, 0.1), lambda: model.evaluate(batch)):
        with pytest.raises(OutOfMemoryError, match=r"(?s)2 rows.*lower data\.max_token_len_per_gpu"):
            call()


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 1.0])
    loss, metrics = bradley_terry(chosen, rejected, torch.tensor([0.0, 0.0, 1.0]), 3)
    # -log sigmoid(1), -log sigmoid(-1), and a tie under a margin of 1: -log sigmoid(-1)
    assert float(loss) == pytest.approx((0.3132617 + 2 * 1.3132617) / 3)
    numbers = reduce_metrics(metrics)
    assert numbers["accuracy"] == 0.5 and numbers["score_chosen"] == 1.0


@settings(max_examples=8)
@given(st.booleans(), st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(24, 120), st.integers(0, 99))
def test_law_2_any_micro_batches_make_the_same_step(
    small_dir: Path, scorer_dir: Path, pairs: bool, sizes: list[int], tokens: int, seed: int
) -> None:
    tokens = max(tokens, 2 * max(sizes) + 2 * (max(sizes) + 6))  # a pair stays together
    batch, _ = random_batch(seed, sizes, pairs)
    folder = scorer_dir if pairs else small_dir
    found = []
    for limit in (10_000, tokens):
        model, optimizer, weights = model_of(folder, pairs, limit)
        with patch.object(optimizer, "step", return_value={}):  # leaves the gradient where it is
            metrics = reduce_metrics(model.update(batch, 0.1))
        found.append((metrics, {name: master.grad for name, master in weights.masters.items()}))
    (whole, gradients), (split, others) = found
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)
    for name, gradient in gradients.items():
        assert float((others[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name


def test_a_step_teaches(scorer_dir: Path, small_dir: Path) -> None:
    for pairs, folder in ((True, scorer_dir), (False, small_dir)):
        batch, _ = random_batch(3, [4, 5, 6], pairs)
        model, *_ = model_of(folder, pairs, 1000)
        before = reduce_metrics(model.evaluate(batch))["val/loss"]
        for _ in range(5):
            model.update(batch, 0.003)
        assert reduce_metrics(model.evaluate(batch))["val/loss"] < before

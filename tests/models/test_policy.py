"""Packed log-probs, entropies, values and gradients are those of transformers' own padded forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn
from toy_models import (
    ALL_FAMILIES,
    FAMILIES,
    config_of,
    markov_policy,
    random_lm,
    random_policy,
    same_numbers,
    successor_logits,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from verl.errors import ModelError
from verl.models.attention import ATTENTION_NAME
from verl.models.packed import PackedBatch, PackedContext, pack_rows
from verl.models.policy import PolicyModel, ValueModel
from verl.models.support import _window

PROMPTS = [[3, 4, 5], [3, 4, 5], [7, 8, 9, 10, 11, 12, 13], [1]]
RESPONSES = [[5, 6, 7, 8], [1], [2, 3, 4, 5, 6, 7], [30, 2, 30]]
GROUPS = [0, 0, 1, 2]
WIDTH = 6


def pack(share: bool) -> PackedBatch:
    return pack_rows(PROMPTS, RESPONSES, WIDTH, GROUPS if share else None)


def padded_inputs(extra: int = 0) -> tuple[dict[str, Tensor], int]:
    """Prompts left padded, responses right padded; the prompt width."""
    width = max(map(len, PROMPTS)) + extra
    ids, mask = torch.full((4, width + WIDTH), 17), torch.zeros(4, width + WIDTH, dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        place = slice(width - len(prompt), width + len(response))
        ids[row, place], mask[row, place] = torch.tensor(prompt + response), 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}, width


def padded_log_probs(model: PreTrainedModel, temperature: float, extra: int = 0) -> tuple[Tensor, Tensor]:
    """Of response tokens, row by row, from the padded forward; and the entropies there."""
    inputs, width = padded_inputs(extra)
    logits = model(**inputs).logits / (temperature or 1.0)
    log_p = torch.log_softmax(logits, -1)
    found, entropies = [], []
    for row, response in enumerate(RESPONSES):
        before = log_p[row, width - 1 : width - 1 + len(response)]
        found.append(before.gather(1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(before.exp() * before).sum(-1))
    return torch.cat(found), torch.cat(entropies)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], within: float) -> None:
    """Norm-wise, each parameter by itself."""
    assert ours.keys() == theirs.keys() and ours
    for name, expected in theirs.items():
        assert (ours[name] - expected).norm() <= within * max(float(expected.norm()), 1.0), name


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_packed_is_padded(family: str) -> None:
    """Log-probs, entropies, values and every gradient, whether prompts are shared or not."""
    stock, policy = random_lm(family, attention="eager"), random_policy(family)
    expected, expected_entropy = padded_log_probs(stock, 0.7)
    assert expected.std() > 0.5  # the model has something to say
    weights = torch.linspace(-1, 2, expected.numel())
    expected_gradients = gradients(stock, (expected * weights + expected_entropy * 0.3).sum())
    for share in (False, True):
        log_probs, entropy = policy(pack(share), 0.7)
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-6)
        found = gradients(policy.model, (log_probs * weights + entropy * 0.3).sum())
        same_gradients(found, expected_gradients, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_other_temperatures(family: str, temperature: float) -> None:
    with torch.no_grad():
        log_probs = random_policy(family)(pack(True), temperature)[0]
        expected = padded_log_probs(random_lm(family, attention="eager"), temperature)[0]
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-6)


PECULIAR = {
    "gemma2": [
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"layer_types": ["full_attention"] * 2},
        {"query_pre_attn_scalar": 64},
    ],
    "qwen2-windows": [{"use_sliding_window": False, "layer_types": None}],
    "cohere": [{"logit_scale": 1.0}],
    "granite": [{"logits_scaling": 1.0}],
    "gpt_neox": [{"use_parallel_residual": False}],
    "gpt_oss": [{"layer_types": ["full_attention"] * 2}],
}


@pytest.mark.parametrize(
    ("family", "changes"), [(f, changes) for f, several in PECULIAR.items() for changes in several]
)
def test_peculiarities_show(family: str, changes: dict[str, Any]) -> None:
    """What a family does otherwise moves the numbers of these tiny models, so that leaving it out would be seen."""
    with torch.no_grad():
        peculiar, plain = (random_policy(family, **c)(pack(True), 1.0)[0] for c in ({}, changes))
    assert (peculiar - plain).abs().max() > 1e-2


def test_sinks_show() -> None:
    policy = random_policy("gpt_oss")
    with torch.no_grad():
        before = policy(pack(True), 1.0)[0]
        for layer in policy.model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        assert (policy(pack(True), 1.0)[0] - before).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [1, 7, 64])
def test_left_padding_is_nothing(family: str, extra: int) -> None:
    """B046: for learned positions as well."""
    with torch.no_grad():
        ours = random_policy(family)(pack(False), 1.0)[0]
        theirs = padded_log_probs(random_lm(family, attention="eager"), 1.0, extra)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-6)


# transformers computes RMS norms in float32 even for a float64 model; gpt2's layer norm follows the model
FLOAT64_WITHIN = {"gpt2": 1e-10, "llama": 1e-6, "qwen2": 1e-6}


@pytest.mark.parametrize("family", FAMILIES)
def test_float64(family: str) -> None:
    """Sharing or not, the same gradient to 1e-10 (split law)."""
    policy = random_policy(family, torch.float64)
    whole = policy(pack(False), 0.7)
    shared = policy(pack(True), 0.7)
    assert whole[0].dtype == torch.float64
    for a, b in zip(whole, shared, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12 if family == "gpt2" else 1e-6, rtol=0)
    same_gradients(
        gradients(policy, (whole[0] + whole[1] ** 2).sum()),
        gradients(policy, (shared[0] + shared[1] ** 2).sum()),
        FLOAT64_WITHIN[family],
    )
    expected = padded_log_probs(random_lm(family, attention="eager"), 0.7)[0]
    torch.testing.assert_close(whole[0].float(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("share", [False, True])
def test_gradients_add_up_over_any_split(share: bool) -> None:
    policy = random_policy("gpt2", torch.float64)
    together = gradients(policy, policy(pack(share), 1.0)[0].sum())
    policy.zero_grad()
    for rows in ([0], [3, 1], [2]):
        part = pack_rows(
            [PROMPTS[i] for i in rows],
            [RESPONSES[i] for i in rows],
            WIDTH,
            [GROUPS[i] for i in rows] if share else None,
        )
        policy(part, 1.0)[0].sum().backward()
    apart = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    same_gradients(together, apart, 1e-10)


# --- which hidden state predicts which token ----------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
def test_the_token_before_predicts(share: bool) -> None:
    """B044: prompt 3 4, response 5 6 7, and a model that gives 0.9 to the successor."""
    policy = markov_policy(successor_logits(16, 0.9))
    packed = pack_rows([[3, 4]], [[5, 6, 7]], 5, [0] if share else None)
    log_probs, entropy = policy(packed, 1.0)
    assert log_probs.tolist() == pytest.approx([math.log(0.9)] * 3, abs=1e-5)
    assert packed.scatter(log_probs).shape == (1, 5)
    p = [0.9] + [0.1 / 15] * 15
    assert entropy.tolist() == pytest.approx([-sum(x * math.log(x) for x in p)] * 3, abs=1e-5)
    wrong = policy(pack_rows([[3, 4]], [[6, 7, 8]], 3), 1.0)[0]
    assert wrong.tolist() == pytest.approx([math.log(0.1 / 15), math.log(0.9), math.log(0.9)], abs=1e-5)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("share", [False, True])
def test_values_are_read_before_their_token(family: str, share: bool) -> None:
    model = ValueModel(random_lm(family))
    assert model(pack(share)).tolist() == [0.0] * 14  # a fresh critic
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.value_head.weight.copy_(torch.randn(1, 32, generator=generator))
        model.value_head.bias.fill_(0.25)
    stock = random_lm(family, attention="eager").base_model
    values = model(pack(share))
    inputs, width = padded_inputs()
    states = stock(**inputs).last_hidden_state
    expected = torch.cat(
        [
            states[row, width - 1 : width - 1 + len(response)] @ model.value_head.weight[0] + 0.25
            for row, response in enumerate(RESPONSES)
        ]
    )
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-6)
    same_gradients(gradients(model.backbone, (values**2).mean()), gradients(stock, (expected**2).mean()), 1e-5)


def test_the_value_head_keeps_its_precision() -> None:
    model = ValueModel(random_lm("llama", torch.bfloat16))
    values = model(pack(True))
    assert values.dtype == torch.float32
    values.sum().backward()
    assert model.value_head.weight.grad is not None and model.value_head.weight.grad.any()


# --- bits ---------------------------------------------------------------------------------------------------------

ROWS: dict[tuple[str, torch.dtype], PolicyModel] = {}


def cached_policy(family: str, dtype: torch.dtype) -> PolicyModel:
    if (family, dtype) not in ROWS:
        ROWS[family, dtype] = random_policy(family, dtype)
    return ROWS[family, dtype]


@examples(max_examples=20)
@given(
    family=st.sampled_from(FAMILIES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sizes=st.lists(
        st.tuples(st.integers(1, 150), st.lists(st.integers(1, 60), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    temperature=st.sampled_from([1.0, 0.7]),
    share=st.booleans(),
    with_gradient=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_bits_do_not_depend_on_the_packing(
    family: str,
    dtype: torch.dtype,
    sizes: list[tuple[int, list[int]]],
    temperature: float,
    share: bool,
    with_gradient: bool,
    order: Any,
) -> None:
    """Alone or beside others, in any order, sharing the prompt or not, with gradient or without."""
    policy = cached_policy(family, dtype)
    rows: list[tuple[list[int], list[int], int]] = []
    for group, (length, lengths) in enumerate(sizes):
        prompt = [order.randrange(40) for _ in range(length)]
        rows += [(prompt, [order.randrange(40) for _ in range(n)], group) for n in lengths]
    alone = {}
    with torch.no_grad():
        for i, (prompt, response, _) in enumerate(rows):
            alone[i] = policy(pack_rows([prompt], [response], 60), temperature)[0]
    places = list(range(len(rows)))
    order.shuffle(places)
    packed = pack_rows(
        [rows[i][0] for i in places],
        [rows[i][1] for i in places],
        60,
        [rows[i][2] for i in places] if share else None,
    )
    with torch.set_grad_enabled(with_gradient):
        together = policy(packed, temperature)[0].detach()
    same_numbers(together, torch.cat([alone[i] for i in places]), policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_bits_repeat(dtype: torch.dtype) -> None:
    """Exact resume rests on it."""
    first, second = (
        gradients(policy, policy(pack(True), 0.7)[0].sum()) for policy in (random_policy("llama", dtype) for _ in "ab")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- what models ask for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_sliding_window_is_honoured(share: bool, window: int) -> None:
    stock = random_lm("mistral", attention="eager", sliding_window=window)
    log_probs = random_policy("mistral", sliding_window=window)(pack(share), 1.0)[0]
    expected = padded_log_probs(stock, 1.0)[0]
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-6)
    if window < 8:
        wide = random_policy("mistral", sliding_window=None)(pack(share), 1.0)[0]
        assert (wide - log_probs).abs().max() > 1e-2


def other_family(kind: str, **changes: Any) -> PreTrainedModel:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(kind, **sizes | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model.eval()


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "0 of its 2 layers"),
        ("mamba", {}, "layers only"),
        ("stablelm", {}, "without an attention context"),
        ("phi3", {"rope_parameters": LONGROPE}, "longrope"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("gemma3_text", {"use_bidirectional_attention": True, "head_dim": 8}, "not causal"),
        ("deepseek_v3", {"num_key_value_heads": 4}, "heads or widths"),
        ("hyperclovax", {"logits_scaling": 2.0, "head_dim": 8}, "changes its logits"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(kind: str, changes: dict[str, Any], named: str) -> None:
    model = other_family(kind, **changes)
    with pytest.raises(ModelError, match=type(model).__name__) as caught:
        PolicyModel(model)(pack(False), 1.0)
    assert named in str(caught.value)


def test_broken_weights_are_told_from_a_model_that_is_not_supported() -> None:
    policy = random_policy("llama")
    with torch.no_grad():
        next(iter(policy.model.parameters())).fill_(math.nan)
    with pytest.raises(ModelError, match="not finite: its weights are broken"):
        policy.key_shape  # noqa: B018


def test_a_critic_is_refused_as_well() -> None:
    with pytest.raises(ModelError, match="BloomModel"):
        ValueModel(other_family("bloom", n_layer=2, n_head=4))(pack(False))


def test_layers_that_mix_tokens_in_another_way_are_refused() -> None:
    """State space and convolution layers beside the attention do."""
    model = random_lm("llama")
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) + x.cumsum(1)
    with pytest.raises(ModelError, match="LlamaForCausalLM lets tokens of one row of a pack reach another row"):
        PolicyModel(model)(pack(False), 1.0)


@pytest.mark.parametrize("change", [lambda x: x * 3, lambda x: 40 * (x / 40).tanh()])
def test_a_head_that_changes_its_logits_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    """A cap too, though it leaves the small logits of a fresh model all but as they are."""
    model = other_family("llama")
    plain = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = changed  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="changes its logits"):
        PolicyModel(model)(pack(False), 1.0)


def test_a_window_that_a_layer_forgets_is_noticed() -> None:
    """By the masks that the model would make for itself, and by its layers' kinds."""
    forgetful = random_lm("gemma2")
    forgetful.model.layers[0].self_attn.sliding_window = 4
    with pytest.raises(ModelError, match="layer 0 asks for a window of 4, the model's masks for .*a window of 5"):
        PolicyModel(forgetful)(pack(False), 1.0)
    forgetful = random_lm("gemma2")
    forgetful.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ModelError, match="layer 0 asks for no window but is of another kind") as caught:
        PolicyModel(forgetful)(pack(False), 1.0)
    assert caught.value.value == "sliding_attention"


def test_masks_that_are_no_window_are_refused() -> None:
    assert _window(causal_mask_function) is None
    assert [_window(sliding_window_causal_mask_function(size)) for size in (1, 2, 4096)] == [1, 2, 4096]
    with pytest.raises(ModelError, match="other tokens than a sliding window's"):
        _window(chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)))  # Llama 4
    with pytest.raises(ModelError, match="not causal"):
        _window(bidirectional_mask_function)


def test_key_shape_is_what_the_layers_compute() -> None:
    assert random_policy("llama").key_shape == (2, 8)
    assert random_policy("gemma2").key_shape == (2, 16)
    assert random_policy("gpt_neox").key_shape == (4, 8)
    assert PolicyModel(other_family("gpt_bigcode", n_embd=32, n_layer=2, n_head=4)).key_shape == (1, 8)  # multi-query


def test_a_model_without_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match="no vocabulary projection"):
        PolicyModel(random_lm("llama").base_model)


@pytest.mark.parametrize(
    "model",
    [
        random_lm("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
        random_lm("llama", attention_dropout=0.5),
        other_family("opt", ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5),
    ],
    ids=["gpt2", "llama", "opt"],
)
def test_dropout_is_off_in_training_too(model: PreTrainedModel) -> None:
    policy = PolicyModel(model)
    with torch.no_grad():
        sampled = policy.eval()(pack(True), 1.0)[0]
        assert torch.equal(policy.train()(pack(True), 1.0)[0], sampled)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    policy = random_policy(family)
    plain = policy(pack(True), 1.0)[0]
    expected = gradients(policy, plain.sum())
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    again = policy(pack(True), 1.0)[0]
    assert torch.equal(again, plain)
    same_gradients(gradients(policy, again.sum()), expected, 1e-6)


def test_logits_are_those_of_the_forward() -> None:
    policy = random_policy("llama")
    packed = pack(False).filled(policy.rows.padded)
    with torch.no_grad():
        hidden = policy.hidden_states(packed.input_ids, packed.position_ids, PackedContext(packed))
        predictors = hidden.index_select(0, packed.response_index)
        logits = policy.logits(predictors, 0.7)
        pieces = list(policy.logits_by_piece(predictors, torch.full((len(predictors),), 0.7), 3))
        assert len(pieces) == -(-len(predictors) // 3) and torch.equal(torch.cat(pieces), logits)
        log_probs = logits.log_softmax(-1).gather(1, packed.targets[:, None])[:, 0]
        same_numbers(log_probs, policy(packed, 0.7)[0], policy)


def test_attention_scale_of_the_config_is_used() -> None:
    """GPT-2 may leave out the 1/sqrt(D), or divide by the layer's number as well."""
    for changes in ({"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}):
        log_probs = random_policy("gpt2", **changes)(pack(True), 1.0)[0]
        expected = padded_log_probs(random_lm("gpt2", attention="eager", **changes), 1.0)[0]
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-6)
    assert config_of("gpt2").scale_attn_weights

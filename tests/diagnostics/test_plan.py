"""Memory and sizes of a plan against numbers computed by hand, and against what a real forward keeps."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from verl.cli import main
from verl.cluster.placement import make_plan
from verl.config import Config, dump_yaml, load_config
from verl.diagnostics import plan_time
from verl.diagnostics.plan import GIB, Lengths, activations, kept_bytes, largest_pack, needed, pack, processes, smaller
from verl.diagnostics.plan_time import batch_words, calibrate, given, stages_of
from verl.models.attention import ATTENTION_NAME
from verl.models.facts import ModelFacts, read_facts
from verl.models.loading import load_causal_lm
from verl.models.packed import pack_rows
from verl.models.policy import PolicyModel, enable_checkpointing
from verl.models.tiny import build_tiny

# Embedding 264 x 64; a layer: q, o 64 x 64, k, v 64 x 32, three matrices 64 x 128, two norms; the last norm.
TINY = 264 * 64 + 2 * (2 * 4096 + 2 * 2048 + 3 * 8192 + 2 * 64) + 64
LENGTHS = Lengths(10, 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("plan") / "model")


def config_of(model: Path | str, **settings: object) -> Config:
    tree: dict[str, object] = {
        "data.train_files": "none.jsonl",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 10,
        "data.max_response_length": 9,
        "actor.ppo_mini_batch_size": 2,
        "rollout.n": 2,
        "algorithm.adv_estimator": "grpo",
        "model.path": str(model),
        "cluster.backend": "inline",
        "trainer.device": "cpu",
    }
    return load_config(overrides=tree | {key.replace("__", "."): value for key, value in settings.items()}).config


def test_parameters_of_a_model_from_its_configuration(model: Path, tmp_path: Path) -> None:
    assert TINY == 90_944
    assert read_facts(str(model)) == ModelFacts(TINY, 2, 64, 128, 4, 2, 16, 2048, 264, True)
    untied = read_facts(str(build_tiny(tmp_path, tie_embeddings=False)))
    assert (untied.parameters, untied.multiplied) == (TINY + 264 * 64, TINY)


def test_a_pack() -> None:
    # Two prompts of 10 tokens once each; four responses of 8 tokens (the last is not fed) behind 10 of the prompt.
    shared = pack(4, 2, LENGTHS, True)
    assert (shared.tokens, shared.scores, shared.keys) == (2 * 10 + 4 * 8, 4 * 8 * 32 + 2 * 16 * 32, (4 + 2) * 32)
    whole = pack(4, 2, LENGTHS, False)
    assert (whole.tokens, whole.scores, whole.keys) == (4 * 18, 4 * 24 * 32, 4 * 32)
    assert largest_pack(4, 2, LENGTHS, True, None, 51).rows == 3  # 52 tokens would be four
    assert largest_pack(4, 2, LENGTHS, True, 2, None).rows == 2
    assert largest_pack(4, 2, LENGTHS, True, None, 1).rows == 1


def test_memory_by_hand(model: Path) -> None:
    facts, config = read_facts(str(model)), config_of(model, model__dtype="float32")
    layer = (52 * (4 * 64 + 2 * 64 + 2 * 128) + 192 * 2 * 32) * 4 + 2048 * 4 * 4
    assert kept_bytes(facts, pack(4, 2, LENGTHS, True), 4) == layer
    (process,) = processes(config, make_plan(config, 2, 0), facts, None, LENGTHS, GIB)
    assert process.held["actor master weights (float32)"] == 4 * TINY
    assert process.held["actor optimizer state"] == 8 * TINY
    assert not any("compute" in part for part in process.held)
    update = process.stages["actor update"]  # MBS 2 x n 2 = 4 responses, all in one micro-batch
    assert update["activations of a micro-batch"] == 2 * layer + 4 * 2048 + 2 * 52 * 64 * 4
    assert update["gradients"] == 0
    assert process.stages["rollout"]["keys and values"] == 8 * 2 * 2 * 2 * 16 * 128 * 4  # one block for each of 8
    assert update["the embedding's gradient"] == 264 * 64 * 4 * 2  # and that of the tied projection
    assert update["holes of the last step"] == 264 * 64 * 4 * 3  # of these two and of their sum
    assert process.peak == sum(process.held.values()) + sum(process.stages[process.peak_stage].values())
    assert needed([process]) == process.peak

    narrow = config_of(model, model__dtype="bfloat16", actor__ppo_micro_batch_size_per_gpu=1)
    (process,) = processes(narrow, make_plan(narrow, 2, 0), facts, None, LENGTHS, GIB)
    assert process.held["actor compute weights (bfloat16)"] == 2 * TINY + 2 * TINY  # and in oneDNN's layout
    assert process.stages["actor update"]["gradients"] == 4 * TINY  # of the micro-batches before
    assert process.held["code of 1024 matrix products"] == 1024 * int(0.55 * 2**20)
    narrow = config_of(model, model__dtype="bfloat16", trainer__total_training_steps=2)
    (process,) = processes(narrow, make_plan(narrow, 2, 0), facts, None, LENGTHS, GIB)
    # Weights of five shapes with 8, 16, ... 128 and 256, ... 4,096 rows, by one thread and by two; 40 more a step.
    assert f"code of {5 * 21 * 2 + 40 * 2} matrix products" in process.held


def test_a_broadcast_holds_the_weights_a_second_time(model: Path) -> None:
    facts = read_facts(str(model))
    asked = {"cluster__backend": "ray", "trainer__mode": "async", "model__dtype": "float32"}
    found = []
    for sync in ("broadcast", "shared_memory"):
        config = config_of(model, **asked, rollout__weight_sync=sync)
        found.append(processes(config, make_plan(config, 2, 0), facts, None, LENGTHS, GIB))
    for with_it, without in zip(*found, strict=True):
        assert with_it.held == without.held | {"weights of a broadcast": 4 * TINY}
    assert [process.name for process in found[0]] == ["main: actor, reward", "rollout: rollout"]


def test_ranks_share_what_is_sharded(model: Path) -> None:
    facts = read_facts(str(model))
    settings = {"trainer__n_gpus_per_node": 4, "trainer__device": "cuda", "cluster__backend": "ray"}
    for strategy, share in (("replicate", TINY), ("fsdp2", TINY // 4)):
        config = config_of(model, actor__strategy=strategy, **settings)
        (process,) = processes(config, make_plan(config, 4, 4), facts, None, LENGTHS, GIB)
        assert process.count == 4
        assert process.held["actor optimizer state"] == 8 * share
        assert ("rollout weights" in process.held) == (strategy == "fsdp2")  # a copy of the engine's own
        update = process.stages["actor update"]
        layer = (TINY - 264 * 64) // 2  # larger than the embedding
        assert update.get("sums of gradients over the ranks", 0) == (strategy == "fsdp2") * 2 * 4 * layer
        assert update.get("gathered weights", 0) == (strategy == "fsdp2") * 2 * (264 * 64 + 2 * layer)
        assert "holes of the last step" not in update  # of a CPU's heap
        assert not any("matrix products" in part for part in process.held)
    settings = {"actor__world_size": 2, "actor__strategy": "fsdp2"}
    config = config_of(model, cluster__backend="ray", **settings)
    (process,) = processes(config, make_plan(config, 2, 0), facts, None, LENGTHS, GIB)
    update = process.stages["actor update"]
    assert 2 * update["holes of the last step"] == sum(update.values())


def test_idle_roles_are_counted_where_they_are_needed(model: Path) -> None:
    facts = read_facts(str(model))
    offload = {f"{role}__{kind}_offload": True for role in ("actor", "critic") for kind in ("param", "optimizer")}
    settings = {"model__dtype": "bfloat16", "algorithm__adv_estimator": "gae", "actor__use_kl_loss": True}
    plain, moving = (config_of(model, **settings, **more) for more in ({}, offload | {"ref__param_offload": True}))
    stays, moves = (processes(one, make_plan(one, 2, 0), facts, facts, LENGTHS, GIB)[0] for one in (plain, moving))
    idle = {name for name in stays.held if name.startswith(("actor", "critic", "reference"))}
    assert len(idle) == 7 and idle.isdisjoint(moves.held)
    computing, masters, state = "compute weights (bfloat16)", "master weights (float32)", "optimizer state"
    there = {
        "rollout": {f"actor {computing}"},
        "reference log-probs": {"reference weights"},
        **{
            f"{role} update": {f"{role} {part}" for part in (computing, masters, state)} for role in ("actor", "critic")
        },
    }
    for stage, parts in there.items():
        assert {name: size for name, size in moves.stages[stage].items() if name in idle} == {
            name: stays.held[name] for name in parts
        }
    assert moves.peak < stays.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("response", [60, 200])
def test_what_a_forward_keeps(tmp_path: Path, dtype: torch.dtype, response: int) -> None:
    folder = build_tiny(tmp_path, hidden_size=128, layers=3, heads=4, kv_heads=2)
    facts = read_facts(str(folder))
    policy = PolicyModel(load_causal_lm(folder, dtype, attn_implementation=ATTENTION_NAME))
    prompts = [[1 + i] * 40 for i in (0, 0, 0, 1, 1, 1)]
    packed = pack_rows(prompts, [[5] * response] * 6, response, [0, 0, 0, 1, 1, 1])
    assert policy.rows.multiple  # settled before anything is counted

    def kept() -> int:
        own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
        found: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = policy(packed, 1.0)
        assert result
        return sum(found.values())

    part = pack(6, 3, Lengths(40, response), True)
    assert activations(facts, part, dtype.itemsize, False) == pytest.approx(kept(), rel=0.1)
    enable_checkpointing(policy.model)
    assert activations(facts, part, dtype.itemsize, True) < activations(facts, part, dtype.itemsize, False) / 5


def test_words_and_stages(model: Path) -> None:
    config, facts = config_of(model), read_facts(str(model))
    plan = make_plan(config, 2, 0)
    first, actor, micro = batch_words(config, plan, LENGTHS)
    assert "4 prompts" in first and "8 responses" in first
    assert "2 prompts x 2 = 4 responses" in actor and "(GBS / MBS = 2)" in actor
    assert "K = 1 " in micro and "(52 tokens)" in micro
    speed = given(facts, 2, LENGTHS, tflops=1e-6, bandwidth=1e6)  # a million FLOPs a second
    rollout, update = stages_of(config, plan, facts, None, LENGTHS, speed)
    assert rollout.tokens == 4 * 10 + 8 * 9 and rollout.flops == 2 * TINY * rollout.tokens
    # Forward and twice as much backward; scores 2 x 2 FLOPs by head, width and layer.
    assert update.flops == 3 * (2 * TINY * 104 + 4 * 2 * 64 * 2 * 2048)
    assert update.seconds == pytest.approx(update.flops / 1e6)


def test_suggested_settings_need_less(model: Path) -> None:
    facts = read_facts(str(model))
    sizes = {"data__train_batch_size": 64, "actor__ppo_mini_batch_size": 64, "data__max_response_length": 100}

    def peak(words: list[str]) -> int:
        settings = {key.replace(".", "__"): value for key, value in (word.split("=") for word in words)}
        config = config_of(model, **sizes | settings)
        return needed(processes(config, make_plan(config, 2, 0), facts, None, Lengths(10, 100), GIB))

    options = list(smaller(config_of(model, **sizes), 1))
    assert options[0] == []
    halved = next(words for words in options if words == ["actor.ppo_max_token_len_per_gpu=4096"])
    saving = next(words for words in options if words == ["model.enable_gradient_checkpointing=true"])
    assert options.index(halved) < options.index(saving)
    assert peak([]) > peak(halved) and peak([]) > peak(saving)


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(dump_yaml(config_of(model, actor__ppo_max_token_len_per_gpu=4096)))
    hardware = ["--tflops", "1", "--bandwidth", "10"]
    assert main(["plan", str(file), "trainer.n_gpus_per_node=8", "--memory", "16GB", *hardware]) == 0
    out, err = capsys.readouterr()
    assert "note: trainer.n_gpus_per_node=8 is set aside" in err
    assert f"{TINY:,} parameters" in out and "peak, in" in out and "It fits" in out
    assert main(["plan", str(file), "--memory", "100MB", "--json", *hardware]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False and told["settings"] is None  # the libraries alone are more
    assert told["processes"][0]["peak"] == told["needed"]
    assert main(["plan", str(file), "--memory", "100MB", *hardware]) == 1
    still = re.search(r"still be ([\d.]+) GiB", capsys.readouterr().out.replace("\n", " "))
    assert still and 0.3 < float(still[1]) < told["needed"] / GIB
    assert main(["plan", str(file), "--memory", "lots"]) == 2
    assert "lots" in capsys.readouterr().err
    assert main(["plan", str(file), "--gpus", "8"]) == 2
    assert "--memory" in capsys.readouterr().err


def test_the_calibration_does_what_the_run_will(model: Path) -> None:
    speed = calibrate(config_of(model), read_facts(str(model)), "cpu", 8, 1, LENGTHS)
    assert 1e-5 < speed.decode_step(8) < 5 and speed.flops > 1e6 and "measured with 1 and 3 layers" in speed.source


def test_the_calibration_adds_up_layers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two layers more took, half of it for each of the layers beyond the first."""
    part = pack(4, 2, LENGTHS, True)
    monkeypatch.setattr(plan_time, "_measure", lambda config, layers, *_: (part, 1.0 + layers, 0.01 * layers))
    facts = dataclasses.replace(read_facts(str(model)), layers=100)
    speed = calibrate(config_of(model), facts, "cpu", 8, 1, LENGTHS)
    assert speed.decode_step(8) == pytest.approx(1.0)  # 0.01 + 99 x 0.01
    assert speed.flops == pytest.approx(3 * plan_time._forward_flops(facts, part) / 101)

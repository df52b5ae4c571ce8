"""An engine of the user's own, named in ``rollout.name``: what is asked of its class, and what it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contract import PieceTokenizer, assert_contract, random_prompts
from toy_models import EOS, random_policy

from verl.cluster.placement import WorkerSpec
from verl.cluster.rollout_worker import RolloutWorker
from verl.cluster.weight_sync import exported
from verl.cluster.worker import Worker
from verl.config import Config, build_config
from verl.errors import ConfigError, EngineError
from verl.rollout.embedded import EmbeddedEngine, EngineLimits
from verl.rollout.engines import EngineContext, engine_class, give_weights, make_engine
from verl.rollout.protocol import SHARED_WEIGHTS, Request, RolloutEngine, SamplingParams, Slot

EXAMPLE = Path(__file__).parents[2] / "examples" / "extending" / "engine.py"


def config_of(engine: str, model: str = "m") -> Config:
    return build_config(
        {
            "data": {"train_files": "x", "train_batch_size": 2, "max_prompt_length": 8, "max_response_length": 8},
            "model": {"path": model, "dtype": "float32"},
            "actor": {"ppo_mini_batch_size": 2},
            "rollout": {"name": engine, "n": 2},
            "algorithm": {"adv_estimator": "grpo"},
            "reward": {"num_workers": 0},
            "trainer": {"device": "cpu"},
            "cluster": {"backend": "inline", "threads": 1},
        }
    )


def test_the_example_keeps_the_contract() -> None:
    policy, config = random_policy(), config_of(f"{EXAMPLE}:PlainEngine")
    context = EngineContext(policy, PieceTokenizer(), [EOS], EngineLimits(4), config)  # type: ignore[arg-type]
    assert_contract(lambda: make_engine(context), policy, random_prompts([3, 20, 9]))


def test_a_rollout_worker_makes_it_and_hands_it_the_trainers_weights(tiny_model_dir: Path) -> None:
    config = config_of(f"{EXAMPLE}:PlainEngine", str(tiny_model_dir))
    spec = WorkerSpec("rollout", 1, 1, 0.0, None, {}, "cpu", {}, None)
    worker, trainer = RolloutWorker(config, spec), Worker(config)
    worker.setup()
    found = trainer.setup()
    assert found is not None and found.tokens == 20 and found.largest < 1e-4 and not found.exact  # it claims nothing
    requests = [Request(Slot("p", i), [5, 9], SamplingParams(6, seed=i, ignore_eos=True)) for i in range(2)]
    before = [result.response_ids.tolist() for result in worker.sample(requests)]
    parameter = trainer._actor.policy.model.get_output_embeddings().weight
    with torch.no_grad():
        parameter.copy_(parameter.flip(0))
    trainer.publish(3)
    worker.load_weights(3, exported(trainer._actor.policy.model.named_parameters()))
    after = worker.sample(requests)
    assert [r.response_ids.tolist() for r in after] == [
        r.response_ids.tolist() for r in trainer.generate(requests, None)
    ]
    assert [r.response_ids.tolist() for r in after] != before and after[0].versions.tolist() == [3] * 6
    trainer.close()


WHOLE = """
class Engine:
    capabilities = frozenset()
    def __init__(self, context): self.seen = {}
    def submit(self, requests): ...
    def step(self): ...
    def abort(self, slots=None): ...
    def pause(self): ...
    def resume(self): ...
    def load_weights(self, version, tensors=()): self.seen = dict(tensors)
    def stats(self): ...
"""


def test_weights_are_given_to_an_engine_that_does_not_share_them(tmp_path: Path) -> None:
    file, policy = tmp_path / "own.py", random_policy()
    file.write_text(WHOLE + f"class Sharing(Engine): capabilities = frozenset({{{SHARED_WEIGHTS!r}}})\n")
    context = EngineContext(policy, PieceTokenizer(), [EOS], EngineLimits(), config_of(f"{file}:Engine"))  # type: ignore[arg-type]
    engine = make_engine(context)
    name, parameter = next(iter(policy.model.named_parameters()))
    give_weights(engine, policy, 1, [(name, torch.full_like(parameter, 2.0))])  # of ranks that share the model out
    assert (parameter == 2.0).all() and engine.seen.keys() == dict(policy.model.named_parameters()).keys()  # type: ignore[attr-defined]
    sharing = engine_class(f"{file}:Sharing")(context)
    give_weights(sharing, policy, 2)
    assert sharing.seen == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("capabilities = frozenset()", "capabilities = set()"), "must have capabilities, a frozenset:"),
        (("def pause(self)", "def paws(self)"), "must have pause(self):"),
        (("version, tensors=()", "version"), "must have load_weights(self, version, tensors):"),
        (("class Engine:", "from verl.rollout.protocol import *\nclass Engine(RolloutEngine):"), None),
        (("def stats(self): ...", ""), "must have stats(self):"),
        (("class Engine:", "class Engin:"), "did you mean Engin?"),
        (("class Engine:", "raise ValueError('no')\nclass Engine:"), "ValueError: no"),
    ],
)
def test_what_its_class_lacks_is_named(tmp_path: Path, change: tuple[str, str], said: str | None) -> None:
    file = tmp_path / "own.py"
    assert WHOLE.count(change[0]) == 1
    file.write_text(WHOLE.replace(*change))
    if said is None:
        assert engine_class(f"{file}:Engine").__name__ == "Engine"
        return
    with pytest.raises(ConfigError) as caught:
        engine_class(f"{file}:Engine")
    assert said in str(caught.value) and "own.py" in str(caught.value)


def test_a_method_left_to_the_protocol_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from verl.rollout.protocol import RolloutEngine\nclass Engine(RolloutEngine):\n    pass\n")
    with pytest.raises(ConfigError, match=r"capabilities, a frozenset; submit\(self, requests\); step\(self\); abort"):
        engine_class(f"{file}:Engine")


def test_what_it_raises_when_it_is_made_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(WHOLE.replace("self.seen = {}", "1 / 0"))
    policy = random_policy()
    context = EngineContext(policy, PieceTokenizer(), [EOS], EngineLimits(), config_of(f"{file}:Engine"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cannot be made\n.*ZeroDivisionError: division by zero \(own.py:4\)"):
        make_engine(context)


def test_answers_that_are_none_stop_the_run_at_its_start(tmp_path: Path, tiny_model_dir: Path) -> None:
    file = tmp_path / "own.py"
    wrong = "return [replace(r, log_probs=r.log_probs[:-1]) for r in ended]\n"
    text = EXAMPLE.read_text().replace("return ended\n", wrong)
    file.write_text(text.replace("import torch\n", "from dataclasses import replace\n\nimport torch\n", 1))
    worker = Worker(config_of(f"{file}:PlainEngine", str(tiny_model_dir)))
    with pytest.raises(EngineError, match=r"(?s)sampled 5 tokens, and its result has other columns.*log_probs 4"):
        worker.setup()
    worker.close()


@pytest.mark.parametrize("name", ["embeded", "own.py", "own.py:", "own.txt:Engine", "own.py:not a name"])
def test_a_name_that_is_neither_is_refused_with_the_configuration(name: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)rollout\.name: names no engine.*use embedded, or FILE.py:CLASS"):
        config_of(name)


def test_the_built_in_engine_has_all_that_is_asked() -> None:
    built_in: type[RolloutEngine] = EmbeddedEngine
    assert engine_class("embedded") is built_in

"""``verl eval``: a model sampled on a data file, scored, and summed up by data source."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.cli.arguments import Commands, command, positive, print_json, progress, settings, table, tell
from verl.cli.generate import add_sampling, sampling_choices
from verl.errors import ConfigError, VerlError

if TYPE_CHECKING:
    from rich.console import Console

    from verl.checkpoint.export import ModelSource
    from verl.config import Config
    from verl.trainer.offline_evaluation import ModelEvaluation


# Settings that have an option of their own here, by how they begin.
_BY_OPTION = {
    "model.path": "MODEL",
    "data.train_files": "DATA",
    "data.val_files": "DATA",
    "data.val_max_samples": "--limit",
    "rollout.val_kwargs.n=": "-n",
    "rollout.val_kwargs.": "an option such as --temperature or --top-p",
    "trainer.seed": "--seed",
}


def add(commands: Commands) -> None:
    parser = command(commands, "eval", _evaluate, json="results.json on standard output in place of the tables")
    parser.add_argument("model", help="an alias, a folder (such as an export), a GGUF file, a hub id, or a run")
    parser.add_argument("data", help="a data file as training takes it")
    add_evaluation(parser)
    parser.add_argument("--out", metavar="FOLDER", help="for results.json and samples.jsonl (default evaluations/...)")
    parser.add_argument("--plain", action="store_true", help="no boxes and no progress bar")


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """How a model is sampled on a data file and scored: what :func:`evaluation_config` reads."""
    parser.add_argument("words", nargs="*", default=[], metavar="key=value", help="further settings, as for verl train")
    add_sampling(parser)
    parser.add_argument("--max-response-length", type=positive, metavar="TOKENS", help="default 512, or the run's")
    parser.add_argument("--max-prompt-length", type=positive, metavar="TOKENS", help="default: as model or run allow")
    parser.add_argument("--limit", type=positive, metavar="ROWS", help="only the first so many prompts")
    score = parser.add_mutually_exclusive_group()
    score.add_argument("--reward", metavar="FILE.py", help="your own reward function (default: the rule of the source)")
    score.add_argument("--rule", metavar="NAME", help="a built-in rule for all rows")
    parser.add_argument("--reward-name", metavar="NAME", help="of the function in that file (default compute_score)")
    parser.add_argument("--prompt-key", metavar="COLUMN", help="default prompt")
    parser.add_argument("--answer-key", metavar="COLUMN", help="default: reward_model.ground_truth, label, answer, ...")


def _evaluate(arguments: argparse.Namespace) -> None:
    """Sample a model on a data file and score it.

    verl eval smollm2-135m data/gsm8k_test.parquet --limit 100
    verl eval runs/quickstart data/chain_sum_val.parquet -n 8
    verl eval my-model my.jsonl --reward my_reward.py -n 4 data.filter_overlong_prompts=true

    For a run, what its configuration says about data, reward and dtype holds unless an option or setting says
    otherwise.

    mean@N: of all responses. best@k: expected best of k of the N responses. maj@N: score of the most frequent answer.
    pass rate: responses with an accuracy (or else a reward) of at least 1. Intervals are over prompts. See
    docs/rewards.md.
    """
    from verl.cluster.threads import available_cores, set_environment

    set_environment(available_cores())
    out = _free_folder(arguments)

    from rich.console import Console

    from verl.checkpoint.export import opened, opened_model
    from verl.models.quiet import without_bars
    from verl.trainer.offline_evaluation import ModelEvaluation

    plain = arguments.plain or arguments.json
    with ExitStack() as stack:
        stack.enter_context(without_bars())
        model = stack.enter_context(opened_model(arguments.model))
        config = evaluation_config(arguments, model)
        evaluation = ModelEvaluation(stack.enter_context(opened(config)))
        if evaluation.left_out:
            tell([f"{evaluation.left_out} rows cannot be used and are left out"])
        if evaluation.plan.n > 1 and evaluation.plan.temperature == 0:
            tell([f"greedy, so the {evaluation.plan.n} responses to a prompt are the same"])
        with progress(evaluation.responses, "responses", plain) as told:
            evaluation.run(told)
        results = _described(arguments, config, model) | {"left_out": evaluation.left_out} | evaluation.results()
        _write(out, results, evaluation, model.step or 0)
    if arguments.json:
        print_json(results)
    else:
        _print(Console(highlight=False), results, plain)
        print(f"{out / 'results.json'}, {out / 'samples.jsonl'}")


def _free_folder(arguments: argparse.Namespace) -> Path:
    """Where to write; earlier results are never written over. Raises ConfigError: --out holds results."""
    if arguments.out is not None:
        folder = Path(arguments.out).expanduser()
        if (folder / "results.json").exists() or (folder.exists() and not folder.is_dir()):
            what = "--out holds results already" if folder.is_dir() else "--out is a file"
            raise ConfigError(what, folder, "name another folder")
        return folder
    model, data = (Path(word).expanduser().absolute() for word in (arguments.model, arguments.data))
    name = f"{model.name}-{data.stem}-n{arguments.n}".lstrip(".")
    folder, number = Path("evaluations") / name, 1
    while folder.exists():
        number += 1
        folder = Path("evaluations") / f"{name}-{number}"
    return folder


def evaluation_config(arguments: argparse.Namespace, model: ModelSource | None) -> Config:
    """The whole configuration: the run's or the defaults, the settings over it, the options over them. Raises
    ConfigError: any of it does not fit."""
    from verl.config import build_config, load_config
    from verl.config.schema_supervised import schema_of
    from verl.tracking.facts import read_config

    extra, words = settings(arguments.words)
    if extra is not None:
        raise ConfigError("verl eval takes one data file", extra, "further words are settings: key=value")
    for word in words:
        option = next((option for key, option in _BY_OPTION.items() if word.lstrip("+").startswith(key)), None)
        if option is not None:
            raise ConfigError("this setting is an argument of verl eval", word, f"give {option} instead")
    run = model.run.config if model is not None and model.run is not None and model.run.config.exists() else None
    if model is not None and model.run is not None and schema_of(read_config(model.run)[1] or {}) is not None:
        run = None  # supervised training says nothing about sampling and rewards
    needed = [] if run else ["model.path=-", "data.train_files=-"]  # replaced below
    tree = load_config(run, [*needed, *words]).config.model_dump(mode="json")
    tree["rollout"]["val_kwargs"] |= {"n": arguments.n, "do_sample": None, **sampling_choices(arguments)}
    files = [arguments.data]
    tree["data"] |= {"train_files": files, "val_files": files, "val_max_samples": arguments.limit or -1}
    tree["model"]["path"] = model.path if model is not None else "-"
    tree["trainer"]["seed"] = arguments.seed
    names = ("max_prompt_length", "max_response_length", "prompt_key", "answer_key", "chat_template_kwargs")
    given = {
        "data": {name: getattr(arguments, name) for name in (*names, "trust_remote_code")},
        "model": {"dtype": arguments.dtype, "trust_remote_code": arguments.trust_remote_code},
        "rollout": {"max_num_seqs": arguments.max_num_seqs},
        "reward": {"rule": arguments.rule},
    }
    for section, values in given.items():
        tree[section] |= {name: value for name, value in values.items() if value}
    custom = tree["reward"]["custom_reward_function"]
    if arguments.reward or arguments.rule:
        custom["path"] = arguments.reward
    if arguments.reward_name:
        custom["name"] = arguments.reward_name
    set_by_hand = arguments.max_prompt_length or any(word.startswith("data.max_prompt_length") for word in words)
    if model is not None and run is None and not set_by_hand:
        tree["data"]["max_prompt_length"] = _room(model.path, tree)
    return build_config(tree)


def _room(model: str, tree: dict[str, Any]) -> int:
    """Tokens that the model's positions leave for a prompt."""
    from verl.models.loading import load_config

    text_config = load_config(model, tree["model"]["trust_remote_code"]).get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or 2**31
    return max(1, int(positions) - int(tree["data"]["max_response_length"]))


def _described(arguments: argparse.Namespace, config: Config, model: ModelSource) -> dict[str, Any]:
    custom = config.reward.custom_reward_function
    return {
        "model": arguments.model,
        "step": model.step,
        "data": arguments.data,
        "reward": f"{custom.name} in {custom.path}" if custom.path else config.reward.rule,
        "dtype": config.model.dtype,
        "seed": config.trainer.seed,
        **asdict(config.validation_sampling),
        "max_prompt_length": config.data.max_prompt_length,
        "max_response_length": config.data.max_response_length,
    }


def _write(folder: Path, results: dict[str, Any], evaluation: ModelEvaluation, step: int) -> None:
    """Both files whole, the results last: where they are, the samples are, too."""
    from verl.json_lines import json_line, json_value
    from verl.run_dir import write_atomic

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "choose another --out"
        raise VerlError("the results cannot be written", f"{folder} ({error.strerror})", fix) from None
    lines = [json_line({"step": step} | asdict(row)) for row in evaluation.samples]
    write_atomic(folder / "samples.jsonl", "".join(f"{line}\n" for line in lines))
    write_atomic(folder / "results.json", json.dumps(json_value(results), indent=2) + "\n")


def _print(console: Console, results: dict[str, Any], plain: bool) -> None:
    from rich import box

    parts = dict(results["sources"])
    if len(parts) > 1:
        parts["overall"] = results["overall"]
    for source, figures in parts.items():
        title = f"{source}: {figures['prompts']} prompts x {results['n']}"
        frame = None if plain else box.SIMPLE_HEAD
        shown = table("", "value", "95% interval", title=title, box=frame, title_style="bold")
        for name, found in _lines(figures):
            interval = "" if found["low"] is None else f"{_number(found['low'])} to {_number(found['high'])}"
            shown.add_row(name, _number(found["value"]), interval)
        shown.add_row("unscored", str(figures["unscored"]), "")
        console.print(shown)


def _lines(figures: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("acc", "reward"):
        for name, found in figures.get(kind, {}).items():
            yield f"{kind} {name}", found
    for name, label in (("pass_rate", "pass rate"), ("length", "tokens"), ("cut", "cut by length")):
        if figures[name] is not None:
            yield label, figures[name]


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"

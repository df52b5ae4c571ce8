"""``verl init``: a commented configuration for a given model, data and machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.cli.arguments import Commands, command, positive
from verl.diagnostics.plan import GIB, Lengths, Machine, this_machine, to_fit, up
from verl.errors import ConfigError, DataError, RewardError
from verl.models.facts import ModelFacts, read_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config.settings import Setting
    from verl.data.rows import PromptRow

LOOKED_AT = 5000  # rows whose prompts are measured; more would only take time
STEPS, OFTEN = 100, 20  # of a first run: long enough to see a trend
SMALL = 1_000_000_000  # parameters below which a larger learning rate is in order
MOST_TOKENS = 16384  # in one backward pass; more gains nothing
MOST_SEQUENCES = {"cpu": 64, "cuda": 256}
BATCH_RESPONSES = {"cpu": 128, "cuda": 512}  # of one step: a steady gradient, and steps that end
Entry = tuple[Any, str]  # a value and why it is that


def add(commands: Commands) -> None:
    init = command(commands, "init", _init)
    init.add_argument("--model", required=True, help="an alias, a Hugging Face folder, a GGUF file or a hub id")
    init.add_argument("--data", required=True, nargs="+", metavar="FILE", help="training files")
    init.add_argument("--val", nargs="+", default=[], metavar="FILE", help="held-out files, for validation")
    init.add_argument("--preset", default="grpo", metavar="NAME", help="see verl presets (default grpo)")
    init.add_argument("--out", default="my.yaml", metavar="FILE", help="file to write (default my.yaml)")
    init.add_argument("--force", action="store_true", help="write over an existing file")
    init.add_argument("--reward", metavar="FILE.py", help="yours (default: a rule that fits, or a beginning of one)")
    init.add_argument("--reward-name", metavar="NAME", help="of the function in that file (default compute_score)")
    init.add_argument("--prompt-key", metavar="COLUMN", help="column with the prompts (default: found by its name)")
    init.add_argument("--answer-key", metavar="COLUMN", help="column with the answers (default: found by its name)")
    init.add_argument("--response-length", type=positive, default=256, metavar="TOKENS", help="at most (default 256)")


def _init(arguments: argparse.Namespace) -> None:
    """Write a commented configuration for your model, data and machine.

    verl init --model smollm2-135m --data my.jsonl --preset grpo --out my.yaml
    """
    from verl.config.settings import read_preset
    from verl.data.rendering import UNTEMPLATED, untemplated
    from verl.models.loading import load_tokenizer
    from verl.run_dir import write_atomic

    out = Path(arguments.out)
    preset = read_preset(arguments.preset)
    _refuse_to_overwrite(out, arguments.force)
    model = read_facts(arguments.model)
    tokenizer = load_tokenizer(arguments.model)
    data = read_data(arguments, tokenizer)
    reward, template = choose_reward(arguments, data, out)
    machine = this_machine()
    # Also the check of verl train, before anything is written.
    entries, fits = fitted(choose_settings(arguments, model, machine, data, preset) | reward, machine, model)
    if not fits:
        there = f"{machine.memory / GIB:.1f} GiB"
        print(f"warning: this model may not fit into {there}: verl plan {out} says what it needs")
    if template is not None:
        write_atomic(*template)
        print(f"{template[0]}: the beginning of a reward function, as no built-in rule fits the data; make it yours")
    if untemplated(data.looked_at, tokenizer):
        print(f"note: {UNTEMPLATED}")
    write_atomic(out, render(entries, f"{arguments.preset} for {arguments.model}, written by verl init"))
    print(f"{out}: read its comments, then try it with\n  verl train {out} trainer.total_training_steps=2")


def _refuse_to_overwrite(file: Path, force: bool) -> None:
    if file.exists() and not force:
        raise ConfigError("the file is there already", str(file), "choose another name with --out, or add --force")


@dataclass(frozen=True)
class DataFacts:
    """What was found in the training files."""

    prompt_key: str
    answer_key: str | None
    rows: int  # of all files; ``looked_at`` of them were read
    looked_at: list[PromptRow]
    lengths: list[int]  # tokens of their prompts, sorted
    bad: list[str]  # reasons of rows that cannot be used

    def percentile(self, share: float) -> int:
        return self.lengths[min(len(self.lengths) - 1, int(share * len(self.lengths)))]


def read_data(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> DataFacts:
    """Find the columns, read the rows, measure the prompts. Raises DataError: files or columns that are not there, or
    no row that can be used."""
    from verl.config import DataConfig
    from verl.data.rendering import render as prompt_ids
    from verl.data.rows import PROMPT_COLUMNS, TRUTH_COLUMNS, FileRows, PromptRow
    from verl.data.tables import expand_files, open_table

    columns = open_table(expand_files(arguments.data, "--data")[0]).columns
    prompt_key = arguments.prompt_key or _column(columns, PROMPT_COLUMNS, "prompts", "--prompt-key")
    answer_key = arguments.answer_key
    if answer_key is None and "reward_model" not in columns:
        _column(columns, TRUTH_COLUMNS, "answers", "--answer-key")
    config = DataConfig(train_files=arguments.data, prompt_key=prompt_key, answer_key=answer_key)
    source = FileRows(arguments.data, config, "--data")
    found = source.read(0, LOOKED_AT)
    rows = [row for row in found if isinstance(row, PromptRow)]
    bad = [str(row) for row in found if not isinstance(row, PromptRow)]
    ids, refused = prompt_ids(rows, tokenizer)
    bad += refused.values()
    lengths = sorted(len(row_ids) for place, row_ids in enumerate(ids) if place not in refused)
    if not lengths:
        raise DataError("no row can be used", bad[0], "verl data inspect shows what is wrong")
    return DataFacts(prompt_key, answer_key, len(source), rows, lengths, bad)


def _column(columns: Sequence[str], usual: Sequence[str], what: str, option: str) -> str:
    if not columns:  # no row can be read: the first one says why
        return usual[0]
    for name in usual:
        if name in columns:
            return name
    raise DataError(f"no column of the data is known to hold {what}", ", ".join(columns), f"name it with {option}")


def choose_reward(
    arguments: argparse.Namespace, data: DataFacts, out: Path
) -> tuple[dict[str, Entry], tuple[Path, str] | None]:
    """Settings of the reward, and a file to write if no rule fits: (path, content)."""
    from verl.rewards.custom import load_function
    from verl.rewards.rules import by_source
    from verl.rewards.written_numbers import whole_number

    sources = sorted({row.data_source for row in data.looked_at})
    file = Path(arguments.reward or out.with_name(f"{out.stem.replace('-', '_')}_reward.py"))
    entries: dict[str, Entry] = {"reward.custom_reward_function.path": (str(file), "compute_score(...) in it scores")}
    if arguments.reward is not None:
        name = arguments.reward_name or "compute_score"
        load_function(file, name)
        entries["reward.custom_reward_function.path"] = (str(file), f"{name}(...) in it scores")
        return entries | {"reward.custom_reward_function.name": (name, "the function in that file")}, None
    if arguments.reward_name is not None:
        raise ConfigError("--reward-name is given without its file", arguments.reward_name, "add --reward FILE.py")
    try:
        for source in sources:
            by_source(source)
        return {"reward.rule": ("auto", f"a built-in rule belongs to {', '.join(sources)}")}, None
    except RewardError:
        pass
    if all(whole_number(str(row.ground_truth).rpartition("####")[2]) is not None for row in data.looked_at):
        return {"reward.rule": ("number", "every answer is a number: the last number of a response counts")}, None
    _refuse_to_overwrite(file, arguments.force)
    example = str(data.looked_at[0].ground_truth)[:40]
    template = Path(__file__).with_name("reward_template.txt").read_text(encoding="utf-8")
    return entries, (file, template.format(config=out.name, module=file.stem, example=example))


def choose_settings(
    arguments: argparse.Namespace, model: ModelFacts, machine: Machine, data: DataFacts, preset: Sequence[Setting]
) -> dict[str, Entry]:
    """Every key that is written, with its value and the reason."""
    chosen: dict[str, Any] = {setting.key: setting.value for setting in preset}
    prompt, overlong, response = choose_lengths(model, data, arguments.response_length)
    n = chosen.get("rollout.n", 1)
    device = "cuda" if machine.gpus else "cpu"
    prompts = choose_prompts(data.rows, n, device)
    steps = max(1, data.rows // prompts)
    measured = f"prompt tokens: median {data.percentile(0.5)}, 90% {data.percentile(0.9)}, "
    measured += f"99% {data.percentile(0.99)}, longest {data.lengths[-1]}"
    files = arguments.data if len(arguments.data) > 1 else arguments.data[0]
    unusable = f", of which {len(data.bad)} of the first {LOOKED_AT} cannot be used" if data.bad else ""
    positions = f"{model.positions} positions" if model.positions else "no limit of positions"
    found = f"{machine.gpus} GPU" if machine.gpus else f"{machine.cores} cores, no GPU"
    tokens = max(MOST_TOKENS, prompt + response)
    entries: dict[str, Entry] = {key: (value, f"preset {arguments.preset}") for key, value in chosen.items()}
    entries |= {
        "data.train_files": (files, f"{data.rows} rows{unusable}"),
        "data.val_files": (arguments.val, "" if arguments.val else "none given, so there is no validation"),
        "data.prompt_key": (data.prompt_key, "column"),
        "data.train_batch_size": (prompts, f"prompts a step; x {n} = {prompts * n} responses"),
        "data.max_prompt_length": (prompt, measured),
        "data.max_response_length": (response, "tokens; the engine stops a response there"),
        "model.path": (arguments.model, f"{model.parameters / 1e6:,.1f} M parameters, {positions}"),
        "model.dtype": ("bfloat16", "of the computation; weights are kept in float32"),
        "actor.ppo_mini_batch_size": (prompts, "prompts an optimizer step: one step a batch"),
        "actor.ppo_max_token_len_per_gpu": (tokens, "tokens of a micro-batch; verl plan tells what memory it takes"),
        "actor.optim.lr": (1e-5 if model.parameters < SMALL else 1e-6, "usual for this size"),
        "rollout.n": (n, "responses a prompt"),
        "rollout.max_num_seqs": (min(prompts * n, MOST_SEQUENCES[device]), "responses decoded at once"),
        "trainer.experiment_name": (Path(arguments.out).stem, "the run's folder is runs/ and this"),
        "trainer.total_training_steps": (STEPS, f"one pass over the data: {steps}"),
        "trainer.test_freq": (OFTEN if arguments.val else -1, "steps between validations"),
        "trainer.save_freq": (OFTEN, "steps between checkpoints"),
        "trainer.device": (device, f"found: {found}, {machine.memory / GIB:.1f} GiB free"),
        "cluster.backend": ("ray", "inline: everything in one process, for breakpoints"),
    }
    if data.answer_key is not None:
        entries["data.answer_key"] = (data.answer_key, "column")
    if overlong:
        reason = f"{overlong} of {len(data.lengths)} prompts are longer; they are left out"
        entries["data.filter_overlong_prompts"] = (True, reason)
    if chosen["algorithm.adv_estimator"] == "gae":
        entries["critic.ppo_max_token_len_per_gpu"] = (tokens, "as the actor's")
        entries["critic.optim.lr"] = (2 * entries["actor.optim.lr"][0], "the value head starts from nothing")
    return entries


def choose_prompts(rows: int, n: int, device: str) -> int:
    """Prompts of a step: a power of two, as many as there are rows and as the usual number of responses asks for."""
    return 1 << max(min(rows, BATCH_RESPONSES[device] // n).bit_length() - 1, 0)


def fitted(entries: dict[str, Entry], machine: Machine, model: ModelFacts) -> tuple[dict[str, Entry], bool]:
    """The settings, where need be with those that ``verl plan`` advises; and whether the run then fits the machine.
    Raises ConfigError: the settings are wrong."""
    from verl.config import load_config
    from verl.config.settings import read_overrides

    values = {key: value for key, (value, _) in entries.items()}
    config = load_config(values).config
    lengths = Lengths(config.data.max_prompt_length, config.data.max_response_length)
    critic = model if config.uses_critic else None
    words, fits = to_fit(lambda more: load_config(values, more).config, machine, model, critic, lengths)
    return entries | {setting.key: (setting.value, "what the memory allows") for setting in read_overrides(words)}, fits


def choose_lengths(model: ModelFacts, data: DataFacts, response: int) -> tuple[int, int, int]:
    """Most tokens of a prompt, how many prompts are longer, and most tokens of a response."""
    room = model.positions or 2**31
    prompt = up(data.lengths[-1], 8)
    if prompt > 2 * data.percentile(0.99):  # a few very long ones would decide the memory of all
        prompt = up(data.percentile(0.99), 8)
    prompt = min(prompt, room - min(response, room // 2))
    return prompt, sum(length > prompt for length in data.lengths), min(response, room - prompt)


def render(entries: dict[str, Entry], title: str) -> str:
    """YAML with a comment behind each value that has a reason, in the schema's order."""
    from verl.config.explain import outline
    from verl.config.keys import leaves, one_line

    texts = {key: one_line(entries[key][0]) for key in leaves() if key in entries}
    lines = outline(texts, {key: f"# {reason}" for key, (_, reason) in entries.items() if reason})
    head = f"# {title}. Keys that are not here have their defaults: verl config show."
    return "\n".join([head, *(f"{line:<44} {reason}".rstrip() for line, reason in lines)]) + "\n"

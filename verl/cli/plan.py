"""``verl plan``: what a configuration will need, before anything is loaded."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from verl.cli.arguments import Commands, a_run, above_zero, command, natural, print_json, screen, settings, table, tell
from verl.diagnostics.plan import GIB, SPARE, Lengths, Process, bytes_of, needed, planned, this_machine, to_fit
from verl.diagnostics.plan_time import Speed, Stage, batch_words, calibrate, given, stages_of
from verl.errors import ConfigError
from verl.models.facts import ModelFacts, read_facts

if TYPE_CHECKING:
    from verl.cluster.placement import Plan
    from verl.config import Config
    from verl.diagnostics.simulate import Setting


def add(commands: Commands) -> None:
    plan = command(commands, "plan", _plan, json="everything as JSON")
    plan.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a YAML file; settings")
    plan.add_argument("--preset", action="append", default=[], metavar="NAME", help="under the file; may be repeated")
    plan.add_argument("--memory", type=_memory, metavar="SIZE", help="of one GPU, or the machine: 80GB (GiB are meant)")
    plan.add_argument("--gpus", type=natural, metavar="N", help="of the machine; default: those that are here")
    lengths = _numbers(2, "two numbers of tokens such as 200,600")
    plan.add_argument("--lengths", type=lengths, metavar="P,R", help="tokens of prompt and response; default: the most")
    plan.add_argument("--tflops", type=above_zero, metavar="X", help="that a process attains in training, not measured")
    plan.add_argument("--bandwidth", type=above_zero, metavar="GB/s", help="that a process reads memory with")
    simulate = (
        "step time of every trainer.mode and more rollout workers, simulated; with lengths and speeds of a run, or "
        "else those planned and long-tailed lengths"
    )
    plan.add_argument("--simulate", nargs="?", const="", metavar="RUN", help=simulate)
    counts = _numbers(None, "numbers of workers such as 1,2,4")
    plan.add_argument("--workers", type=counts, metavar="N,...", help="to simulate (default: 1, 2 and 4 times these)")


def _memory(text: str) -> int:
    found = re.fullmatch(r"([\d.]+)\s*([GMT]?)(i?B)?", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80GB or 512MB")
    return int(above_zero(found[1]) * {"M": 2**20, "T": 2**40}.get(found[2].upper(), GIB))


def _numbers(count: int | None, words: str) -> Callable[[str], list[int]]:
    def read(text: str) -> list[int]:
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text) or count not in (None, text.count(",") + 1):
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
        return [int(word) for word in text.split(",")]

    return read


def _plan(arguments: argparse.Namespace) -> int:
    """Memory, batch sizes and step time of a configuration, before it runs.

    verl plan my.yaml                                     does it fit here, and how long does a step take
    verl plan my.yaml --gpus 8 --memory 80GB              on eight GPUs of 80 GiB each
    verl plan my.yaml --gpus 8 --memory 80GB --tflops 400 --bandwidth 2000
    verl plan my.yaml --lengths 200,600                   with prompts and responses of these lengths, not the longest
    verl plan my.yaml --simulate runs/first               step time of every schedule, as measured in a run

    No weight is loaded. The exit code is 1 where the run does not fit, else 0. See docs/planning.md.
    """
    from verl.config import load_config

    source, overrides = _source(arguments)
    loaded = load_config(source, overrides, arguments.preset)
    here = this_machine()
    gpus = here.gpus if arguments.gpus is None else arguments.gpus
    if gpus and not here.gpus and arguments.memory is None:
        raise ConfigError("this machine has no GPU to ask for its memory", None, "add --memory, for example 80GB")
    machine = replace(here, memory=arguments.memory or here.memory, gpus=gpus)

    def built(extra: list[str]) -> Config:
        return load_config(source, [*overrides, *extra], arguments.preset).config

    config = loaded.config
    tell(loaded.notices)
    model = read_facts(config.model.path, config.model.trust_remote_code)
    critic = None
    if config.uses_critic:
        critic = read_facts(config.critic_model_path, config.critic_code_trusted, classifier=True)
    lengths = Lengths(*(arguments.lengths or (config.data.max_prompt_length, config.data.max_response_length)))
    plan, found = planned(config, machine, model, critic, lengths)
    if arguments.simulate:  # what a run has measured needs nothing else
        return _print_simulated(*_simulated(config, plan, arguments), arguments.json)
    words, memory = list(batch_words(config, plan, lengths)), machine.memory
    less, possible = to_fit(built, machine, model, critic, lengths)
    fits, advice = possible and not less, less if possible else None
    least = needed(planned(built(less), machine, model, critic, lengths)[1])
    speed = _speed(config, plan, model, lengths, arguments, bool(here.gpus))
    stages = stages_of(config, plan, model, critic, lengths, speed) if speed else []
    if arguments.simulate is not None:
        if speed is None:
            fix = "give --tflops and --bandwidth, or --simulate RUN"
            raise ConfigError("no speed to simulate with: there is no GPU to measure", None, fix)
        return _print_simulated(*_simulated(config, plan, arguments, stages, lengths, speed), arguments.json)
    subject = source or "the given settings"
    if arguments.json:
        told = [asdict(process) | {"peak": process.peak, "peak_stage": process.peak_stage} for process in found]
        body: dict[str, Any] = {"subject": subject, "model": asdict(model), "lengths": asdict(lengths), "batch": words}
        body |= {"processes": told, "needed": needed(found), "memory": memory, "fits": fits, "settings": advice}
        print_json(body | {"speed": speed and speed.source, "stages": [asdict(stage) for stage in stages]})
        return int(not fits)
    _print(subject, model, lengths, words, found)
    _print_time(stages, speed.source if speed else None)
    _print_verdict(needed(found), memory, fits, advice, least, bool(gpus))
    return int(not fits)


def _source(arguments: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The configuration file, or that of the run to simulate, and the settings."""
    source, overrides = settings(arguments.words)
    if source is None and arguments.simulate:
        source = str(a_run(arguments.simulate).config)
    if source is None and not overrides:
        raise ConfigError("there is no configuration to plan", None, "verl plan my.yaml [key=value ...]")
    if (arguments.tflops is None) != (arguments.bandwidth is None):
        raise ConfigError("--tflops and --bandwidth belong together", None, "give both, or neither to measure")
    return source, overrides


def _speed(
    config: Config, plan: Plan, model: ModelFacts, lengths: Lengths, arguments: argparse.Namespace, gpu: bool
) -> Speed | None:
    """As given, or measured here; None of a GPU that is not here."""
    if arguments.tflops is not None:
        return given(model, bytes_of(config), lengths, arguments.tflops, arguments.bandwidth)
    actor = plan.groups[0]
    if actor.device != "cpu" and not gpu:
        return None
    rows = min(config.rollout.max_num_seqs, config.data.train_batch_size * config.rollout.n)
    return calibrate(config, model, actor.device, rows, actor.threads, lengths)


def _simulated(
    config: Config, plan: Plan, arguments: argparse.Namespace, stages: Any = (), lengths: Any = None, speed: Any = None
) -> tuple[Setting, list[int], str]:
    """The setting, the numbers of rollout workers to try, and where the figures are from."""
    from verl.diagnostics.doctor import config_of
    from verl.diagnostics.simulate import Setting, drawn_from, long_tailed, measure

    prompts, n, places = config.data.train_batch_size, config.rollout.n, config.rollout.max_num_seqs
    workers = sum(spec.count for spec in plan.rollout) or plan.groups[0].count
    longest = config.data.max_response_length
    if arguments.simulate:
        run = a_run(arguments.simulate)
        measured = measure(run, config_of(run) or config)
        drawn, token, training = measured.lengths, measured.token, measured.training
        source = f"measured in {measured.steps} step{'s'[: measured.steps > 1]} of {run.path}"
    else:
        token = speed.decode_step(min(-(-prompts * n // workers), places))
        training = sum(stage.seconds for stage in stages if stage.name != "rollout")
        mean = lengths.response if arguments.lengths else longest / 4
        drawn, source = long_tailed(mean, longest), f"{speed.source}; lengths log-normal"
    updates, longest = max(1, prompts // config.streamed_prompts), max(longest, *drawn)
    setting = Setting(prompts, n, workers, places, token, training, drawn_from(drawn), longest, updates)
    words = (
        f"{prompts * n} responses a step of {min(drawn)} to {max(drawn)} tokens (mean {sum(drawn) / len(drawn):.0f}); "
        f"{places} places a worker, {token * 1e3:.3g} ms a token in each; {training:.3g} s of a step beside sampling "
        f"({source})"
    )
    return setting, arguments.workers or [workers, 2 * workers, 4 * workers], words


def _print_simulated(setting: Setting, workers: list[int], words: str, json: bool) -> int:
    from verl.diagnostics.simulate import schedules

    found = schedules(setting, workers)
    if json:
        rows = {label: [asdict(cell) for cell in row] for label, row in found.items()}
        print_json({"setting": words, "workers": workers, "schedules": rows})
        return 0
    console = screen()
    console.print(words)
    many = [f"{count} worker{'s'[: count > 1]}" for count in workers]
    shown = table("trainer.mode", *many, title="Seconds of a step, simulated")
    for label, row in found.items():
        shown.add_row(label, *[_short(p.seconds) + (f" ({p.waste:.0%} waste)" if p.waste > 0.005 else "") for p in row])
    console.print(shown)
    own = "rollout workers of their own, with hardware of their own"
    console.print(f"{own}; a token takes as long with few as with many")
    return 0


def _print(subject: str, model: ModelFacts, lengths: Lengths, words: list[str], found: list[Process]) -> None:
    from verl.tracking.console import printable

    console = screen()
    console.print(
        f"{printable(subject)}: {model.parameters:,} parameters, {model.layers} layers of {model.hidden}, "
        f"{model.heads} heads ({model.kv_heads} of keys and values), vocabulary {model.vocabulary:,}"
    )
    console.print("\nBatch sizes", style="bold")
    console.print(*(f"  {word}" for word in words), sep="\n")
    for process in found:
        many = f"{process.count} processes, each" if process.count > 1 else "one process"
        shown = table("part", "GiB", title=f"{printable(process.name)} ({many}, {process.device})")
        for part, size in process.held.items():
            shown.add_row(part, f"{size / GIB:.2f}")
        shown.add_section()
        for stage, parts in process.stages.items():
            here = stage == process.peak_stage
            shown.add_row(f"{stage} needs beside", f"{sum(parts.values()) / GIB:.2f}", style="bold" if here else "dim")
            for part, size in parts.items():
                if size:
                    shown.add_row(f"  {part}", f"{size / GIB:.2f}", style=None if here else "dim")
        shown.add_section()
        shown.add_row(f"peak, in {process.peak_stage}", f"{process.peak / GIB:.2f}", style="bold")
        console.print("", shown, sep="\n")


def _print_time(stages: list[Stage], source: str | None) -> None:
    console = screen()
    if source is None:
        console.print("\nStep time: give --tflops and --bandwidth of one GPU; there is none here to measure")
        return
    shown = table("stage", "tokens", "TFLOP", "seconds", title="One step")
    for stage in stages:
        shown.add_row(stage.name, f"{stage.tokens:,}", _short(stage.flops / 1e12), _short(stage.seconds))
    shown.add_section()
    flops, seconds = sum(stage.flops for stage in stages), sum(stage.seconds for stage in stages)
    shown.add_row("together", "", _short(flops / 1e12), _short(seconds), style="bold")
    console.print("", shown, source, sep="\n")


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _print_verdict(needed: int, memory: int, fits: bool, advice: list[str] | None, least: int, gpu: bool) -> None:
    from rich.text import Text

    console = screen()
    of = "of a GPU" if gpu else "of this machine"
    verdict = Text("\n").append(*("It fits", "bold green") if fits else ("It does not fit", "bold red"))
    most = f"{memory / GIB:.2f} GiB {of} at most {(1 - SPARE) * memory / GIB:.2f} should be used"
    console.print(verdict.append(f": {needed / GIB:.2f} GiB are needed, of {most}"))
    if fits:
        return
    if advice is None:
        console.print(
            "With smallest batches, gradient checkpointing and sharded weights (on several ranks) it would still be "
            f"{least / GIB:.2f} GiB: a smaller model, more memory, more GPUs (--gpus), or pools of their own for roles "
            "(cluster.placement) would make it fit."
        )
        return
    console.print("With these settings it fits:", *(f"  {word}" for word in advice), sep="\n")

"""``verl data``: making, converting and looking at data files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from verl.cli.arguments import Commands, command, group, histogram, natural, positive, print_json, progress
from verl.cli.evaluate import add_evaluation, evaluation_config

if TYPE_CHECKING:
    from verl.data.inspection import Count, Inspection, Lengths

SHOWN_SKIPPED = 5


def add(commands: Commands) -> None:
    data = group(commands, "data", "make, convert and look at data files")
    gym = command(data, "reasoning-gym", _data_reasoning_gym)
    gym.add_argument("--task", required=True, help="such as chain_sum")
    gym.add_argument("--size", type=positive, required=True, help="training problems")
    gym.add_argument("--val-size", type=natural, default=0, help="held-out problems, into <out>_val.parquet")
    gym.add_argument("--seed", type=int, default=0, help="default 0")
    gym.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the task; may be repeated")
    gym.add_argument("--instruction", help="system message put before every problem")
    gym.add_argument("--out", help="parquet file to write (default data/<task>.parquet)")

    gsm8k = command(data, "gsm8k", _data_gsm8k)
    gsm8k.add_argument("--input", required=True, help="train.jsonl or test.jsonl of GSM8K")
    gsm8k.add_argument("--out", help="parquet file to write (default data/gsm8k_<split>.parquet)")
    gsm8k.add_argument("--split", default="train", help="name noted in every row (default train)")
    gsm8k.add_argument("--instruction", help="text appended to every question (default asks for #### answer)")

    convert = command(data, "convert", _data_convert)
    convert.add_argument("files", nargs="+", metavar="IN", help="files, patterns or folders")
    convert.add_argument("--out", required=True, help="file to write: .parquet or .jsonl")
    for option, metavar, help in (
        ("--map", "TARGET=COLUMN", "may be repeated; a.b: key b of column a"),
        ("--set", "TARGET=VALUE", "the same in every row; may be repeated"),
    ):
        convert.add_argument(option, action="append", default=[], metavar=metavar, help=help)
    convert.add_argument("--template", help='the prompt, with columns in braces: "Solve: {question}"')
    convert.add_argument("--system", help="system message before every prompt")
    convert.add_argument("--plain", action="store_true", help="prompts as plain text, for models without chat template")

    preferences = command(data, "preferences", _data_preferences)
    preferences.add_argument("data", help="a data file as training takes it: prompts, and what they are scored by")
    source = preferences.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="is sampled: as verl eval takes it; -n says how often")
    source.add_argument("--responses", metavar="FILE", help="of verl generate --input DATA --out FILE")
    preferences.add_argument("--out", required=True, help="file to write: .parquet or .jsonl")
    add_evaluation(preferences)
    preferences.set_defaults(n=8)

    inspect = command(data, "inspect", _data_inspect, json="print the report as JSON")
    inspect.add_argument("files", nargs="+", metavar="FILE", help="files, patterns or folders")
    inspect.add_argument("--model", help="measures and renders the prompts as training with this model would")
    inspect.add_argument("--limit", type=positive, default=512, help="data.max_prompt_length in tokens (default 512)")
    inspect.add_argument("--prompt-key", help="column of the prompts (default: the usual names)")
    inspect.add_argument("--answer-key", help="column of the ground truths (default: the usual names)")


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def _data_reasoning_gym(arguments: argparse.Namespace) -> None:
    """Problems with verifiable answers, made by a program.

    verl data reasoning-gym --task chain_sum --size 2000 --val-size 100 --option min_terms=2
    """
    from verl.data.generate import make_reasoning_gym
    from verl.data.output import parse_options

    made = make_reasoning_gym(
        arguments.task,
        arguments.size,
        arguments.out or f"data/{arguments.task}.parquet",
        seed=arguments.seed,
        options=parse_options(arguments.option),
        val_size=arguments.val_size,
        instruction=arguments.instruction,
    )
    for part in made:
        print(f"{part.path}: {_rows(part.rows)}")


def _data_gsm8k(arguments: argparse.Namespace) -> None:
    """GSM8K's jsonl files, converted.

    verl data gsm8k --input train.jsonl
    """
    from verl.data.generate import GSM8K_INSTRUCTION, make_gsm8k

    instruction = GSM8K_INSTRUCTION if arguments.instruction is None else arguments.instruction
    out = arguments.out or f"data/gsm8k_{arguments.split}.parquet"
    made = make_gsm8k(arguments.input, out, instruction, arguments.split)
    print(f"{made.path}: {_rows(made.rows)}")


def _data_convert(arguments: argparse.Namespace) -> None:
    """Your own jsonl, json, csv, parquet or arrow files, brought into the row format.

    verl data convert qa.csv --out qa.parquet --set data_source=mine
    verl data convert a.jsonl b.jsonl --out all.parquet --map prompt=question --map ground_truth=meta.answer
    verl data convert math.json --out boxed.jsonl --system "Be brief." --template "{question} Answer in \\boxed{}."

    targets: prompt, ground_truth, data_source, ability; any other name becomes a key of extra_info
    """
    from verl.data.generate import Mapping, convert
    from verl.data.output import parse_options, parse_pairs
    from verl.tracking.console import printable

    mapping = Mapping(
        columns=parse_pairs(arguments.map),
        constants=parse_options(arguments.set),
        system=arguments.system,
        template=arguments.template,
        plain=arguments.plain,
    )
    done = convert(arguments.files, arguments.out, mapping)
    for target, origin in done.origins.items():
        print(f"{target}: {printable(origin, 200)}")
    for row in done.skipped[:SHOWN_SKIPPED]:
        print(f"skipped {printable(str(row), 300)}")
    if len(done.skipped) > SHOWN_SKIPPED:
        print(f"skipped {len(done.skipped) - SHOWN_SKIPPED} more")
    print(f"{done.path}: {_rows(done.rows)} written, {len(done.skipped)} skipped")


def _data_preferences(arguments: argparse.Namespace) -> None:
    """Preference pairs for a reward model: of each prompt the best and the worst response.

    verl data preferences data/train.parquet --model smollm2-135m -n 8 --out pairs.jsonl
    verl data preferences data/train.parquet --responses answers.jsonl --rule gsm8k --out pairs.parquet

    Responses are scored by the rule of the row's data source, or by --rule or --reward. A prompt whose responses all
    have the same score gives no pair.
    """
    from verl.cluster.threads import available_cores, set_environment

    set_environment(available_cores())

    from verl.checkpoint.export import opened_model
    from verl.data.output import check_writable, refuse_inputs, write_rows
    from verl.data.tables import expand_files
    from verl.models.quiet import without_bars
    from verl.trainer.offline_evaluation import ModelEvaluation, PairCounts, given, pairs_of, sampled

    out = Path(arguments.out).expanduser()
    refuse_inputs(out, [*expand_files(arguments.data, "DATA"), *filter(None, [arguments.responses])])
    check_writable([out])
    if arguments.responses is not None:
        groups = given(arguments.responses, evaluation_config(arguments, None))
    else:
        with without_bars(), opened_model(arguments.model) as model:
            evaluation = ModelEvaluation(evaluation_config(arguments, model))
            with progress(evaluation.responses, "responses") as told:
                evaluation.run(told)
        groups = sampled(evaluation.samples, evaluation.rows)
    counts = PairCounts()
    pairs = list(pairs_of(groups, counts))
    write_rows(lambda: pairs, out)
    print(
        f"{out}: {counts.pairs} pairs from {len(groups)} prompts; {counts.equal} prompts without a difference in "
        f"score, {counts.few} with fewer than two scored responses"
    )


def _data_inspect(arguments: argparse.Namespace) -> None:
    """What is in data files, and what looks wrong with it.

    verl data inspect my.jsonl --model smollm2-135m
    """
    from verl.data.inspection import inspect_files

    tokenizer = None
    if arguments.model is not None:
        from verl.models.loading import load_tokenizer

        tokenizer = load_tokenizer(arguments.model)
    report = inspect_files(arguments.files, tokenizer, arguments.limit, arguments.prompt_key, arguments.answer_key)
    if arguments.json:
        print_json(report.as_json())
    else:
        print("\n".join(_report_lines(report)))


def _report_lines(report: Inspection) -> list[str]:
    from verl.tracking.console import printable

    lines = [printable(", ".join(report.files))]
    lines.append(f"{_rows(report.rows)}, {report.usable} can be used")
    lines += ["", "columns"]
    width = max(map(len, report.columns), default=0)
    for name, column in report.columns.items():
        missing = report.rows - sum(column.types.values())
        types = [kind if count == report.rows else f"{kind} ({count})" for kind, count in column.types.items()]
        types += [f"absent ({missing})"] if missing else []
        example = "" if column.example is None else printable(str(column.example), 80).replace("\n", " ")
        lines.append(f"  {printable(name):{width}}  {', '.join(types)}  {example}".rstrip())
    lines += _key_lines(report)
    if report.sources:
        lines += ["", "data sources"]
        for source, rows in report.sources.items():
            rule = report.rules[source]
            scored = f"reward rule {rule}" if rule else "no built-in reward rule: reward.rule or your own function"
            lines.append(f"  {printable(source, 60)}: {_rows(rows)}, {scored}")
    if report.lengths is not None:
        lines += ["", *_length_lines(report.lengths, report.plain)]
    wrong = [*_count_lines("cannot be used", report.bad), *_count_lines("looks odd", report.suspicious)]
    if report.duplicates:
        differing = f", {report.conflicting} of them with another ground truth" if report.conflicting else ""
        lines += ["", f"duplicates: {_rows(report.duplicates)} with an earlier prompt{differing}"]
        lines += [printable(f"  {again} repeats {first}") for first, again in report.duplicate_places]
    lines += ["", *wrong] if wrong else ["", "nothing looks wrong with the rows"]
    for shown in report.shown:
        unit = report.lengths.unit if report.lengths else ""
        lines += ["", f"-- {printable(shown.place)} ({shown.length} {unit})", printable(shown.text, 1500)]
        lines += [f"-> ground truth: {printable(shown.truth, 200)}"] if shown.truth else []
    return lines


def _key_lines(report: Inspection) -> list[str]:
    lines = []
    if report.prompt_key is None:
        lines.append("no column looks like the prompt: name it with --prompt-key (data.prompt_key in training)")
    elif report.prompt_key != "prompt":
        lines.append(f"prompts are in {report.prompt_key}: training needs data.prompt_key={report.prompt_key}")
    if report.truth_key is None:
        lines.append("no column looks like the ground truth: name it with --answer-key (data.answer_key in training)")
    return ["", *lines] if lines else []


def _length_lines(lengths: Lengths, plain: int) -> list[str]:
    shares = ", ".join(f"{name} {value}" for name, value in lengths.percentiles.items())
    total = sum(count for _, _, count in lengths.histogram)
    note = f"{plain} of {total} plain text, the others with the chat template"
    if plain in (0, total):
        note = "plain text, which gets no chat template" if plain else "with the chat template"
    note = note if lengths.unit == "tokens" else "give --model to count tokens"
    lines = [
        f"prompt length in {lengths.unit} ({note})",
        f"  least {lengths.least}, mean {lengths.mean:.1f}, {shares}, most {lengths.most}",
    ]
    names = [str(start) if stop == start + 1 else f"{start} - {stop - 1}" for start, stop, _ in lengths.histogram]
    lines += histogram([(name, count) for name, (_, _, count) in zip(names, lengths.histogram, strict=True)])
    if lengths.over is not None:
        lines.append(f"  {lengths.over} of {total} ({lengths.over / total:.1%}) are longer than {lengths.limit}")
    return lines


def _count_lines(title: str, counts: dict[str, Count]) -> list[str]:
    from verl.tracking.console import printable

    lines = []
    for reason, count in sorted(counts.items(), key=lambda item: -item[1].rows):
        lines.append(printable(f"{title}: {_rows(count.rows)}: {reason}", 300))
        more = ", ..." if count.rows > len(count.places) else ""
        lines.append(printable(f"  {'; '.join(count.places)}{more}"))
    return lines

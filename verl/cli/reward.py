"""``verl reward``: rewards tried before a run depends on them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verl.cli.arguments import Commands, above_zero, command, group, histogram, positive, print_json, progress, screen

if TYPE_CHECKING:
    from rich.console import Console

    from verl.rewards.trial import Report

SHOWN = 5  # failures, slowest responses, disagreements
WIDTH = 200  # characters of a shown response


def add(commands: Commands) -> None:
    reward = group(commands, "reward", "try a reward before a run")
    test = command(reward, "test", _test, json="the report as JSON, with every score")
    test.add_argument("what", metavar="WHAT", help="a file of your own, or a rule: gsm8k, math, ..., auto")
    test.add_argument("--data", metavar="DATA", help="a data file as training takes it")
    test.add_argument("--responses", metavar="FILE", help="JSON lines with responses, or the samples of a run")
    test.add_argument("--compare", metavar="OTHER", help="another file or rule; shows where the two disagree")
    test.add_argument("--name", help="of the function in the file (default compute_score)")
    test.add_argument("--compare-name", help="of the function in the other file")
    test.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="for WHAT; may be repeated")
    test.add_argument("--template", default="{truth}", help='how a truth looks as a response: "#### {truth}"')
    test.add_argument("--limit", type=positive, metavar="ROWS", help="only the first so many rows")
    test.add_argument("--timeout", type=above_zero, metavar="SECONDS", help="for each call (default 60)")
    test.add_argument("--prompt-key", metavar="COLUMN", help="default: the usual names")
    test.add_argument("--answer-key", metavar="COLUMN", help="default: the usual names")
    test.add_argument("--response-key", metavar="COLUMN", help="default: response, completion, output")
    test.add_argument("--plain", action="store_true", help="no progress bar")


def _test(arguments: argparse.Namespace) -> None:
    """What a reward gives to responses: scores, failures, slow ones, disagreements.

    verl reward test my_reward.py --data my.jsonl                          a column "response" of the data
    verl reward test my_reward.py --data my.parquet --responses out.jsonl  responses in a file of their own
    verl reward test gsm8k --responses runs/first/samples/step_000010.jsonl
    verl reward test math --data math.jsonl --template "\\boxed{{truth}}"     each truth as a response
    verl reward test gsm8k --data my.parquet --responses out.jsonl --compare my_reward.py

    Responses are scored with another row's truth, too: a score that does not change ignores it. WHAT is a Python file
    with a reward function, or a built-in rule (docs/rewards.md). A line of --responses has "response" (text, or a list
    of texts), and is for the data's row of the same number unless its "row" (or a sample's "uid") says which. Without
    --data a line also has "ground_truth", "data_source" and "extra_info", as far as the reward needs them.
    """
    from verl.data.output import parse_options
    from verl.rewards.trial import read_tried, reward_config, try_reward, with_other_truths

    wanted = [(arguments.what, arguments.name, parse_options(arguments.option))]
    if arguments.compare:
        wanted.append((arguments.compare, arguments.compare_name, {}))
    configs = [reward_config(what, name, kwargs, arguments.timeout) for what, name, kwargs in wanted]
    names = ("data", "responses", "response_key", "template", "limit", "prompt_key", "answer_key")
    tried = read_tried(*(getattr(arguments, name) for name in names))
    others = with_other_truths(tried)
    reports = []
    for (what, _, _), config in zip(wanted, configs, strict=True):
        with progress(len(tried), "responses", arguments.plain or arguments.json) as told:
            reports.append(try_reward(what, config, tried, told, others))
    if arguments.json:
        print_json(_as_json(reports))
        return
    console = screen()
    for report in reports:
        _print(console, report)
    if len(reports) == 2:
        _print_disagreements(console, *reports)


def _as_json(reports: Sequence[Report]) -> Any:
    from verl.rewards.trial import disagreements

    found: dict[str, Any] = {
        "reports": [report.as_json() | {"scores": [score.value for score in report.scores]} for report in reports]
    }
    if len(reports) == 2:
        both, unequal = disagreements(*reports)
        places = [{**reports[0].place(i), "scores": [r.scores[i].value for r in reports]} for i in unequal]
        found["disagreements"] = {"compared": both, "unequal": len(unequal), "where": places}
    return found


def _print(console: Console, report: Report) -> None:
    from verl.tracking.console import one_line

    found = report.as_json()
    say = console.print
    rate = f", {len(report.scores) / report.seconds:.0f} responses/s" if report.seconds else ""
    say(f"{report.name}: {found['responses']} responses in {report.seconds:.1f} s{rate}")
    counts = [f"{found[name]} {name}" for name in ("scored", "none", "invalid", "failed") if found[name]]
    say(f"  {', '.join(counts)}")
    if found["score"] is not None:
        say("  score: mean {mean:.4g}, least {min:.4g}, most {max:.4g}".format(**found["score"]))
        parts = [(part["from"], part["to"], int(part["responses"])) for part in found["distribution"]]
        say("\n".join(histogram([(f"{a:.4g}" + (f" to {b:.4g}" if b != a else ""), count) for a, b, count in parts])))
    if len(found["by_source"]) > 1:
        for name, mean in found["by_source"].items():
            say(f"  source {one_line(name, 60)}: mean {'-' if mean is None else f'{mean:.4g}'}")
    if found["scored"]:
        _print_other_truth(say, found["other_truth"])
    _print_failures(console, found)
    slow = [place for place in found["slowest"] if place["seconds"] >= 0.001]
    if slow:
        say("", "slowest", sep="\n")
        for place in slow:
            say(f"  {place['seconds']:.3f} s  {one_line(place['where'], 80)}: {one_line(place['response'], 80)}")
    say("")


def _print_other_truth(say: Callable[[str], None], found: dict[str, Any] | None) -> None:
    if found is None:
        say("  no row has another truth to score its response with: whether the truth counts is not known")
        return
    share = found["unchanged"] / found["compared"]
    say(
        f"  with another row's truth: mean {found['mean']:.4g}; {found['unchanged']} of {found['compared']} scores "
        f"unchanged ({share:.1%}), of the highest {found['highest_unchanged']} of {found['highest']}"
    )
    if found["warning"]:
        say(f"  warning: {found['warning']}")


def _print_failures(console: Console, found: dict[str, Any]) -> None:
    from verl.tracking.console import one_line

    if found["failures"]:
        console.print("", "could not be scored", sep="\n")
    for failure in found["failures"][:SHOWN]:
        console.print(f"  {failure['responses']} x {one_line(failure['reason'], WIDTH)}")
        console.print(f"    {one_line(failure['where'], 80)}: {one_line(failure['response'], 120)}")
    if len(found["failures"]) > SHOWN:
        console.print(f"  and {len(found['failures']) - SHOWN} more reasons")


def _print_disagreements(console: Console, one: Report, other: Report) -> None:
    from verl.rewards.trial import disagreements
    from verl.tracking.console import one_line

    both, unequal = disagreements(one, other)
    share = f" ({len(unequal) / both:.1%})" if both else ""
    console.print(f"{one.name} and {other.name} give {len(unequal)} of {both} responses unequal scores{share}")
    for i in unequal[:SHOWN]:
        place = one.place(i)
        read = [(report.scores[i].value, report.scores[i].extras.get("pred")) for report in (one, other)]
        said = [f"{score:.4g}" + ("" if pred is None else f" (read {one_line(str(pred), 30)})") for score, pred in read]
        truth, where = one_line(str(place["ground_truth"]), 60), one_line(place["where"], 80)
        console.print(f"  {' and '.join(said)}  truth {truth}  {where}")
        console.print(f"    {one_line(place['response'], WIDTH)}")
    if len(unequal) > SHOWN:
        console.print(f"  and {len(unequal) - SHOWN} more (--json lists them)")

"""``verl data``: making data files."""

from __future__ import annotations

import argparse

from verl.cli.arguments import Commands, common, group, not_negative, positive


def add(commands: Commands) -> None:
    data = group(commands, "data", "make data files")
    gym = data.add_parser(
        "reasoning-gym", parents=[common()], help="problems with verifiable answers, made by a program"
    )
    gym.add_argument("--task", required=True, help="such as chain_sum")
    gym.add_argument("--size", type=positive, required=True, help="training problems")
    gym.add_argument("--val-size", type=not_negative, default=0, help="held-out problems, into <out>_val.parquet")
    gym.add_argument("--seed", type=int, default=0, help="default 0")
    gym.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the task; may be repeated")
    gym.add_argument("--instruction", help="system message put before every problem")
    gym.add_argument("--out", help="parquet file to write (default data/<task>.parquet)")
    gym.set_defaults(command=_data_reasoning_gym)

    gsm8k = data.add_parser("gsm8k", parents=[common()], help="GSM8K's jsonl files, converted")
    gsm8k.add_argument("--input", required=True, help="train.jsonl or test.jsonl of GSM8K")
    gsm8k.add_argument("--out", help="parquet file to write (default data/gsm8k_<split>.parquet)")
    gsm8k.add_argument("--split", default="train", help="name noted in every row (default train)")
    gsm8k.add_argument("--instruction", help="text appended to every question (default asks for #### answer)")
    gsm8k.set_defaults(command=_data_gsm8k)


def _data_reasoning_gym(arguments: argparse.Namespace) -> None:
    from verl.data.generate import make_reasoning_gym
    from verl.data.options import parse_options

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
        print(f"{part.path}: {part.rows} rows")


def _data_gsm8k(arguments: argparse.Namespace) -> None:
    from verl.data.generate import GSM8K_INSTRUCTION, make_gsm8k

    instruction = GSM8K_INSTRUCTION if arguments.instruction is None else arguments.instruction
    out = arguments.out or f"data/gsm8k_{arguments.split}.parquet"
    made = make_gsm8k(arguments.input, out, instruction, arguments.split)
    print(f"{made.path}: {made.rows} rows")

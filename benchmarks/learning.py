"""What SmolLM2-135M learns of two-term sums with five algorithms and three seeds each: docs/results.md.

    python benchmarks/learning.py [--runs DIR] [--recipes grpo,ppo,...] [--seeds 1,2,3] [--steps N] [--draw]
    python benchmarks/learning.py --quick

Every recipe trains on the same problems, in batches of 16 prompts with 8 responses each. A run that came as far is not
made again, so that the script may be stopped and started at will, or run twice at once over different seeds. ``--draw``
only writes the picture and prints the table, of the runs that are there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from verl.models.tiny import build_tiny
from verl.run_dir import RunDir
from verl.tracking import names
from verl.tracking.names import read_metrics
from verl.tracking.runs import is_run, overview

PICTURE = Path("docs/learning.svg")
SHARED = Path(__file__).with_name("learning.yaml")
RECIPES = {  # preset, and what is set beside it
    "grpo": ("grpo", []),
    "rloo": ("rloo", []),
    "dapo": ("dapo", []),
    "ppo": ("ppo", ["trainer.critic_warmup=2"]),
    "async": ("grpo", ["trainer.mode=async", "trainer.max_staleness=1"]),
}
LABELS = {"grpo": "GRPO", "rloo": "RLOO", "dapo": "DAPO", "ppo": "PPO with critic", "async": "async, staleness 1"}
COLOURS = {"grpo": "#2563eb", "rloo": "#059669", "dapo": "#d97706", "ppo": "#dc2626", "async": "#7c3aed"}
WIDTH, HEIGHT, LEFT, BOTTOM, LEGEND = 720, 360, 48, 40, 24


@dataclass(frozen=True)
class Learned:
    """What one run came to."""

    curve: list[tuple[int, float]]  # step, held-out accuracy
    reward: float | None  # of the last steps' training responses


def verl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "verl.cli", *words], check=True)


def make_data(folder: Path, problems: int, held_out: int) -> tuple[Path, Path]:
    train, val = folder / "sums.parquet", folder / "sums_val.parquet"
    if not val.is_file():
        options = [f"--option={name}" for name in ("min_terms=2", "max_terms=2", "min_digits=1", "max_digits=2")]
        sizes = ["--size", str(problems), "--val-size", str(held_out), "--seed", "1"]
        verl("data", "reasoning-gym", "--task", "chain_sum", *sizes, *options, "--out", str(train))
    return train, val


def train(recipe: str, seed: int, steps: int, runs: Path, data: tuple[Path, Path], more: Sequence[str]) -> None:
    folder = runs / f"{recipe}-{seed}"
    if (made := learned(folder)) and made.curve[-1][0] >= steps:
        return
    preset, settings = RECIPES[recipe]
    own = [f"data.train_files={data[0]}", f"data.val_files={data[1]}", f"trainer.default_local_dir={folder}"]
    own += [f"trainer.seed={seed}", f"trainer.total_training_steps={steps}", f"trainer.experiment_name={folder.name}"]
    verl("train", "--plain", "--preset", preset, str(SHARED), *settings, *own, *more)


def learned(folder: Path) -> Learned | None:
    if not is_run(folder):
        return None
    lines, _ = read_metrics(RunDir(folder))
    curve = [(int(line["step"]), value) for line in lines if (value := names.validation_score(line)) is not None]
    return Learned(curve, overview(RunDir(folder)).reward_last) if curve else None


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{fmean(values):.3f}"


def table(found: dict[str, list[Learned]]) -> str:
    """In Markdown: means and standard deviations over the seeds."""
    lines = ["| | runs | before | after | last training reward |", "|---|---|---|---|---|"]
    for recipe, runs in found.items():
        before, after = ([run.curve[at][1] for run in runs] for at in (0, -1))
        rewards = [run.reward for run in runs if run.reward is not None]
        lines.append(f"| {LABELS[recipe]} | {len(runs)} | {spread(before)} | {spread(after)} | {spread(rewards)} |")
    return "\n".join(lines)


def picture(found: dict[str, list[Learned]]) -> str:
    """An SVG: each run as a thin line, the mean over the seeds as a thick one."""
    last = max(step for runs in found.values() for run in runs for step, _ in run.curve)
    top = max(0.1, *(value for runs in found.values() for run in runs for _, value in run.curve))
    top = -(-top // 0.1) / 10

    def at(step: float, value: float) -> str:
        x = LEFT + step / last * (WIDTH - LEFT - 12)
        return f"{x:.1f},{HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - 20):.1f}"

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        return f'<polyline points="{" ".join(at(*point) for point in points)}" fill="none" {style}/>'

    def text(x: float, y: float, words: str, anchor: str = "start") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'

    parts = []
    for tenth in range(round(top * 10) + 1):
        parts.append(line([(0, tenth / 10), (last, tenth / 10)], 'stroke="#8884"'))
        parts.append(text(LEFT - 8, float(at(0, tenth / 10).split(",")[1]) + 4, f"{tenth / 10:.1f}", "end"))
    steps = sorted({step for runs in found.values() for run in runs for step, _ in run.curve})
    parts += [text(float(at(step, 0).split(",")[0]), HEIGHT - BOTTOM + 18, str(step), "middle") for step in steps]
    parts.append(
        text(LEFT + 4, 10, "held-out accuracy") + text(WIDTH - 12, HEIGHT - BOTTOM - 6, "training step", "end")
    )
    for row, (recipe, runs) in enumerate(found.items()):
        colour = f'stroke="{COLOURS[recipe]}"'
        parts += [line(run.curve, f'{colour} stroke-width="1" opacity="0.35"') for run in runs]
        common = sorted(set.intersection(*({step for step, _ in run.curve} for run in runs)))
        means = [(step, fmean(dict(run.curve)[step] for run in runs)) for step in common]
        parts.append(line(means, f'{colour} stroke-width="2.5"'))
        x = LEFT + row * (WIDTH - LEFT) / len(found)
        parts.append(f'<rect x="{x:.1f}" y="{HEIGHT - 4}" width="12" height="12" fill="{COLOURS[recipe]}"/>')
        parts.append(text(x + 16, HEIGHT + 6, LABELS[recipe]))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT + LEGEND}" font-family="sans-serif" font-size="11" fill="#888"'
    title = "<title>Held-out accuracy by training step</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{title}\n' + "\n".join(parts) + "\n</svg>\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="folder of the runs and their data")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of: %(default)s")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--quick", action="store_true", help="one step of a tiny model: whether the script runs")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    problems, held_out, target = 2000, 200, PICTURE
    more = [f"cluster.threads={args.threads}"]
    if args.quick:
        problems, held_out, target = 64, 8, args.runs / PICTURE.name
        more += [f"model.path={build_tiny(args.runs / 'tiny')}", "data.max_prompt_length=256", "model.dtype=float32"]
    if not args.draw:
        data = make_data(args.runs, problems, held_out)
        for seed in args.seeds.split(","):
            for recipe in args.recipes.split(","):
                train(recipe, int(seed), args.steps, args.runs, data, more)
    found = {}
    for recipe in RECIPES:
        runs = [learned(folder) for folder in sorted(args.runs.glob(f"{recipe}-*"))]
        if made := [run for run in runs if run]:
            found[recipe] = made
    print(table(found))
    target.write_text(picture(found), encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()

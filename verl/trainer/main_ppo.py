"""``python -m verl.trainer.main_ppo key=value ...``: the launch line of verl's scripts, the same as ``verl train``.

Of Hydra's own options ``--config-path`` and ``--config-name`` are honoured. This file belongs to the command line
(``verl/cli``) and stands here because scripts call it by this name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.cli.arguments import Parser, common, settings
from verl.cli.entry import guarded
from verl.cli.train import run_training
from verl.errors import ConfigError

# Option of Hydra's -> what to do instead.
_REFUSED = {
    **dict.fromkeys(("--multirun", "-m"), "start one command for each run, for example in a loop of the shell"),
    **dict.fromkeys(("--cfg", "-c", "--info", "-i"), "verl config show key=value ... prints the configuration"),
    **dict.fromkeys(("--package", "-p"), "write the whole key, for example actor.optim.lr=1e-6"),
    "--experimental-rerun": "verl train runs/NAME/config.yaml",
    "--hydra-help": "python -m verl.trainer.main_ppo --help",
}
# What verl calls its own complete configurations: ppo_trainer, ppo_megatron_trainer, ...
_OWN_DEFAULTS = re.compile(r"ppo(_[a-z0-9]+)*_trainer")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code, as :func:`verl.cli.main`."""
    words = sys.argv[1:] if argv is None else list(argv)
    return guarded(lambda: _run(words), debug="--debug" in words)


def _run(words: list[str]) -> int:
    for word in words:
        if (option := word.partition("=")[0]) in _REFUSED:
            raise ConfigError("an option of Hydra, which is not used here", word, _REFUSED[option])
    parser = Parser(
        prog="python -m verl.trainer.main_ppo",
        parents=[common()],
        description="Train with the launch line of verl's scripts: the same as verl train.",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings, such as trainer.device=cpu")
    parser.add_argument("--config-path", "-cp", metavar="FOLDER", help="folder of --config-name (default: this one)")
    parser.add_argument("--config-dir", "-cd", dest="config_path", help="the same")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="a YAML file of yours, below all settings")
    parser.add_argument("--run", "-r", action="store_true", help="accepted, the only thing that is done")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")
    parser.add_argument("--resolve", action="store_true", help="accepted without effect")
    arguments, rest = parser.parse_known_args(words)
    given = [*arguments.words, *rest]
    named, notices = _named_file(arguments.config_path, arguments.config_name)
    file, overrides = settings(given)
    if file and named:
        raise ConfigError("two configuration files are given", f"{named} and {file}", "leave one of them out")
    run_training(file or named, overrides, notices=notices, plain=arguments.plain)
    return 0


def _named_file(folder: str | None, name: str | None) -> tuple[str | None, list[str]]:
    """The file that ``--config-path`` and ``--config-name`` name, if it is the user's own, and notices."""
    if name is None:
        unused = [f"--config-path={folder} has no effect without --config-name"] if folder else []
        return None, unused
    path = Path(folder or ".") / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not path.expanduser().is_file() and _OWN_DEFAULTS.fullmatch(path.stem):
        return None, [f"--config-name={name}: verl's own defaults are not read, VeRL's take their place"]
    return str(path), []


if __name__ == "__main__":
    sys.exit(main())

"""Tracking services that are packages of their own: wandb, mlflow, swanlab and trackio.

Each class says only how its service opens a run and takes figures; :class:`Service` keeps what a service that does not
answer has missed. Keys and addresses are the services' own business (``WANDB_API_KEY``, ``MLFLOW_TRACKING_URI``, ...):
they come from the environment or from their log-in files, and VeRL neither reads nor writes them.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import secrets
import string
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar

from verl.errors import ConfigError
from verl.json_lines import json_line, json_value
from verl.run_dir import RunDir, write_atomic
from verl.tracking.facts import get, read_config
from verl.tracking.samples import SampleRow, Split, spread

MISSED = 1000  # steps kept for a service that does not answer; the oldest go first
PATIENCE = 60.0  # seconds between attempts to open a run
SHOWN = 8  # validation samples handed on
COLUMNS = ("prompt", "response", "ground_truth", "score")


class Service(ABC):
    """A tracker of a service: opens its run when training begins, hands on finite figures and validation samples.

    Steps that failed are sent again, in order, with the next one. The run's name at the service is kept in the run's
    folder (``trackers.json``), so that a resumed run goes on there; its ``config.yaml`` names project and experiment
    and is handed on. Raises ConfigError: the package is not installed.
    """

    package: ClassVar[str]

    def __init__(self, run_dir: RunDir, resumed: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        require_service(self.package)
        self._run_dir, self._resumed, self._clock = run_dir, resumed, clock
        self._waiting: deque[tuple[int, dict[str, float]]] = deque(maxlen=MISSED)
        self._opened, self._next_attempt = False, -math.inf
        self.project, self.experiment = "verl", run_dir.path.resolve().name

    def start(self) -> None:
        self._send()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._waiting.append((step, {name: value for name, value in metrics.items() if math.isfinite(value)}))
        self._send()

    def samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        if split == "val" and self._opened:  # not kept for later: they are in the run's folder
            shown = [rows[position] for position in spread(len(rows), SHOWN)]
            self.put_samples(step, [[row.prompt, row.response, _text(row.ground_truth), row.score] for row in shown])

    def close(self) -> None:
        self._next_attempt = -math.inf
        try:
            self._send()
        finally:
            if self._opened:
                self.finish()

    def _send(self) -> None:
        if not self._opened:
            if self._clock() < self._next_attempt:
                return
            self._next_attempt = self._clock() + PATIENCE
            self._open()
        while self._waiting:
            self.put(*self._waiting[0])
            self._waiting.popleft()

    def _open(self) -> None:
        config = json_value(read_config(self._run_dir)[1] or {})
        self.project = str(get(config, "trainer.project_name") or self.project)
        self.experiment = str(get(config, "trainer.experiment_name") or self.experiment)
        file = self._run_dir.path / "trackers.json"
        known = json.loads(file.read_text()) if file.is_file() else {}
        name = known.get(self.package) if self._resumed else None
        name = self.open(import_module(self.package), config, name)
        self._opened = True
        write_atomic(file, json_line(known | {self.package: name}) + "\n")

    # --- what a service is

    @abstractmethod
    def open(self, module: Any, config: dict[str, Any], name: str | None) -> str:
        """Begin a run, or go on with the one called ``name``; its name for the next time."""

    @abstractmethod
    def put(self, step: int, metrics: dict[str, float]) -> None: ...

    def put_samples(self, step: int, rows: list[list[Any]]) -> None:  # noqa: B027 - not every service takes them
        """``COLUMNS`` of a few validation samples; by default they stay in the run's folder alone."""

    @abstractmethod
    def finish(self) -> None: ...


class Wandb(Service):
    """Weights & Biases; it ignores steps that it has already, which are the same again after a resume."""

    package = "wandb"

    def open(self, module: Any, config: dict[str, Any], name: str | None) -> str:
        self._module, name = module, name or _identity(8)
        place = {"project": self.project, "name": self.experiment, "dir": str(self._run_dir.path)}
        self._run = module.init(**place, config=config, id=name, resume="allow")
        return name

    def put(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def put_samples(self, step: int, rows: list[list[Any]]) -> None:
        self._run.log({"samples": self._module.Table(columns=list(COLUMNS), data=rows)}, step=step)

    def finish(self) -> None:
        self._run.finish()


class Mlflow(Service):
    """MLflow; characters that its names may not have become ``_``."""

    package = "mlflow"

    def open(self, module: Any, config: dict[str, Any], name: str | None) -> str:
        self._module = module
        module.set_experiment(self.project)
        begun = module.active_run()  # by an attempt that failed behind it, or by the program that trains
        run = begun or (module.start_run(run_id=name) if name else module.start_run(run_name=self.experiment))
        module.log_dict(config, "config.yaml")
        return str(run.info.run_id)

    def put(self, step: int, metrics: dict[str, float]) -> None:
        self._module.log_metrics({re.sub(r"[^\w\-. :/]", "_", key): v for key, v in metrics.items()}, step=step)

    def put_samples(self, step: int, rows: list[list[Any]]) -> None:
        named = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        self._module.log_dict({"samples": named}, f"samples/step_{step:06d}.json")

    def finish(self) -> None:
        self._module.end_run()


class Swanlab(Service):
    """SwanLab; its own log files go into the run's folder."""

    package = "swanlab"

    def open(self, module: Any, config: dict[str, Any], name: str | None) -> str:
        self._module, name = module, name or _identity(21)  # it takes no other length
        place = {"project": self.project, "logdir": str(self._run_dir.path / "swanlog")}
        module.init(**place, experiment_name=self.experiment, config=config, id=name, resume="allow")
        return name

    def put(self, step: int, metrics: dict[str, float]) -> None:
        self._module.log(metrics, step=step)

    def put_samples(self, step: int, rows: list[list[Any]]) -> None:
        texts = ["\n\n".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, row, strict=True)) for row in rows]
        self._module.log({"samples": [self._module.Text(text) for text in texts]}, step=step)

    def finish(self) -> None:
        self._module.finish()


class Trackio(Service):
    """trackio, which knows a run by its name: a run begun anew gets a name that is not taken."""

    package = "trackio"

    def open(self, module: Any, config: dict[str, Any], name: str | None) -> str:
        self._module, name = module, name or f"{self.experiment}-{_identity(4)}"
        module.init(project=self.project, name=name, config=config, resume="allow")
        return name

    def put(self, step: int, metrics: dict[str, float]) -> None:
        self._module.log(metrics, step=step)

    def finish(self) -> None:
        self._module.finish()


SERVICES: dict[str, type[Service]] = {kind.package: kind for kind in (Wandb, Mlflow, Swanlab, Trackio)}


def require_service(package: str) -> None:
    """Raises ConfigError where the package is not installed; imports nothing."""
    if importlib.util.find_spec(package) is None:
        fix = f"pip install 'verl[{package}]', or leave {package} out of trainer.logger"
        raise ConfigError("trainer.logger names a tracker whose package is not installed", package, fix)


def _identity(length: int) -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(length))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json_line(value)

"""``samples/step_000010.jsonl``: what the model was asked, answered and got for it.

One JSON object a line, fields of :class:`SampleRow` plus ``step``. Training and validation rows of a step share its
file and are told apart by ``split``; writing a split again replaces its rows, so a step done twice leaves them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl.json_lines import json_line, parse_line, read_jsonl
from verl.run_dir import RunDir, write_atomic

if TYPE_CHECKING:
    from verl.protocol import DataProto

Split = Literal["train", "val"]
TOKENS = 400  # of a row that are kept one by one
_TOKEN_COLUMNS = ("responses", "rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "versions")
EXTRA_PREFIX = "reward_extra/"


@dataclass(frozen=True)
class SampleRow:
    """One response. ``None`` where the run does not have the figure."""

    split: str  # train | val
    uid: str  # its prompt; with index, the slot
    index: int
    prompt: str
    response: str
    ground_truth: Any = None
    score: float | None = None  # the reward function's, before shaping and KL penalty; None: it could not be scored
    advantage: float | None = None  # mean over the response's tokens
    data_source: str = ""
    finish_reason: str = ""
    response_length: int | None = None  # tokens
    versions: list[int] | None = None  # policy versions of its oldest and newest token
    extras: dict[str, Any] = field(default_factory=dict)  # what else the reward function returned
    reason: str | None = None  # why it could not be scored
    shaped: float | None = None  # the score after shaping, where there is any
    reward: float | None = None  # after shaping and KL penalty, summed over its tokens
    # Of few rows, see `token_figures`: {text: [...], advantage?, log_prob?, change?, version?}, each a figure a token,
    # or one figure where all are the same; change_from says what the log-prob changed from.
    tokens: dict[str, Any] | None = None


def write_samples(run_dir: RunDir, step: int, split: Split, rows: Sequence[SampleRow], max_rows: int = 512) -> Path:
    """Writes the split's rows of a step, in place of earlier ones; atomic. Raises VerlError on a full disk.
    ``max_rows``: beyond, whole groups are kept, evenly spread over the batch."""
    path = run_dir.samples(step)
    there = path.read_bytes().split(b"\n") if path.exists() else []
    lines = [line.decode() for line in there if (record := parse_line(line)) and record.get("split") != split]
    for row in pick_groups(rows, max_rows):
        fields = {name: value for name, value in asdict(row).items() if name != "tokens" or value is not None}
        lines.append(json_line({"step": step} | fields))
    write_atomic(path, "".join(f"{line}\n" for line in lines))
    return path


def spread(count: int, k: int) -> list[int]:
    """``k`` of ``count`` positions, evenly spread, first and last among them (all where k >= count)."""
    if k >= count:
        return list(range(count))
    if k <= 0:
        return []
    return [round(i * (count - 1) / (k - 1)) for i in range(k)] if k > 1 else [0]


def pick_groups(rows: Sequence[SampleRow], limit: int) -> list[SampleRow]:
    """At most ``limit`` rows in their order: whole groups, evenly spread; a first group larger than that is cut."""
    if len(rows) <= limit:
        return list(rows)
    groups: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        groups.setdefault(row.uid, []).append(position)
    members = list(groups.values())
    largest = max(len(group) for group in members)
    chosen = [members[i] for i in spread(len(members), max(1, limit // largest))]
    kept = sorted(position for group in chosen for position in group)
    return [rows[position] for position in kept[:limit]]


def read_samples(path: Path) -> tuple[list[SampleRow], int]:
    """The rows of a sample file, and how many lines were torn or no sample. Unknown fields are ignored."""
    records, torn = read_jsonl(path)
    rows = [row for record in records if (row := _parse_row(record)) is not None]
    return rows, torn + len(records) - len(rows)


# What else than these types has is not there.
_KINDS: dict[str, Any] = dict.fromkeys(
    ("score", "shaped", "reward", "advantage", "response_length"), int | float | None
)
_KINDS |= {"reason": str | None, "tokens": dict | None}


def _parse_row(record: dict[str, Any]) -> SampleRow | None:
    known = {f.name: record[f.name] for f in fields(SampleRow) if f.name in record}
    if not all(isinstance(known.get(name), str) for name in ("split", "uid", "prompt", "response")):
        return None
    index, extras = known.get("index"), known.get("extras", {})
    if not isinstance(index, int) or not isinstance(extras, dict):
        return None
    for name, kind in _KINDS.items():
        known[name] = value if isinstance(value := known.get(name), kind) else None
    for name in ("data_source", "finish_reason"):
        known[name] = str(known.get(name) or "")
    return SampleRow(**known)


def rows_from_batch(batch: DataProto, split: Split, decode: Callable[[list[int]], str]) -> list[SampleRow]:
    """Sample rows of a batch (after scoring, or after process with advantages); absent columns are left out.

    Args:
        batch: columns ``prompt_ids, response_text, uid`` and where present ``index, ground_truth, data_source,
            finish_reason, reward_reason, reward_extra/*`` (non-tensor), ``response_mask, scored`` (B, R) and (B,)
            bool, ``token_level_scores, token_level_rewards, advantages`` (B, R), ``shaped_scores`` (B,),
            ``versions`` (B, R) int; for the tokens of two rows ``responses, rollout_log_probs, old_log_probs,
            ref_log_probs`` (B, R); ``meta_info["policy_version"]``.
        split: train or val.
        decode: token ids to text, special tokens included.
    """
    tensors, columns = batch.batch, batch.non_tensor_batch
    size = len(columns["uid"])

    def column(name: str, default: Any) -> Any:
        return columns[name] if name in columns else [default] * size

    def tensor(name: str) -> Any:
        return tensors[name] if tensors is not None and name in tensors.keys() else None  # noqa: SIM118

    mask, scored, versions, shaped = map(tensor, ("response_mask", "scored", "versions", "shaped_scores"))
    scores, rewards, advantages = map(tensor, ("token_level_scores", "token_level_rewards", "advantages"))
    policy_version = batch.meta_info.get("policy_version")
    extras = {name.removeprefix(EXTRA_PREFIX): columns[name] for name in columns if name.startswith(EXTRA_PREFIX)}
    # Of the first prompt, which every choice of groups keeps: the best response and the worst.
    first = [i for i in range(size) if columns["uid"][i] == columns["uid"][0]]
    first = first if mask is not None and scores is not None else []
    ranked = sorted(first, key=lambda i: _reduce(scores, i, mask[i].bool(), mean=False) or 0.0)
    shown = {ranked[0], ranked[-1]} if ranked and "responses" in tensors else set()
    rows = []
    for i in range(size):
        row_mask = None if mask is None else mask[i].bool()
        own = None if versions is None or row_mask is None else versions[i][row_mask].tolist()
        rows.append(
            SampleRow(
                split=split,
                uid=str(columns["uid"][i]),
                index=int(column("index", 0)[i]),
                prompt=decode([int(token) for token in columns["prompt_ids"][i]]),
                response=str(columns["response_text"][i]),
                ground_truth=column("ground_truth", None)[i],
                score=_reduce(scores, i, row_mask, mean=False) if scored is None or bool(scored[i]) else None,
                shaped=None if shaped is None or not bool(scored[i]) else float(shaped[i]),
                reward=_reduce(rewards, i, row_mask, mean=False),
                advantage=_reduce(advantages, i, row_mask, mean=True),
                data_source=str(column("data_source", "")[i]),
                finish_reason=str(column("finish_reason", "")[i]),
                response_length=None if row_mask is None else int(row_mask.sum()),
                versions=[min(own), max(own)] if own else None if policy_version is None else [int(policy_version)] * 2,
                extras={name: values[i] for name, values in extras.items()},
                reason=column("reward_reason", None)[i],
                tokens=token_figures(tensors, i, decode) if i in shown else None,
            )
        )
    return rows


def token_figures(columns: Any, row: int, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """What a row's trained tokens are and what there is about each, for the first ``TOKENS`` of them. ``change`` is the
    log-prob of the policy at the start of the update less the reference's, or where there is none less that of the
    engine that sampled."""
    kept = columns["response_mask"][row].bool().nonzero().flatten()[:TOKENS]
    own = {name: columns[name][row][kept] for name in _TOKEN_COLUMNS if name in columns.keys()}  # noqa: SIM118
    found: dict[str, Any] = {"text": [decode([token]) for token in own.pop("responses").tolist()]}
    before = own.get("ref_log_probs", own.get("rollout_log_probs"))
    now = own.get("old_log_probs", own.get("rollout_log_probs"))
    figures = {"advantage": own.get("advantages"), "log_prob": now, "version": own.get("versions")}
    if before is not None and "old_log_probs" in own:
        figures["change"] = now - before
        found["change_from"] = "the reference" if "ref_log_probs" in own else "the engine"
    for name, values in figures.items():
        if values is not None:
            numbers = [float(f"{value:.3g}") for value in values.tolist()]
            found[name] = numbers[0] if len(set(numbers)) == 1 else numbers
    return found


def _reduce(values: Any, row: int, mask: Any, *, mean: bool) -> float | None:
    """Sum or mean over a row's response tokens; what stands at masked positions never counts."""
    if values is None:
        return None
    kept = values[row] if mask is None else values[row][mask]
    if kept.numel() == 0:
        return None
    total = float(kept.double().sum())
    return total / kept.numel() if mean else total

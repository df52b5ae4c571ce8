"""The table of batch columns: what each is, and who makes it. A new column gets its row here first.

B rows (prompts x n), P prompt width (left padded), R response width (right padded).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.errors import DataError

if TYPE_CHECKING:
    from verl.protocol.container import DataProto


@dataclass(frozen=True)
class Column:
    """One column: tensor columns live in ``batch``, those with dtype "object" in ``non_tensor_batch``."""

    name: str
    shape: str
    dtype: str
    producer: str
    meaning: str


LOADER, ROLLOUT, SCORING, PROCESS = "the data loader", "rollout", "scoring", "the process stage"
UPDATE = "the update stage"

_ROWS = [
    # one row per drawn prompt
    Column("uid", "(B,)", "object", LOADER, "str, '{split}:{draw}:{source}:{row}'; the same for all rows of a group"),
    Column("prompt_ids", "(B,)", "object", LOADER, "list[int], the prompt's token ids without padding"),
    Column("raw_prompt", "(B,)", "object", LOADER, "list of chat messages, or str"),
    Column("data_source", "(B,)", "object", LOADER, "str, which chooses the reward rule and names the metrics"),
    Column("ground_truth", "(B,)", "object", LOADER, "what the reward function compares with"),
    Column("extra_info", "(B,)", "object", LOADER, "dict, the row's further columns"),
    Column("row_index", "(B,)", "object", LOADER, "int, the row's number in its source"),
    Column("columns", "(B,)", "object", LOADER, "dict, columns of the file that extra_info does not hold"),
    Column("margins", "(B,)", "float32", LOADER, "preference pairs: least difference of a pair's scores, on both rows"),
    # one row per response
    Column("index", "(B,)", "object", ROLLOUT, "int, the response's number in its group; -1: greedy baseline"),
    Column("finish_reason", "(B,)", "object", ROLLOUT, "str, 'stop' or 'length'"),
    Column("response_text", "(B,)", "object", ROLLOUT, "str, the decoded response"),
    Column("prompts", "(B, P)", "int64", ROLLOUT, "prompt ids, left padded"),
    Column("responses", "(B, R)", "int64", ROLLOUT, "sampled ids, right padded"),
    Column("input_ids", "(B, P+R)", "int64", ROLLOUT, "prompts and responses side by side"),
    Column("attention_mask", "(B, P+R)", "int64", ROLLOUT, "1 where input_ids holds a real token"),
    Column("position_ids", "(B, P+R)", "int64", ROLLOUT, "position of each token, from 0 at the first real one"),
    Column("response_mask", "(B, R)", "bool", ROLLOUT, "tokens that the policy sampled and trains on"),
    Column("rollout_log_probs", "(B, R)", "float32", ROLLOUT, "log-probs of the sampled ids, by the engine"),
    Column("versions", "(B, R)", "int32", ROLLOUT, "weight version that sampled each token"),
    Column("policy_version", "(B,)", "int64", ROLLOUT, "weight version that sampled the oldest token of the response"),
    Column("token_level_scores", "(B, R)", "float32", SCORING, "the reward alone, at the last response token"),
    Column("reward_reason", "(B,)", "object", SCORING, "str, why a row could not be scored; else None"),
    Column("shaped_scores", "(B,)", "float32", PROCESS, "scores after shaping, where there is any"),
    Column("scored", "(B,)", "bool", SCORING, "False: no reward function could score the row"),
    Column("baseline_scores", "(B,)", "float32", SCORING, "remax: score of the greedy response to the row's prompt"),
    Column("baseline_lengths", "(B,)", "int64", SCORING, "remax: its length in tokens"),
    Column("old_log_probs", "(B, R)", "float32", PROCESS, "log-probs by the weights at the start of the update"),
    Column("ref_log_probs", "(B, R)", "float32", PROCESS, "log-probs by the reference model"),
    Column("values", "(B, R)", "float32", PROCESS, "the critic's value before each response token"),
    Column("token_level_rewards", "(B, R)", "float32", PROCESS, "scores after the KL penalty in the reward"),
    Column("bootstrap_values", "(B,)", "float32", PROCESS, "the critic's value behind a response that was cut, else 0"),
    Column("advantages", "(B, R)", "float32", PROCESS, "by algorithm.adv_estimator"),
    Column("full_kl", "(B, R)", "float32", PROCESS, "KL of the policy from the reference, over the vocabulary"),
    Column("importance_weights", "(B, R)", "float32", PROCESS, "by algorithm.rollout_correction; weigh token losses"),
    Column("draws", "(B, R)", "float32", UPDATE, "uniform numbers by slot and position, for losses that choose"),
    Column("returns", "(B, R)", "float32", PROCESS, "what the critic learns to predict"),
]

COLUMNS: dict[str, Column] = {column.name: column for column in _ROWS}

REWARD_EXTRA_PREFIX = "reward_extra/"
"""Object columns ``reward_extra/<key>`` hold what a reward function returned beside its score."""


def describe(name: str) -> Column:
    """The row of a column; those with the reward prefix share one. Raises DataError for an unknown name."""
    if name in COLUMNS:
        return COLUMNS[name]
    if name.startswith(REWARD_EXTRA_PREFIX):
        return Column(name, "(B,)", "object", SCORING, "a further value that the reward function returned")
    raise DataError(f"no column '{name}' in the table of columns", fix="give it a row in verl/protocol/keys.py")


def check_columns(data: DataProto, *names: str) -> None:
    """Require columns, each in its part of the container.

    Raises:
        DataError: naming the first column that is missing or in the wrong part, and who makes it.
    """
    held: dict[str, Mapping] = {"batch": data.tensors, "non_tensor_batch": data.non_tensor_batch}
    for name in names:
        column = describe(name)
        part, other = ("non_tensor_batch", "batch") if column.dtype == "object" else ("batch", "non_tensor_batch")
        if name in held[part]:
            continue
        where = f"is in {other}, not in {part}" if name in held[other] else "is missing"
        raise DataError(
            f"column '{name}' {where}: {column.shape} {column.dtype}, {column.meaning}; made by {column.producer}",
            sorted([*data.tensors, *data.non_tensor_batch]),
            f"run {column.producer} before this step",
        )

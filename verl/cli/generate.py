"""``verl generate``: a model answers prompts, given one by one or in a file; and the options of all that sample."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from verl.cli.arguments import Commands, command, natural, number, positive, progress, tell
from verl.errors import DataError, VerlError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.data.rows import PromptRow
    from verl.rollout.protocol import Request, Result
    from verl.rollout.text import Decode
    from verl.run_dir import RunDir


def add(commands: Commands) -> None:
    generate = command(commands, "generate", _generate)
    generate.add_argument("model", help="an alias, a folder (such as an export), a GGUF file, a hub id, or a run")
    given = generate.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    given.add_argument("--input", metavar="FILE", help="prompts: .txt, .jsonl, .parquet, ...")
    generate.add_argument("--prompt-key", default="prompt", metavar="COLUMN", help="of the input (default prompt)")
    generate.add_argument("--out", metavar="FILE", help="JSON lines to write (default: to standard output)")
    generate.add_argument("--ids", action="store_true", help="prompt and response ids in the output, too")
    generate.add_argument("--raw", action="store_true", help="no chat template: the model continues the text")
    generate.add_argument("--system", metavar="TEXT", help="system message before every prompt")
    generate.add_argument("--max-new-tokens", "--max-response-length", type=positive, default=128, help="default 128")
    stop = "ends a response; may be repeated"
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add_sampling(generate)


def _generate(arguments: argparse.Namespace) -> None:
    """Let a model answer prompts.

    verl generate my-model --prompt "What is 2 + 2?"
    verl generate runs/quickstart --input prompts.txt --out answers.jsonl -n 4

    The input is a .txt file (one prompt a line) or a data file of the kinds that training reads, of which only the
    column of prompts is used: chat messages, or text, which becomes a user's message (but for a run whose own prompts
    are plain text stays as it is, as in training). A line of the output is a JSON object with prompt, index (of the n
    responses), response, finish_reason (stop, length, or refused: the prompt fills all positions of the model) and
    tokens. Lines come in the order of the input, each as soon as it is there.
    """
    from verl.cluster.threads import available_cores, set_environment

    set_environment(available_cores())

    from verl.checkpoint.export import opened_model
    from verl.data.output import refuse_inputs
    from verl.models.loading import load_config, load_tokenizer
    from verl.models.quiet import without_bars
    from verl.rollout.embedded import EngineLimits
    from verl.rollout.offline import as_chats, load_engine, requests_for, stream
    from verl.rollout.protocol import SamplingParams

    sampling = SamplingParams(arguments.max_new_tokens, stop=tuple(arguments.stop), **sampling_choices(arguments))
    out, rows = _out(arguments.out), _prompts(arguments)
    if out is not None and arguments.input:
        refuse_inputs(out, [arguments.input])
    with without_bars(), opened_model(arguments.model) as model:
        tokenizer = load_tokenizer(model.path, arguments.trust_remote_code)
        sampling.check_ids(load_config(model.path, arguments.trust_remote_code).get_text_config().vocab_size)
        plain = arguments.raw or (arguments.system is None and _trained_on_text(arguments.model, model.run, tokenizer))
        asked = rows if plain else as_chats(rows, arguments.system)
        requests = requests_for(asked, tokenizer, sampling, arguments.n, arguments.seed, arguments.chat_template_kwargs)
        dtype, limits = arguments.dtype or "bfloat16", EngineLimits(arguments.max_num_seqs or 64)
        engine = load_engine(model.path, tokenizer, dtype, arguments.trust_remote_code, limits)

        def decode(ids: Any) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        if len(requests) == 1 and not arguments.input and not arguments.out and sys.stdout.isatty():
            _show(stream(engine, requests[0], decode))
            return
        # Opened last: what stands there is lost to a command that can do its work, not to a typo.
        with nullcontext(sys.stdout) if out is None else out.open("w", encoding="utf-8") as file:
            _answer(arguments, rows, requests, engine, decode, file)


def _trained_on_text(name: str, run: RunDir | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the prompts of a run's own data are plain text, which the model then gets without a chat template."""
    from verl.config import build_config
    from verl.config.schema_supervised import schema_of
    from verl.data.rows import open_source
    from verl.tracking.facts import read_config

    tree = read_config(run)[1] if run is not None else None
    if tree is None or schema_of(tree) is not None:
        return False
    try:
        config = build_config(tree).data
        rows = open_source(config.train_files, config, tokenizer, 1, "data.train_files").read(0, 1)
    except VerlError as error:
        tell([f"{name} does not say how its prompts looked ({error.what}): text becomes a message"])
        return False
    text = any(isinstance(getattr(row, "prompt", None), str) for row in rows)
    if text:
        tell([f"{name} was trained on prompts of plain text: no chat template, as with --raw"])
    return text


def _prompts(arguments: argparse.Namespace) -> list[PromptRow]:
    """Raises DataError for whatever is wrong with the prompts, in the words of this command's options."""
    from verl.config import DataConfig
    from verl.rollout.offline import plain_prompt, read_prompts

    if arguments.raw and arguments.system is not None:
        raise DataError("--raw has no place for a system message", None, "leave out --raw, or --system")
    if not arguments.input:
        return [plain_prompt(text, i, f"--prompt {i + 1}") for i, text in enumerate(arguments.prompt)]
    key = arguments.prompt_key
    try:
        rows = read_prompts(arguments.input, DataConfig(train_files=[arguments.input], prompt_key=key, answer_key=key))
    except DataError as error:
        what, fix = error.what.replace("data.prompt_key", "--prompt-key"), error.fix or ""
        raise DataError(what, error.value, fix.replace("data.prompt_key=", "--prompt-key ")) from error
    chats = next((row for row in rows if not isinstance(row.prompt, str)), None)
    if arguments.raw and chats is not None:
        raise DataError("--raw takes text, and a prompt is a list of chat messages", chats.location, "leave out --raw")
    return rows


def _show(pieces: Iterator[str]) -> None:
    from verl.tracking.console import printable

    for piece in pieces:
        print(printable(piece), end="", flush=True)
    print()


def _answer(
    arguments: argparse.Namespace,
    rows: list[PromptRow],
    requests: list[Request],
    engine: Any,
    decode: Decode,
    file: TextIO,
) -> None:
    """Every response into the output; those of prompts on the command line to standard output as they are."""
    from verl.json_lines import json_line
    from verl.rollout.offline import in_order, require_room
    from verl.rollout.text import response_text
    from verl.tracking.console import printable

    as_text = not arguments.input and not arguments.out
    refused = 0
    with progress(len(requests), "responses") as told:
        for request, result in zip(requests, in_order(engine, requests, told), strict=True):
            text = response_text(result, decode, arguments.stop, arguments.min_new_tokens)
            if as_text:
                require_room(result, request)
                line = printable(text) if sys.stdout.isatty() else text
            else:
                refused += result.finish_reason == "refused"
                line = json_line(_record(rows[int(request.slot.uid)], request, result, text, arguments.ids))
            print(line, file=file, flush=True)
    if arguments.out:
        print(f"{arguments.out}: {len(requests)} responses", file=sys.stderr)
    if refused:
        tell([f"{refused} responses refused: their prompts fill all positions of the model"])


def _record(row: PromptRow, request: Request, result: Result, text: str, ids: bool) -> dict[str, Any]:
    refused = result.finish_reason == "refused"
    record = {
        "prompt": row.prompt,
        "index": request.slot.index,
        "response": None if refused else text,
        "finish_reason": result.finish_reason,
        "tokens": len(result.response_ids),
    }
    return record | ({"prompt_ids": request.prompt_ids, "response_ids": result.response_ids} if ids else {})


def _out(file: str | None) -> Path | None:
    if file is None:
        return None
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        what = "--out names a folder" if path.is_dir() else "the folder of --out does not exist"
        raise DataError(what, path, "name a file in an existing folder")
    return path


DTYPES = ("bfloat16", "float16", "float32")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    def add(name: str, type: Any, default: Any, help: str, **more: Any) -> None:
        parser.add_argument(name, type=type, default=default, help=help, **more)

    add("-n", positive, 1, "responses a prompt (default 1)")
    add("--temperature", number(0), None, "0 is greedy (default: 0 for one response a prompt, 1 for several)")
    add("--top-p", number(0, 1, above=True), 1.0, "likeliest tokens up to this mass (default 1: all)")
    add("--top-k", int, -1, "so many of the likeliest tokens (default -1: all)")
    add("--min-p", number(), 0.0, "tokens at least this share as likely as the likeliest (default 0: all)")
    add("--repetition-penalty", number(), 1.0, "above 1: against tokens that are there (default 1: off)")
    add("--presence-penalty", number(), 0.0, "against tokens that the response has (default 0: off)")
    add("--frequency-penalty", number(), 0.0, "the same, as often as it has them (default 0: off)")
    add("--logit-bias", _biases, {}, 'added to logits by token id: {"11": -5}', metavar="JSON")
    add("--min-new-tokens", natural, 0, "responses are not shorter (default 0)")
    add("--seed", int, 1, "the same seed gives the same responses (default 1)")
    add("--chat-template-kwargs", _json_object, {}, 'such as {"enable_thinking": false}', metavar="JSON")
    add("--max-num-seqs", positive, None, "responses at once (default 64)")
    add("--dtype", str, None, "default bfloat16, or the run's", choices=DTYPES)
    code = "run code that comes with the model or its tokenizer"
    parser.add_argument("--trust-remote-code", action="store_true", help=code)


def sampling_choices(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the options above, by the names that sampling parameters and ``rollout.val_kwargs`` share."""
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    temperature = arguments.temperature
    if temperature is None:
        temperature = 0.0 if arguments.n == 1 else 1.0
    return {"temperature": temperature} | {name: getattr(arguments, name) for name in (*names, "min_new_tokens")}


def _biases(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in _json_object(text).items()}
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} does not give numbers by token id") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value

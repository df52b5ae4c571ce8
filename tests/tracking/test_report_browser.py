"""The report in a real browser: skipped where no Chromium is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import BINARY, Chromium

from verl.run_dir import RunDir
from verl.tracking.report import write_comparison, write_report
from verl.tracking.samples import SampleRow, write_samples

pytestmark = pytest.mark.skipif(BINARY is None, reason="no chromium and no chrome is installed")

SIZES = [(1280, 900), (360, 780)]
NO_SIDEWAYS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
SHOWN = "document.querySelectorAll('.sample').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., RunDir]) -> Path:
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines[1:]:
        line |= {"critic/score/min": 0.0, "critic/score/max": 1.0}
    lines[12]["actor/entropy"] = None
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = [("step", 0.0, 10.0), ("gen", 0.0, 6.0), ("update_actor", 6.0, 10.0), ("gen", 6.0, 9.0)]
    workers = {"main_0": [("update_actor", 6.5, 10.0)], "rollout_1": [("advance", 0.0, 5.0), ("advance", 6.0, 8.0)]}
    timeline = [{"step": k, "began": 100.0 + 10 * k, "parts": parts, "workers": workers} for k in range(1, 7)]
    run.timeline.write_text("".join(json.dumps(line) + "\n" for line in timeline))
    return write_report(run)


def choose(browser: Chromium, **fields: str) -> None:
    """Sets fields of the samples' filters as a user does."""
    for name, value in fields.items():
        browser.run(
            f"void (() => {{ const field = byId('filters').elements[{name!r}]; field.value = {json.dumps(value)};"
            " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )


def point_at_last_step(browser: Chromium, touch: bool) -> None:
    plot = "document.querySelector('.plot svg')"
    browser.run(f"{plot}.scrollIntoView({{block: 'center'}})")
    right, top = browser.run(f"(({{right, top}}) => [right, top])({plot}.getBoundingClientRect())")
    if touch:
        points = [{"x": right - 2, "y": top + 40}]
        browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=points)
        browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    else:
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=right - 2, y=top + 40)


def quiet(browser: Chromium, page: Path) -> bool:
    """Nothing in the console, nothing asked for but the page itself."""
    return (browser.console, browser.requests) == ([], [page.as_uri()])


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_samples_are_filtered_sorted_paged_and_grouped(browser: Chromium, page: Path, width: int, height: int) -> None:
    browser.open(page, width, height)
    assert browser.run("byId('sample-note').textContent") == "All 1,313 samples that 40 steps left in samples/."
    assert browser.run("byId('filters').elements.step.value") == "40"
    assert browser.run(SHOWN) == 20 and browser.run("byId('page').textContent") == "1 to 20 of 41"
    browser.run("byId('later').click(), byId('later').click()")
    assert browser.run(SHOWN) == 1 and browser.run("byId('later').disabled")
    choose(browser, step="", text="NEEDLE")
    assert browser.run(SHOWN) == 1 and browser.run("document.querySelector('.sample mark').textContent") == "needle"
    choose(browser, text="", split="val", step="20")
    assert browser.run(SHOWN) == 8
    rows = [json.loads(line) for line in (page.parent / "samples/step_000020.jsonl").read_text().splitlines()]
    good = sum(row["split"] == "val" and row["score"] >= 0.5 for row in rows)
    choose(browser, low="0.5")
    assert browser.run(SHOWN) == good and 0 < good < 8
    assert browser.run("document.querySelectorAll('.badge.bad').length") == 0
    choose(browser, low="", high="0.5")
    assert browser.run(SHOWN) == 8 - good
    choose(browser, high="", split="train", order="high")
    badges = "[...document.querySelectorAll('.sample .badge')].map((badge) => Number(badge.textContent.split(' ')[1]))"
    shown = browser.run(badges)
    assert len(shown) == 20 and shown == sorted(shown, reverse=True) and (shown[0], shown[-1]) == (1, 0)
    choose(browser, order="low")
    assert browser.run(badges)[0] == 0
    choose(browser, order="", view="groups")
    assert browser.run(SHOWN) == 4 and browser.run("document.querySelectorAll('.response').length") == 32
    assert browser.run("byId('count').textContent").startswith("32 samples found in 4 prompts, mean reward 0.")
    choose(browser, view="rows", text="nothing is like this")
    assert browser.run(SHOWN) == 0 and browser.run("byId('count').textContent") == "No sample is like that."
    choose(browser, text="")
    browser.run("document.querySelector('.sample .link').click()")
    assert browser.run("document.querySelectorAll('.sample.group .response').length") == 8
    assert browser.run("document.querySelectorAll('.response.chosen').length") == 1
    browser.run("document.querySelector('.sample.group .link').click()")
    assert browser.run("document.querySelectorAll('.sample.group').length") == 0 and browser.run(SHOWN) == 20
    assert browser.run(NO_SIDEWAYS)
    assert quiet(browser, page)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_timeline_draws_every_worker_of_the_last_steps(
    browser: Chromium, page: Path, width: int, height: int
) -> None:
    browser.open(page, width, height)
    lanes = "[...document.querySelectorAll('.lane')].map((lane) => [...lane.children].map((c) => c.textContent))"
    texts = browser.run(lanes)
    assert [(who, note) for who, _, note in texts] == [
        ("steps", ""), ("controller", ""), ("main_0", "35% busy"), ("rollout_1", "70% busy")
    ]  # fmt: skip
    assert texts[0][1] == "".join(f"step {k}: 10.0 s" for k in (3, 4, 5, 6))
    widths = (
        "[...document.querySelectorAll('.lane:nth-child(3) rect')].map((rect) => rect.getBoundingClientRect().width)"
    )
    drawn = browser.run(widths)
    assert len(drawn) == 4 and max(drawn) - min(drawn) < 0.1
    line = browser.run("document.querySelector('.lane:nth-child(3) svg').getBoundingClientRect().width")
    assert sum(drawn) / line == pytest.approx(0.35, abs=0.01)
    assert browser.run("byId('timeline-legend').textContent") == "rolloutupdate"
    assert browser.run(NO_SIDEWAYS) and quiet(browser, page)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_curves_are_read_by_pointer_and_keys_and_switched(
    browser: Chromium, page: Path, width: int, height: int
) -> None:
    browser.open(page, width, height)
    titles = "[...document.querySelectorAll('.chart h3')].map((title) => title.textContent)"
    assert {
        "Reward", "Validation", "KL divergence", "Entropy", "Response length", "Clip fraction", "Gradient norm",
        "Learning rate", "Time by stage",
    } <= set(browser.run(titles))  # fmt: skip
    per_chart = "[...document.querySelectorAll('.chart')].map((c) => c.querySelectorAll('line.mark').length)"
    assert set(browser.run(per_chart)) == {2}  # resumed, worker died
    point_at_last_step(browser, touch=width < 700)
    tip = browser.run("document.querySelector('.tip').textContent")
    assert tip.startswith("step 40") and "[0 to 1]" in tip
    if width >= 700:
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        assert browser.run("document.querySelector('.tip')") is None
    browser.run("document.querySelector('.plot svg').focus()")
    browser.press("Escape")
    assert browser.run("document.querySelector('.tip')") is None
    for _ in range(21):
        browser.press("ArrowLeft")
    tip = browser.run("document.querySelector('.tip').textContent")
    assert tip.startswith("step 20") and "resumed" in tip
    # A value that is missing breaks its line in two.
    entropy = "[...document.querySelectorAll('.chart')].find((c) => c.querySelector('h3').textContent === 'Entropy')"
    assert browser.run(f"{entropy}.querySelector('.path').getAttribute('d').match(/M/g).length") == 2
    assert browser.run("document.querySelectorAll('.path.raw, .band').length") > 5
    browser.run("document.querySelectorAll('#curve-switches input').forEach((box) => box.click())")
    assert browser.run("document.querySelectorAll('.path.raw, .band').length") == 0
    browser.run("byId('metric-search').value = 'TIMING gen', byId('metric-search').dispatchEvent(new Event('input'))")
    assert browser.run("[...byId('metric-list').children].map((b) => b.textContent)") == ["timing_s/gen"]
    browser.run("byId('metric-list').firstChild.focus()")
    browser.press("Enter")
    assert browser.run(f"{titles}.includes('timing_s/gen')")
    assert browser.run("document.activeElement.getAttribute('aria-pressed')") == "true"
    browser.press(" ")
    assert not browser.run(f"{titles}.includes('timing_s/gen')")
    assert browser.run(NO_SIDEWAYS)
    assert quiet(browser, page)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_theme_follows_the_system_or_the_switch(browser: Chromium, page: Path, width: int, height: int) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        browser.open(page, width, height, prefers_color_scheme=scheme)
        for theme in ("", "light", "dark"):
            browser.run(f"byId('theme').value = {theme!r}, byId('theme').dispatchEvent(new Event('change'))")
            seen.append(browser.run(ground))
        assert quiet(browser, page)
    light, dark = seen[0], seen[3]
    assert light != dark and seen == [light, light, dark, dark, light, dark]
    browser.open(page, width, height, prefers_color_scheme="light")
    assert browser.run(ground) == dark  # it was chosen and is remembered
    browser.run("byId('theme').value = '', byId('theme').dispatchEvent(new Event('change'))")
    assert browser.run(ground) == light


def test_configuration_is_searched_and_printed_whole(browser: Chromium, page: Path) -> None:
    config = page.parent / "config.yaml"
    config.write_text("rollout: {n: 8, temperature: 1.0}\ndata: {train_batch_size: 8}\nactor: {grad_clip: 1.0}\n")
    browser.open(write_report(page.parent))
    rows = "[...byId('config-rows').rows].filter((row) => row.offsetHeight)"
    keys = f"{rows}.map((row) => row.querySelector('code').textContent)"
    assert browser.run(keys) == ["rollout.n", "data.train_batch_size"]
    assert browser.run("byId('config-rows').rows[0].cells[2].textContent") == "1"
    form = "byId('config-filter').elements"
    browser.run(f"{form}.differ.click()")
    assert len(browser.run(keys)) == 4
    browser.run(f"{form}.text.value = 'temper', {form}.text.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert browser.run(keys) == ["rollout.temperature"]
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert len(browser.run(keys)) == 4
    hidden = "['nav', '#filters', '#theme', '#metrics'].map((name) => document.querySelector(name).offsetHeight)"
    assert browser.run(hidden) == [0, 0, 0, 0]
    browser.call("Emulation.setEmulatedMedia", media="")
    assert quiet(browser, page)


BIDI, ESCAPES = "\u202egnp.exe\u202c", "\x1b]0;gone\x07\x9b2J\x00"


def test_hostile_samples_are_shown_not_obeyed(browser: Chromium, tmp_path: Path, hostile: str) -> None:
    run = RunDir(tmp_path).create()
    text = f"{hostile} {BIDI} {ESCAPES} \u200b \u2028 \ud800 javascript:alert(1) ' \" ` ${{1}} </textarea><style>*{{}}"
    rows = [
        SampleRow("train", text, 0, text, text, text, 1.0, data_source=text, finish_reason=text, extras={text: text}),
        SampleRow("train", text, 1, text, "x" * 5000, {"deep": text}, None),
    ]
    write_samples(run, 1, "train", rows)
    metric = {"step": 1, "critic/score/mean": 0.1, text: 0.5, f"val-core/{text}/acc/mean@1": 0.5}
    run.metrics.write_text(json.dumps(metric) + "\n")
    run.config.write_text(json.dumps({"trainer": {"experiment_name": text, text: text}}))
    run.log_event("worker_died", text, {text: text}, 1)
    written = write_report(run)
    for width, height in SIZES:
        browser.open(written, width, height)
        browser.run("byId('metric-all').click()")
        choose(browser, view="groups")
        browser.run("document.querySelectorAll('.plot svg').forEach((plot) => plot.focus())")
        shown = browser.run("document.body.innerText")
        assert (
            hostile in shown
            and "⟨U+202E⟩gnp.exe⟨U+202C⟩" in shown
            and "␛]0;gone␇⟨U+9B⟩2J␀" in shown.replace("U+009B", "U+9B")
        )
        everything = browser.run(
            "[...document.querySelectorAll('main, header')].map((part) => part.textContent).join('')"
        )
        assert not set("\u202e\u202c\x1b\x07\x9b\x00\u200b\u2028") & set(everything + browser.run("document.title"))
        assert browser.run("document.querySelectorAll('img, style:not(head style), main script, iframe').length") == 0
        assert browser.run("document.title") != "ran" and browser.run(NO_SIDEWAYS)
        cut = "[...document.querySelectorAll('.text')].filter((t) => t.scrollHeight > t.clientHeight + 1).length"
        assert browser.run(cut) > 0
        browser.call("Emulation.setEmulatedMedia", media="print")
        assert browser.run(cut) == 0
        assert quiet(browser, written)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_tokens_are_coloured_by_what_the_files_hold(browser: Chromium, tmp_path: Path, width: int, height: int) -> None:
    run = RunDir(tmp_path).create()
    figures = {"text": ["<b>", " is", " 4\u202e"], "advantage": 0.5, "change": [-1.0, 0.0, 0.5], "version": [3, 3, 4]}
    rows = [
        SampleRow(
            "train",
            "u",
            0,
            "p",
            "<b> is 4",
            score=1.0,
            response_length=9,
            tokens=figures | {"change_from": "the engine"},
        ),
        SampleRow("train", "u", 1, "p", "no tokens", score=0.0),
    ]
    write_samples(run, 1, "train", rows)
    run.metrics.write_text('{"step": 1}\n')
    written = write_report(run)
    browser.open(written, width, height)
    colours = "[...byId('filters').elements.colour.options].map((o) => o.value)"
    assert browser.run(colours) == ["", "advantage", "change", "version"]
    assert browser.run(SHOWN) == 2 and browser.run("document.querySelectorAll('.t').length") == 0
    choose(browser, colour="change")
    assert browser.run(SHOWN) == 1  # the other has no tokens
    shown = "[...document.querySelectorAll('.t')].map((t) => [t.textContent, t.className, t.title])"
    assert browser.run(shown) == [
        ["<b>", "t down4", "log-prob change -1"],
        [" is", "t", "log-prob change 0"],
        [" 4⟨U+202E⟩", "t up2", "log-prob change 0.5"],
    ]
    legend = browser.run("document.querySelector('.legend-line').textContent")
    assert "from the engine" in legend and "the first 3 of 9 tokens" in legend
    choose(browser, colour="advantage", view="groups")
    assert [name for _, name, _ in browser.run(shown)] == ["t up4"] * 3
    choose(browser, colour="version")
    assert [name for _, name, _ in browser.run(shown)] == ["t down4", "t down4", "t"]
    grounds = "[...document.querySelectorAll('.t')].map((t) => getComputedStyle(t).backgroundColor)"
    first, _, newest = browser.run(grounds)
    assert first != newest == "rgba(0, 0, 0, 0)"
    assert browser.run(NO_SIDEWAYS) and quiet(browser, written)


def test_one_prompt_is_followed_across_steps(browser: Chromium, tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    for step in (2, 10, 4):
        rows = [SampleRow("val", f"val:{step}:{k}", 0, f"prompt {k}", f"at {step}", score=step / 10) for k in (0, 1)]
        write_samples(run, step, "val", rows if step != 4 else rows[:1])
    run.metrics.write_text('{"step": 1}\n')
    written = write_report(run)
    browser.open(written)
    assert browser.run(SHOWN) == 2  # of the newest step
    choose(browser, view="prompts")
    assert browser.run("byId('filters').elements.step.disabled")
    parts = (
        "[...document.querySelectorAll('.sample')]"
        ".map((s) => [...s.querySelectorAll('.response b')].map((b) => b.textContent))"
    )
    assert browser.run(parts) == [["step 2", "step 4", "step 10"], ["step 2", "step 10"]]
    assert "3 steps" in browser.run("document.querySelector('.sample header').textContent")
    assert "mean reward 0.2 → 1" in browser.run("document.querySelector('.sample header').textContent")
    choose(browser, view="rows")
    assert browser.run(SHOWN) == 2
    assert quiet(browser, written)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_runs_lie_over_each_other(
    browser: Chromium, tmp_path: Path, make_run: Callable[..., RunDir], hostile: str, width: int, height: int
) -> None:
    runs = [make_run(tmp_path / name, total) for name, total in (("a", 20), ("b", 10))]
    runs[1].config.write_text(runs[1].config.read_text() + f"model2: {json.dumps(hostile)}\nrollout: {{n: 4}}\n")
    runs[0].config.write_text(runs[0].config.read_text() + "rollout: {n: 8}\n")
    written = write_comparison(runs, tmp_path / "both.html")
    browser.open(written, width, height)
    charts = (
        "[...document.querySelectorAll('.chart')]"
        ".map((c) => [c.querySelector('h3').textContent, c.querySelectorAll('.legend li').length])"
    )
    found = dict(browser.run(charts))
    assert (
        found["Reward"] == 2
        and all(found.values())
        and found["Validation, reasoning_gym/chain_sum"] == 2
        and "Entropy" in found
    )
    table = "[...document.querySelectorAll('#facts tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    rows = {row[0]: row[1:] for row in browser.run(table)}
    assert rows[""] == [run.path.name for run in runs]
    assert rows["steps"] == ["20 of 40", "10 of 40"]
    keys = (
        "[...byId('config-rows').rows]"
        ".map((row) => [row.querySelector('code'), row.cells[1], row.cells[2]].map((cell) => cell.textContent))"
    )
    assert browser.run(keys) == [["rollout.n", "8", "4"], ["model2", "(not there)", hostile]]
    assert browser.run("['timeline', 'samples', 'events'].map(byId)") == [None, None, None]
    browser.run("byId('metric-all').click()")
    assert "timing_s/gen" in dict(browser.run(charts))
    point_at_last_step(browser, touch=width < 700)
    assert browser.run("document.querySelector('.tip').textContent").startswith("step 20")
    assert browser.run("document.title") != "ran" and browser.run(NO_SIDEWAYS) and quiet(browser, written)


POOR_RUNS = {
    "nothing logged": (
        "",
        "a: 1",
        [
            "No step has been logged yet",
            "no training step yet",
            "left no samples",
            "not validated",
            "log holds nothing",
        ],
    ),
    "one step": ('{"step": 1, "critic/score/mean": 0.0, "timing_s/gen": 2.0}', "", ["the only step", "no config.yaml"]),
    "NaN and torn": (
        '{"step": 1, "critic/score/mean": null}\n{"step": 2, "actor/lr": 1e-06}\nto',
        "[",
        [
            "Not a finite number: critic/score/mean (step 1)",
            "1 unreadable line in metrics.jsonl skipped",
            "cannot be read as a configuration",
            "no validation curve",
        ],
    ),
    "validated only": ('{"step": 0, "val-core/a/acc/mean@1": 0.5}', "{}", ["at step 0", "held-out prompts of a"]),
}


@pytest.mark.parametrize(("metrics", "config", "said"), POOR_RUNS.values(), ids=POOR_RUNS)
def test_poor_runs_say_plainly_what_is_missing(
    browser: Chromium, tmp_path: Path, metrics: str, config: str, said: list[str]
) -> None:
    run = RunDir(tmp_path).create()
    run.metrics.write_text(metrics)
    if config:
        run.config.write_text(config)
    browser.open(write_report(run), 360, 780)
    text = browser.run("document.body.innerText")
    assert [sentence for sentence in said if sentence not in text] == []
    assert "NaN" not in text and "undefined" not in text and "Infinity" not in text
    assert browser.run(NO_SIDEWAYS) and quiet(browser, run.report)


def test_an_unfinished_run_says_so(browser: Chromium, tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    run.metrics.write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    run.log_event("started", "run", "step 0 of 9", 0)
    browser.open(write_report(run))
    text = browser.run("document.body.innerText")
    assert "1 of 9" in text and "had not finished when this page was written" in text
    run.log_event("finished", "run", "step 1", 1)
    browser.open(write_report(run))
    assert "had not finished" not in browser.run("document.body.innerText")


def test_the_policy_stops_a_foreign_script_and_these_tests_would_see_errors(
    browser: Chromium, tmp_path: Path, page: Path
) -> None:
    changed = tmp_path / "changed.html"
    extra = '<script>document.title = "ran"</script><img src="http://127.0.0.1:9/x.png">'
    changed.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{extra}</body>"), encoding="utf-8")
    browser.open(changed)
    assert browser.run("document.title") != "ran"
    assert len([line for line in browser.console if "Content Security Policy" in line]) == 2
    browser.run("void setTimeout(() => { throw new Error('seen') })")
    browser.run("new Promise((done) => setTimeout(done, 20))")
    assert any("seen" in line for line in browser.console)


def test_pages_print_to_paper(browser: Chromium, page: Path) -> None:
    browser.open(page)
    printed: Any = browser.call("Page.printToPDF")
    assert len(printed["data"]) > 50_000


def test_supervised_training_shows_its_loss(tmp_path: Path, browser: Chromium) -> None:
    run = RunDir(tmp_path / "run").create()
    lines = [{"step": step, "train/loss": 4.0 - step, "val/loss": 5.0 - step} for step in (1, 2, 3)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser.open(write_report(run), 1280, 900)
    text = browser.run("document.body.innerText")
    assert "Loss" in text and "no training step yet" not in text and "has not been validated" not in text

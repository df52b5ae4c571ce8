"""The report in a real browser: skipped where ``chromium`` is not installed."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from verl.run_dir import RunDir
from verl.tracking.report import write_report

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync
    --disable-component-update --disable-dev-shm-usage --enable-logging=stderr --virtual-time-budget=2000
"""


def open_page(path: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran, and the lines of its console."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", "--dump-dom", *flags, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def with_driver(page: str, script: str) -> str:
    """The page with a script of the test's own, let through by its hash, and nothing else changed."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    return page.replace("</body>", f"<script>{script}</script></body>")


def test_a_script_in_a_sample_is_shown_not_run(synthetic_run: RunDir, tmp_path: Path, hostile: str) -> None:
    dom, console = open_page(write_report(synthetic_run), tmp_path / "profile")
    assert console == []
    assert "<title>synthetic · VeRL run</title>" in dom  # a script that ran would have changed it
    shown = html.escape(f"needle {hostile}", quote=False)
    assert re.search(r'<div class="text clip[^>]*>' + re.escape(shown), dom)
    outside_data = re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
    assert "<img" not in outside_data and "<script" not in outside_data
    assert outside_data.count("<svg") >= 9 and "worker died" in outside_data


DRIVER = """
const out = {}, form = document.getElementById("filters").elements;
const cards = () => document.querySelectorAll(".sample").length;
const set = (name, value) => {
  form[name].value = value;
  form[name].dispatchEvent(new Event("input", { bubbles: true }));
};
out.first = cards();
set("step", ""); set("text", "NEEDLE");
out.needle = cards();
set("text", ""); set("split", "val"); set("step", "20");
out.val20 = cards();
set("low", "0.5");
out.good = [cards(), document.querySelectorAll(".badge.bad").length];
set("low", ""); set("split", ""); set("step", "10");
const before = cards(); document.getElementById("older").click();
out.more = [before, cards()];
const plot = document.querySelector(".plot svg"), box = plot.getBoundingClientRect();
plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 1, clientY: box.top + 9, bubbles: true }));
out.tip = document.querySelector(".tip b").textContent;
document.getElementById("more").open = true;
out.wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
document.body.dataset.out = JSON.stringify(out);
"""


def drive(page: Path, profile: Path, *flags: str) -> tuple[dict[str, object], list[str]]:
    page.write_text(with_driver(page.read_text(encoding="utf-8"), DRIVER), encoding="utf-8")
    dom, console = open_page(page, profile, *flags)
    found = re.search(r'data-out="([^"]*)"', dom)
    assert found, console
    out: dict[str, object] = json.loads(html.unescape(found.group(1)))
    return out, console


@pytest.mark.parametrize("size", ["1280,900", "500,900"])
def test_filters_paging_and_hover_work_at_any_width(synthetic_run: RunDir, tmp_path: Path, size: str) -> None:
    out, console = drive(write_report(synthetic_run), tmp_path / "profile", f"--window-size={size}")
    assert console == []
    assert out["first"] == 20 and out["needle"] == 1 and out["val20"] == 8
    rows = [json.loads(line) for line in synthetic_run.samples(20).read_text().splitlines()]
    good = sum(row["split"] == "val" and row["score"] >= 0.5 for row in rows)
    assert out["good"] == [good, 0] and 0 < good < 8
    assert out["more"] == [20, 40]
    assert out["tip"] == "step 40"
    assert out["wide"] is True


def test_a_run_of_one_step_opens_without_errors(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").create()
    run.metrics.write_text('{"step": 1, "time": 1.0, "critic/score/mean": 0.0, "timing_s/gen": 2.0}\n')
    dom, console = open_page(write_report(run), tmp_path / "profile")
    assert console == []
    assert "This run has left no samples." in dom and "of the only step" in dom


def test_the_policy_stops_a_foreign_script_and_this_test_would_see_errors(
    synthetic_run: RunDir, tmp_path: Path
) -> None:
    page = write_report(synthetic_run)
    text = page.read_text(encoding="utf-8").replace("</body>", '<script>document.title = "ran"</script></body>')
    page.write_text(text, encoding="utf-8")
    dom, console = open_page(page, tmp_path / "profile")
    assert "<title>ran" not in dom
    assert any("Content Security Policy" in line for line in console)

"""``verl serve`` over real sockets of this machine."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from chromium import BINARY, Chromium
from verl_process import listening

from verl.cli import main
from verl.cli.entry import build_parser
from verl.errors import VerlError
from verl.run_dir import RunDir
from verl.tracking.serve import ReportServer, is_loopback


@contextmanager
def serving(runs: list[RunDir], host: str = "127.0.0.1") -> Iterator[ReportServer]:
    server = ReportServer(runs, host, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_b155_servers_that_start_at_once_have_ports_of_their_own(tmp_path: Path) -> None:
    """Whoever binds a port keeps it. Nothing else here asks for one: ranks meet over files, Ray has its own."""
    (tmp_path / "metrics.jsonl").write_text("")
    with ThreadPoolExecutor(16) as threads:
        servers = list(threads.map(lambda _: ReportServer([RunDir(tmp_path)], "127.0.0.1", 0), range(16)))
    assert len({server.server_port for server in servers}) == 16
    for server in servers:
        server.server_close()


def ask(server: ReportServer, path: str, **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    """Without following a redirect."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def test_the_page_is_the_report_and_the_state_changes_with_the_run(synthetic_run: RunDir) -> None:
    before = {path: path.read_bytes() for path in synthetic_run.path.rglob("*") if path.is_file()}
    with serving([synthetic_run]) as server:
        assert server.token is None and server.url == f"http://127.0.0.1:{server.server_port}/"
        with urllib.request.urlopen(server.url) as answer:
            page = answer.read().decode()
            assert answer.headers["Cache-Control"] == "no-store" and answer.headers["X-Frame-Options"] == "DENY"
        assert "synthetic" in page and "connect-src 'self'" in page and '"live": {"state":' in page
        with urllib.request.urlopen(server.url + "state") as answer:
            state = answer.read().decode()
        assert f'"state": "{state}"' in page
        assert server.page() is server.page()  # made once
        assert {path: path.read_bytes() for path in synthetic_run.path.rglob("*") if path.is_file()} == before
        with open(synthetic_run.metrics, "a") as file:
            file.write('{"step": 41, "critic/score/mean": 0.123456}\n')
        with urllib.request.urlopen(server.url + "state") as answer:
            assert answer.read().decode() != state
        with urllib.request.urlopen(server.url) as answer:
            assert "0.123456" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + "../config.yaml")


@pytest.mark.skipif(BINARY is None, reason="no chromium and no chrome is installed")
def test_an_open_page_follows_its_run(synthetic_run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.tracking.serve.POLL_SECONDS", 0.1)
    with serving([synthetic_run]) as server, Chromium(tmp_path / "profile") as browser:
        browser.open(server.url)
        assert "40 steps" in browser.run("byId('subtitle').textContent")
        with open(synthetic_run.metrics, "a") as file:
            file.write('{"step": 41, "critic/score/mean": 0.5}\n')
        wait_for(browser, "41 steps")
        assert browser.console == []


@pytest.mark.skipif(BINARY is None, reason="no chromium and no chrome is installed")
def test_what_was_chosen_stays_when_the_page_loads_itself_anew(
    synthetic_run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.tracking.serve.POLL_SECONDS", 0.1)
    with Chromium(tmp_path / "profile") as browser:
        with serving([synthetic_run]) as server:
            browser.open(server.url)
            browser.run("void document.querySelector('#metric-list button').click()")
            browser.run(
                "void (() => { const f = byId('filters').elements, c = byId('curve-switches').elements;"
                " f.view.value = 'groups'; c.smooth.checked = false; document.activeElement.blur(); })()"
            )
            picked = browser.run("[...picked].join()")
            with open(synthetic_run.metrics, "a") as file:
                file.write('{"step": 41, "critic/score/mean": 0.5}\n')
            wait_for(browser, "41 steps")
            assert browser.run("byId('filters').elements.view.value") == "groups"
            assert browser.run("byId('filters').elements.step.value") == "40"  # the newest with samples, not chosen
            assert not browser.run("byId('curve-switches').elements.smooth.checked")
            pressed = (
                "[...document.querySelectorAll('.chip[aria-pressed=true]')].map((chip) => chip.dataset.name).join()"
            )
            assert picked and browser.run(pressed) == picked
            assert browser.run("document.querySelector('.sample').matches('.group')")
        wait_for(browser, "verl serve does not answer")


def wait_for(browser: Chromium, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in browser.run("document.body ? document.body.innerText : ''"):  # between two pages
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_several_runs_are_compared(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    with serving([make_run(tmp_path / "a", 5), make_run(tmp_path / "b", 5)]) as server:
        page = ask(server, "/")[1]
        assert '"runs": [' in page and '"label": "b"' in page


def test_a_foreign_name_for_this_machine_is_refused(synthetic_run: RunDir) -> None:
    with serving([synthetic_run]) as server:
        for name, status in (("evil.example", 403), ("localhost:99", 200), ("[::1]:99", 200), ("127.0.0.1", 200)):
            assert ask(server, "/state", Host=name)[0] == status, name


def test_other_addresses_ask_for_the_token_on_every_request(synthetic_run: RunDir) -> None:
    with serving([synthetic_run], "0.0.0.0") as server:
        assert server.token is not None and server.url.endswith(f"/?token={server.token}")
        for path in ("/", "/state", "/?token=", "/?token=wrong", "/nothing"):
            assert ask(server, path)[0] == 403, path
        assert ask(server, "/", Cookie=f"{server.cookie}=wrong")[0] == 403
        assert str(server.server_port) in server.cookie  # a browser sends it to the other ports of the host as well
        assert ask(server, "/", Cookie="a=[")[0] == 403
        status, text, headers = ask(server, f"/?token={server.token}")
        assert (status, text, headers["Location"]) == (303, "", "/")
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
        status, page, _ = ask(server, "/", Cookie=headers["Set-Cookie"].partition(";")[0])
        assert status == 200 and "synthetic" in page and server.token not in page


def test_b160_by_default_it_listens_on_loopback_alone(synthetic_run: RunDir) -> None:
    assert build_parser().parse_args(["serve", str(synthetic_run.path)]).host == "127.0.0.1"
    with serving([synthetic_run]) as server:
        mine = listening([os.getpid()])[os.getpid()]
        assert server.server_address[0] == "127.0.0.1" and mine <= {"127.0.0.1", "::1"}


def test_it_listens_on_an_address_of_ipv6(synthetic_run: RunDir) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6")
    with serving([synthetic_run], "::1") as server:
        assert server.token is None and urllib.request.urlopen(server.url + "state").status == 200


def test_what_is_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", "", "evil.localhost.example")] == [False] * 5


def test_what_cannot_be_served_is_a_clear_error(tmp_path: Path, synthetic_run: RunDir, capsys) -> None:
    with pytest.raises(VerlError, match="not a run folder"):
        ReportServer([RunDir(tmp_path / "none")], "127.0.0.1", 0)
    with serving([synthetic_run]) as server, pytest.raises(VerlError, match="cannot listen"):
        ReportServer([synthetic_run], "127.0.0.1", server.server_port)
    assert main(["serve", str(synthetic_run.path), "--port", "99999"]) == 2
    assert "cannot listen" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "nothing")]) == 2
    assert "no such run folder" in capsys.readouterr().err

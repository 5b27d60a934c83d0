"""The job's token: where it comes from, and that a sealed line counts once, in its place, in its own conversation."""

import contextlib
import fcntl
import os
import resource
import socket
import threading

import pytest

from axonml_jax.mesh import join as callers
from axonml_jax.mesh.join import Talk, greet, job_token, readable, roll_call


def talking(token=b"hush", other=None, subjects=("weather", "weather")):
    """The caller's and the listener's end of a conversation."""
    caller = Talk(token, subjects[0], calls=True)
    listener = Talk(token if other is None else other, subjects[1], calls=False)
    assert caller.greeted(listener.greeting) and listener.greeted(caller.greeting)
    return caller, listener


def test_a_line_counts_once_and_in_its_order():
    caller, listener = talking()
    first, second = caller.sealed({"n": 1}), caller.sealed({"n": 2})
    assert [listener.opened(line) for line in (first, second)] == [{"n": 1}, {"n": 2}]
    assert listener.opened(second) is None  # said again
    caller, listener = talking()
    first, second = caller.sealed({"n": 1}), caller.sealed({"n": 2})
    assert listener.opened(second) is None  # the first was taken out on the way


def test_a_line_means_nothing_to_others():
    for caller, listener in (talking(other=b"guess"), talking(other=b""), talking(subjects=("weather", "news"))):
        assert listener.opened(caller.sealed({"n": 1})) is None
    caller, listener = talking()
    line = caller.sealed({"n": 1})
    assert caller.opened(line) is None  # sent back to who has said it
    assert talking()[1].opened(line) is None  # recorded, and said in another conversation of the same token
    assert Talk(b"hush", "weather", calls=False).opened(line) is None  # before any greeting
    assert not caller.greeted(caller.greeting)


def test_of_a_line_not_a_byte_may_differ_and_none_shows_the_token():
    whole = talking()[0].sealed({"n": 1})
    assert b"hush" not in whole
    for place in range(len(whole) - 1):
        caller, listener = talking()
        line = bytearray(caller.sealed({"n": 1}))
        line[place] ^= 1
        assert listener.opened(bytes(line)) is None


def test_a_line_without_a_seal_is_no_line():
    body = b'{"n": 1}'
    for line in (body, b" " + body, b"0" * 64 + b" " + body, body + b" " + body, b""):
        caller, listener = talking()
        assert listener.opened(line + b"\n") is None
        caller, listener = talking()
        assert caller.opened(line + b"\n") is None
    assert talking(token=b"")[1].opened(b" " + body) is None  # where everybody knows the token too


def test_a_caller_whose_line_has_no_seal_is_hung_up_on_and_not_heard():
    mine = lambda message: message == {"n": 1}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening = stack.enter_context(contextlib.closing(callers.Callers(server, b"hush", "weather", mine)))

        def heard(line):
            """What the listener hears of a caller that says this line, and whether it hangs up on it."""
            here = stack.enter_context(socket.create_connection(server.getsockname()))
            assert readable(listening.sources(), 10) and listening.pump() == []  # lets it in, and greets
            talk = Talk(b"hush", "weather", calls=True)
            here.sendall(talk.greeting)
            assert talk.greeted(here.recv(4096))
            here.sendall(line(talk))
            found = []
            while not found and readable(listening.sources(), 0.3):
                found = listening.pump()
            for connection, _, _ in found:
                connection.close()
            here.settimeout(10)
            return [message for _, _, message in found], here.recv(1) == b""

        assert heard(lambda talk: b'{"n": 1}\n') == ([], True)
        assert heard(lambda talk: b" ".join([b"0" * 64, b'{"n": 1}\n'])) == ([], True)
        assert heard(lambda talk: talk.sealed({"n": 1})) == ([{"n": 1}], True)


@pytest.fixture
def tapped():
    """A way to an address that keeps a copy of what the caller says: (address there) -> (port here, copies)."""
    with contextlib.ExitStack() as stack:

        def tapped(port):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            copies = []

            def carry(source, target, copy):
                with contextlib.suppress(OSError):
                    while chunk := source.recv(4096):
                        copy.append(chunk)
                        target.sendall(chunk)
                    target.shutdown(socket.SHUT_WR)

            def work():
                with contextlib.suppress(OSError):
                    while True:
                        here, _ = server.accept()
                        try:
                            there = socket.create_connection(("127.0.0.1", port))
                        except OSError:
                            here.close()
                            continue
                        copies.append(copy := [])
                        for pair in ((here, there, copy), (there, here, [])):
                            threading.Thread(target=carry, args=pair, daemon=True).start()

            threading.Thread(target=work, daemon=True).start()
            return server.getsockname()[1], copies

        yield tapped


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def outcome(results, name, *arguments):
    try:
        roll_call(*arguments)
        results[name] = None
    except (ValueError, TimeoutError) as error:
        results[name] = str(error)


def test_a_recorded_process_cannot_be_played_back_to_another_job(tapped, monkeypatch):
    monkeypatch.setenv("AXONML_JAX_TOKEN", "hush")
    port, results = free_port(), {}
    way, copies = tapped(port)
    places = {"0": (f"127.0.0.1:{port}", 2, 0, 20.0), "1": (f"127.0.0.1:{way}", 2, 1, 20.0)}
    threads = [threading.Thread(target=outcome, args=(results, name, *place)) for name, place in places.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {"0": None, "1": None}
    recorded = b"".join(copies[-1])
    assert b'{"process": 1, "count": 2}' in recorded and b"hush" not in recorded

    job = threading.Thread(target=outcome, args=(results, "next", f"127.0.0.1:{(port := free_port())}", 2, 0, 1.0))
    job.start()
    with contextlib.ExitStack() as stack:
        for attempt in range(200):
            try:
                caller = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            except OSError:
                assert attempt < 199
                threading.Event().wait(0.02)
                continue
            caller.sendall(recorded)
            break
        job.join(20)
    assert "process(es) [1] never arrived" in results["next"]


def test_a_listener_that_is_none_of_ours_is_left():
    with socket.create_server(("127.0.0.1", 0)) as server:
        for said in (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100, b""):
            caller = socket.create_connection(server.getsockname(), timeout=5)
            with server.accept()[0] as other, caller:
                other.sendall(said)
                other.shutdown(socket.SHUT_WR)
                with pytest.raises(ConnectionError, match="something else answers there"):
                    greet(caller, b"hush", "weather")


def test_a_token_comes_from_a_variable_or_a_file_and_is_never_shown(tmp_path):
    path = tmp_path / "token"
    given = {"AXONML_JAX_TOKEN_FILE": str(path)}
    with pytest.raises(ValueError, match="No such file"):
        job_token(given)
    path.touch(0o600)
    path.write_text("\n")
    with pytest.raises(ValueError, match="the file is empty"):
        job_token(given)
    path.write_text("hush\n")
    assert job_token(given) == job_token({"AXONML_JAX_TOKEN": "hush"}) == b"hush" and job_token({}) == b""
    with pytest.raises(ValueError, match="give one of them") as both:
        job_token(given | {"AXONML_JAX_TOKEN": "hush"})
    assert "hush" not in str(both.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644, 0o640])
def test_a_token_that_others_may_read_or_write_is_refused(mode, tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("hush")
    path.chmod(mode)
    group_of_root = mode == 0o640 and path.stat().st_uid == 0
    if group_of_root:
        assert job_token({"AXONML_JAX_TOKEN_FILE": str(path)}) == b"hush"
        return
    with pytest.raises(
        ValueError, match=rf"TOKEN_FILE=.*others may read or write it \(mode {mode:04o}\); chmod 600"
    ) as no:
        job_token({"AXONML_JAX_TOKEN_FILE": str(path)})
    assert "hush" not in str(no.value)


def test_a_token_is_a_short_ordinary_file(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "long").touch(0o600)
    (tmp_path / "long").write_bytes(b"x" * 5000)
    for name, why in (("pipe", "no ordinary file"), ("long", "longer than 4096 bytes"), (".", "Is a directory")):
        with pytest.raises(ValueError, match=f"TOKEN_FILE=.*{why}"):
            job_token({"AXONML_JAX_TOKEN_FILE": str(tmp_path / name)})


def test_more_than_a_thousand_sockets_can_be_watched():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    one, other = socket.socketpair()
    try:
        with one, other, socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1050)) as high:
            assert readable([high], 0) == []
            other.send(b"x")
            assert readable([high], 1) == [high]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_callers_never_take_the_last_files_that_a_process_may_open(monkeypatch):
    for limit, most in ((64, 16), (1, 1), (10_000, 256), (resource.RLIM_INFINITY, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert callers._room() == most
    monkeypatch.undo()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16))
        listening = stack.enter_context(contextlib.closing(callers.Callers(server, b"", "a test", lambda said: True)))
        for _ in range(6):
            last = stack.enter_context(socket.create_connection(server.getsockname()))
        highest, filled = max(map(int, os.listdir("/dev/fd"))), 0
        while filled <= highest:  # the holes between those that are open
            stack.callback(os.close, filled := os.dup(last.fileno()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (filled + 3, hard))  # two more
        try:
            assert listening.pump() == [] and len(listening.sources()) == 3  # the two that came last
            assert readable(listening.sources(), 0) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""A stand-in for S3: one bucket in memory behind S3's REST, in a thread; what arrives is logged, and may be refused."""

import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class StandIn:
    """A server that is up while this is entered.

    Attributes:
      objects: by path, `/bucket/key`.
      log: of every request the method and the path.
      refuse: asked for each request; a status answers it, None lets it through.
    """

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.log: list[tuple[str, str]] = []
        self.refuse: Callable[[str, str], int | None] = lambda method, path: None
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()

    def environ(self) -> dict[str, str]:
        """What a client must be told."""
        keys = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "something"}
        return keys | {"AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1"}


def killed_while_it_puts(s3: StandIn, ending: str, program: str, *words: str) -> None:
    """Runs a Python program and kills it as it puts a path: the server holds its answer back until the process is dead."""
    reached, dead = threading.Event(), threading.Event()

    def refuse(method, path):
        if method == "PUT" and path.endswith(ending) and not dead.is_set():
            reached.set()
            dead.wait(120)
            return 503
        return None

    s3.refuse = refuse
    here = Path(__file__).parent
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", program, *words], env=environ)
    try:
        assert reached.wait(240)
    finally:
        process.kill()
        process.wait(60)
        dead.set()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: StandIn

    def log_message(self, *said):
        """Nothing."""

    def _serve(self):
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query, keep_blank_values=True)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.store.log.append((self.command, path))
        if (status := self.store.refuse(self.command, path)) is not None:
            return self._answer(status, b"<Error><Code>Refused</Code><Message>for a test</Message></Error>")
        objects = self.store.objects
        if self.command == "PUT":
            objects[path] = body
            return self._answer(200, tag=body)
        if self.command == "DELETE":
            objects.pop(path, None)
            return self._answer(204)
        if "list-type" in query:
            return self._answer(200, self._list(path.strip("/"), query.get("prefix", [""])[0]))
        if path.count("/") == 1:  # the bucket itself
            return self._answer(200)
        if path not in objects:
            return self._answer(404)
        return self._answer(200, objects[path], tag=objects[path])

    do_PUT = do_GET = do_HEAD = do_DELETE = _serve

    def _list(self, bucket, prefix):
        keys = sorted(path.removeprefix(f"/{bucket}/") for path in self.store.objects)
        rows = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in keys if key.startswith(prefix))
        head = "<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>"
        return f"{head}{rows}<KeyCount>{len(keys)}</KeyCount></ListBucketResult>".encode()

    def _answer(self, status, body=b"", tag=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-amz-bucket-region", "us-east-1")
        if tag is not None:
            self.send_header("ETag", f'"{hashlib.md5(tag).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

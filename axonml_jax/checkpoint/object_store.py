"""Object stores: files of a folder or of a URL, put, got and listed."""

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TRIES = 6
"""How often something is tried, at most: over about half a minute."""

_STALLED = "30"
"""Seconds after which a request is given up that moves no byte; TensorStore's own limit is none."""

_FIRST, _LONGEST = 0.5, 16.0
_SAID_EVERY = 300.0  # seconds; a store that is busy is so for many objects at once
_PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED")
_DRIVERS = {"s3": "s3", "gs": "gcs", "file": "file"}


class ObjectStore:
    """The objects whose names begin with the path of a URL.

    Credentials are the usual ones of each store, from the environment; for S3 `AWS_ENDPOINT_URL` and `AWS_REGION` count too.

    Args:
      url: `s3://bucket/path`, `gs://bucket/path` or `file:///folder`.
      tries: how often something is tried that a store says may go better; the pauses between double.
      whole: allow a URL without a path, which is a whole bucket.

    Raises:
      ValueError: for another URL.
    """

    def __init__(self, url: str, *, tries: int = TRIES, whole: bool = False):
        self.url, self._tries, self._said = url.rstrip("/"), tries, -_SAID_EVERY
        self._spec, self._opened = _spec_of(self.url, whole), None

    def __str__(self) -> str:
        return self.url

    @property
    def folder(self) -> Path | None:
        """The folder of a `file://` URL; None for any other."""
        return Path(self._spec["path"]).resolve() if self._spec["driver"] == "file" else None

    def put(self, key: str, content: bytes) -> None:
        """Store an object atomically; every reader sees it when this returns."""
        self._try(f"write {key}", lambda: self._kvstore().write(key, content).result())

    def get(self, key: str) -> bytes | None:
        """The content of an object; None if there is none."""
        found = self._try(f"read {key}", lambda: self._kvstore().read(key).result())
        return bytes(found.value) if found.state == "value" else None

    def keys(self, prefix: str = "") -> list[str]:
        """The sorted names of all objects with a prefix."""
        return sorted(key.decode() for key in self._try(f"list {prefix}*", lambda: self._list(prefix)))

    def remove(self, key: str) -> None:
        """Delete an object, if there is one."""
        self._try(f"delete {key}", lambda: self._kvstore().delete_range(_range(key, key + "\0")).result())

    def _list(self, prefix: str) -> list[bytes]:
        return self._kvstore().list(_range(prefix, prefix + "\U0010ffff")).result()

    def _kvstore(self) -> Any:
        if self._opened is None:
            import tensorstore as ts  # a tenth of a second that `import axonml_jax` should not cost

            # Read when the process first speaks HTTP through TensorStore; whoever has set them knows better.
            os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", _STALLED)
            os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
            # TensorStore's own tries are many and silent; those here are few, and said.
            once = {"max_retries": 1, "initial_delay": "100ms", "max_delay": "100ms"}
            context = ts.Context({"s3_request_retries": once, "gcs_request_retries": once})
            self._opened = ts.KvStore.open(self._spec, context=context).result()
        return self._opened

    def _try(self, what: str, act: Callable[[], Any]) -> Any:
        for attempt in range(1, self._tries + 1):
            try:
                return act()
            except (ValueError, OSError, RuntimeError) as error:
                if attempt == self._tries or not may_pass(error):
                    times = f", tried {attempt} times" if attempt > 1 else ""
                    raise OSError(f"cannot {what} at {self.url}{times}: {error}") from error
                self._say(what, error)
                time.sleep(min(_FIRST * 2 ** (attempt - 1), _LONGEST) * random.uniform(0.5, 1))
        raise AssertionError("the last try has raised")

    def _say(self, what: str, error: Exception) -> None:
        if (now := time.monotonic()) - self._said >= _SAID_EVERY:
            self._said = now
            from axonml_jax.base import logger  # imports JAX, before which a configuration is read

            logger.warning("cannot %s at %s; it is tried %d times: %s", what, self.url, self._tries, error)


def may_pass(error: Exception) -> bool:
    """Whether a store's error is temporary: it is busy, or could not be reached.

    >>> may_pass(ValueError("UNAVAILABLE: CURL error Couldn't connect to server"))
    True
    >>> may_pass(ValueError("PERMISSION_DENIED: Access Denied [http_response_code='403']"))
    False
    """
    return any(re.search(rf"\b{word}\b", str(error)) for word in _PASSING)


def lie_apart(store: ObjectStore, folder: Path, what: str, remedy: str) -> None:
    """Check that a `file://` URL and a folder do not lie one inside the other.

    Args:
      store: the URL.
      folder: the folder.
      what: both, for the message.
      remedy: what to do.

    Raises:
      ValueError: when one does.
    """
    mine, there = folder.resolve(), store.folder
    if there is not None and (there.is_relative_to(mine) or mine.is_relative_to(there)):
        raise ValueError(
            f"{what}, lie one within the other: copies need a place of their own, best on another disk; {remedy}"
        )


def _spec_of(url: str, whole: bool) -> dict[str, Any]:
    parts = urlsplit(url)
    driver, path = _DRIVERS.get(parts.scheme), parts.path.strip("/")
    if (
        driver is None
        or bool(parts.netloc) == (driver == "file")
        or not (path or whole)
        or parts.query
        or parts.fragment
    ):
        raise ValueError(f"{url!r} must be s3://bucket/path, gs://bucket/path or file:///folder, without ? and #")
    try:
        url.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{url!r} is no UTF-8, which object stores take names in: give another path") from None
    if driver == "file" and ("\\" in path or ({"..", ".", ""} & set(path.split("/")) and path)):
        raise ValueError(  # TensorStore takes a backslash for a slash, and the copies would lie elsewhere
            f"{url!r} has a backslash or one of .. . // in its path, which are not taken there: give the path without them"
        )
    if driver == "file":
        return {"driver": "file", "path": f"/{path}/" if path else "/"}
    spec = {"driver": driver, "bucket": parts.netloc, "path": path and f"{path}/"}
    if driver == "s3":
        given = {"endpoint": os.environ.get("AWS_ENDPOINT_URL"), "aws_region": os.environ.get("AWS_REGION")}
        spec |= {name: value for name, value in given.items() if value}
    return spec


def _range(low: str, high: str) -> Any:
    import tensorstore as ts

    return ts.KvStore.KeyRange(low.encode(), high.encode())

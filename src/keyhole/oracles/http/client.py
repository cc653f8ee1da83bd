"""A connection to an HTTP endpoint that is polite and cannot be fooled.

Time-outs cover a whole exchange, from connecting to the last byte, redirects included; answers are
bounded in size and come as they are (no compression was asked for); certificates are checked,
redirects to another host are refused, the rate is kept across all connections, and the token is
sent and never shown. Whatever an endpoint sends, the worst that comes of it is an OracleError.
"""

import contextlib
import email.utils
import ipaddress
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from keyhole import __version__
from keyhole.arrays import real_number, whole_number
from keyhole.errors import InvalidArgument, KeyholeError, OracleError
from keyhole.oracles.http.retry import Repeats, RetryPolicy, Transient, patiently, pause
from keyhole.oracles.http.tensors import HEADER_LENGTH
from keyhole.text import clean, keep_secret

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE = "KEYHOLE_TOKEN"
MAX_TEXT = 2**26  # bytes of one answer in JSON, which takes many times as much when it is read
SHOWN = 300  # characters of an endpoint's own error message


@dataclass(frozen=True)
class Access:
    """How an endpoint is used: everything but what is asked."""

    token_env: str = TOKEN_VARIABLE  # name of the environment variable that holds the token
    plain_token: bool = False  # whether the token may travel unencrypted to another machine
    timeout: float = 60.0  # seconds for one exchange, from connecting to the last byte
    rate: float | None = None  # queries per second, over all connections
    concurrency: int = 1  # exchanges at the same time
    patience: RetryPolicy = field(default_factory=RetryPolicy)
    # further headers, with the names of the environment variables that hold their values
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        real_number("timeout", self.timeout, 0.0, finite=False)
        if self.rate is not None:
            real_number("rate", self.rate, 0.0, finite=False)
        whole_number("concurrency", self.concurrency, 1)


@dataclass
class Traffic:
    """What went over the wire since the endpoint was opened, repeats included. The ledger counts a
    query once, and tells apart how many were sent again."""

    exchanges: int = 0
    queries: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def sent(self, queries: int) -> None:
        with self._lock:
            self.exchanges += 1
            self.queries += queries

    def failed(self, kind: str) -> None:
        with self._lock:
            self.failures[kind] += 1


class Pace:
    """Keeps the rate, and the pauses an endpoint asks for, over all threads."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free = 0.0
        self._lock = threading.Lock()

    def wait(self, queries: int, stop: threading.Event | None) -> None:
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free)
            self._free = max(self._free, start + (queries / self.rate if self.rate else 0.0))
        if start > now:
            pause(start - now, stop)

    def hold(self, seconds: float) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic() + seconds)


@dataclass(frozen=True, eq=False)
class Answer:
    """What an endpoint sent back, status 200."""

    body: bytes
    headers: Any


class Unreachable(Transient):
    """Nobody answers there."""


class Forbidden(OracleError):
    """The endpoint wants a token, or another one."""


class Endpoint:
    """One origin (scheme, host, port). `exchange` is safe to call from several threads."""

    def __init__(self, url: str, access: Access) -> None:
        import httpx  # slow to import, and only this kind of box needs it

        from keyhole.oracles.http.deadline import Transport

        self.url, self.access = checked_url(url), access
        self.traffic, self.pace, self.repeats = Traffic(), Pace(access.rate), Repeats()
        self._urls: dict[str, Any] = {}
        self._token = os.environ.get(access.token_env, "")
        self._check_secret(self._token, access.token_env)
        keep_secret(self._token)
        self._more = self._read_headers()
        most = None if access.timeout == float("inf") else access.timeout
        # of the whole time-out, at most ten seconds to get a connection
        timeout = httpx.Timeout(most, connect=min(10.0, access.timeout))
        self._timeout = {"timeout": timeout.as_dict()}
        # the transport itself: cookies and the like cost a third of a small exchange
        try:
            self._transport = Transport(
                httpx.Limits(max_connections=access.concurrency), proxy_for(self.url)
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise InvalidArgument(
                f"the proxy that the environment names cannot be used: {error}"
            ) from error

    def _read_headers(self) -> dict[str, str]:
        """The further headers with their values, which are kept as secret as a token."""
        found = {}
        for name, variable in self.access.headers.items():
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
                raise InvalidArgument(f"{name!r} is no name of a header")
            if name.lower() in ("host", "content-length", "transfer-encoding", "accept-encoding"):
                raise InvalidArgument(f"the header {name} is set by Keyhole itself")
            if variable not in os.environ:
                raise InvalidArgument(
                    f"the environment variable {variable}, which holds the header {name}, is not "
                    "set"
                )
            found[name] = os.environ[variable]
            self._check_secret(found[name].replace(" ", ""), variable)
            keep_secret(found[name])
        return found

    def _check_secret(self, secret: str, variable: str) -> None:
        if not secret:
            return
        if not secret.isascii() or not secret.isprintable() or " " in secret:
            raise InvalidArgument(f"the token in {variable} holds characters no header may hold")
        parts = urlsplit(self.url)
        if parts.scheme == "http" and not loopback(parts.hostname or ""):
            if self.access.plain_token:
                return
            raise InvalidArgument(
                f"{variable} is set, and {parts.hostname} would get it unencrypted: "
                "use https://, unset the variable, or pass plain_token=True (--plain-token)"
            )

    @property
    def identity(self) -> str:
        """The URL without its query, which may hold what nobody should see."""
        return self.url.split("?")[0]

    def close(self) -> None:
        self._transport.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
        queries: int = 0,
        read: Any = None,
        stop: threading.Event | None = None,
        patience: RetryPolicy | None = None,
    ) -> Any:
        """One exchange with patience. `read` turns the Answer into what is wanted; what it raises
        as Transient (an answer that makes no sense) is tried again too, as far as `repeats` lets
        queries be sent again."""
        sent = 0

        def attempt() -> Any:
            nonlocal sent
            if sent:
                self.repeats.spend(queries)
            sent += 1
            self.pace.wait(queries, stop)
            self.traffic.sent(queries)
            try:
                answer = self._exchange(method, self._at(path), content, headers or {})
                return answer if read is None else read(answer)
            except (KeyholeError, MemoryError):
                raise
            except Exception as error:  # of the endpoint, which may send anything
                raise OracleError(
                    f"{self.identity} sent something that makes no sense "
                    f"({type(error).__name__}: {clean(str(error))[:SHOWN]})"
                ) from error

        return patiently(attempt, patience or self.access.patience, stop, self._failed)

    def _at(self, path: str) -> Any:
        """The URL of a path, taken apart once."""
        import httpx

        if path not in self._urls:
            self._urls[path] = httpx.URL(urljoin(self.url, path))
        return self._urls[path]

    def _failed(self, error: Transient) -> None:
        self.traffic.failed(type(error.__cause__ or error).__name__)
        if error.after is not None and error.after <= self.access.patience.willing:
            self.pace.hold(error.after)

    def _exchange(self, method: str, url: Any, content: bytes, headers: dict[str, str]) -> Answer:
        self._transport.deadline.start(self.access.timeout)
        max_redirects = 3
        for _ in range(max_redirects + 1):
            target = self._once(method, url, content, headers)
            if isinstance(target, Answer):
                return target
            if origin(target) != origin(self.url):
                raise OracleError(
                    f"{self.identity} redirects to another host ({urlsplit(target).hostname}); "
                    "queries and token stay with the host they were meant for. Name that host "
                    "as the target if you trust it"
                )
            url = target
        raise OracleError(f"{self.identity} redirects in circles")

    def _once(self, method: str, url: Any, content: bytes, headers: Any) -> Answer | str:
        """An answer, or where the endpoint sends us."""
        import httpx

        try:
            url = httpx.URL(url)
            headers = {**headers, **self._headers(url.netloc.decode("ascii"), len(content))}
            sent = httpx.ByteStream(content)
            request = httpx.Request(
                method, url, headers=headers, stream=sent, extensions=self._timeout
            )
            with contextlib.closing(self._transport.handle_request(request)) as response:
                # 307 and 308 keep the request as it is
                if response.status_code in (307, 308) and "location" in response.headers:
                    return urljoin(str(url), response.headers["location"])
                body = self._body(response)
        except httpx.TimeoutException as error:
            raise Transient(
                f"{self.identity} did not answer within {self.access.timeout:g} seconds"
            ) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            text = str(error) or type(error).__name__
            if "CERTIFICATE_VERIFY_FAILED" in text:
                raise OracleError(
                    f"{self.identity} shows a certificate that cannot be trusted ({text}); name "
                    "its authority in SSL_CERT_FILE if it is yours"
                ) from error
            if "WRONG_VERSION_NUMBER" in text:
                raise OracleError(f"{self.identity} speaks no TLS: name it as http://") from error
            raise Unreachable(
                f"the connection to {self.identity} failed: {text}. Is it running, and is this its "
                "address?"
            ) from error
        except (httpx.InvalidURL, httpx.HTTPError) as error:
            raise OracleError(f"{self.identity}: {error}") from error
        if response.status_code == 200:
            return Answer(body, response.headers)
        raise self._refusal(response, body)

    def _headers(self, host: str, size: int) -> dict[str, str]:
        """What every request says."""
        headers = {
            "Host": host,
            "User-Agent": f"keyhole/{__version__}",
            "Accept": "*/*",
            "Accept-Encoding": "identity",  # numbers hardly shrink
            "Content-Length": str(size),
            **self._more,
        }
        return {**headers, "Authorization": f"Bearer {self._token}"} if self._token else headers

    def _body(self, response: "httpx.Response") -> bytes:
        """Everything the endpoint sends, as it is, within the size allowed; of a refusal, the
        beginning."""
        good = response.status_code == 200
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if good and encoding not in ("", "identity"):
            raise OracleError(
                f"{self.identity} compresses its answers ({clean(encoding)[:SHOWN]}), which nobody "
                "asked for: switch that off there"
            )
        binary = HEADER_LENGTH.lower() in response.headers
        max_answer = 2**28  # bytes of one answer
        max_refusal = 2**16  # bytes of an error message that are read
        most = (max_answer if binary else MAX_TEXT) if good else max_refusal
        parts, size = [], 0
        for part in response.iter_raw():
            parts.append(part)
            size += len(part)
            if size > most and not good:
                break
            if size > most:
                raise OracleError(
                    f"{self.identity} sent more than {most} bytes: ask for fewer queries at a time "
                    "with batch= (--batch)"
                )
        return b"".join(parts)[:most]

    def _refusal(self, response: "httpx.Response", body: bytes) -> OracleError:
        status, text = response.status_code, " ".join(body.decode("utf-8", "replace").split())
        message = f"{self.identity} answered {status}: {clean(text)[:SHOWN] or 'nothing'}"
        # statuses that may be gone next time
        passing = frozenset({408, 425, 429, 500, 502, 503, 504})
        if status in passing:
            return Transient(message, retry_after(response.headers.get("retry-after")))
        if status in (401, 403):
            return Forbidden(
                f"{message}. Put a valid token into the environment variable "
                f"{self.access.token_env}"
            )
        return OracleError(message)


def checked_url(url: str) -> str:
    """The URL, if it can be used and holds no password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgument(f"not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidArgument("an endpoint is named as http(s)://host[:port]/…")
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument(
            f"a user or password in a URL ends up in logs: put a token into {TOKEN_VARIABLE}"
        )
    return url


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Who answers at this URL."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return "", None, None
    return parts.scheme, parts.hostname, port


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for this URL (HTTPS_PROXY, NO_PROXY and so on). None
    lies between a machine and itself: its token would travel for nothing."""
    parts, proxies = urlsplit(url), getproxies()
    if loopback(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")


def loopback(host: str) -> bool:
    """Whether the host is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def retry_after(header: str | None) -> float | None:
    """Seconds to wait, from a number or a date."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        when = email.utils.parsedate_to_datetime(header)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return max(0.0, (when - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, ArithmeticError):  # no date, or none that a calendar knows
        return None

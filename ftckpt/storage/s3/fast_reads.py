"""Bulk reads by obstore, where it is installed (extra `fast`).

aiobotocore parses every chunk of a body in Python; obstore receives it in Rust, by threads of its
own that need no interpreter lock. It only gets ranges of plain keys, with the endpoint and the
credentials that our client has found, and every answer is held to the same rules. Whatever it
cannot do, or does not answer as it should, the ordinary client asks for again: limits, waiting,
errors and their messages are that one's.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple

from ftckpt.storage.options import StoreOptions

LEAST = 256 << 10  # bytes of a range that is worth it
_PLAIN = re.compile(r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*")  # obstore spells other keys its own way
_FAILURES = 3  # in a row, after which it is not asked any more
_FRESH = timedelta(minutes=5)  # how long credentials that may change are used


class Answer(NamedTuple):
    """What came for a range.

    Attributes:
        etag: of the object.
        start, stop: which bytes.
        data: these.
    """

    etag: str | None
    start: int
    stop: int
    data: Any


class FastReads:
    """Reads ranges of the objects of one service; used on the event loop alone.

    Args:
        options: how to reach it.
    """

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._stores: dict[str, Any] = {}
        # obstore knows neither another set of certificates nor a proxy of a profile.
        usual = not os.environ.get("AWS_CA_BUNDLE") and not os.environ.get("REQUESTS_CA_BUNDLE")
        self._left = _FAILURES if usual and find_spec("obstore") is not None else 0

    def takes(self, key: str, length: int) -> bool:
        """Say whether a range should be read by it."""
        if self._left <= 0 or length < LEAST or not _PLAIN.fullmatch(key):
            return False
        return not {".", ".."} & set(key.split("/"))

    async def read(self, client: Any, bucket: str, key: str, first: int, last: int) -> Answer:
        """Return bytes `first` to `last` of an object, the last included.

        Args:
            client: of aiobotocore, with the endpoint and the credentials.
            bucket: of the object.
            key: of the object.
            first, last: which bytes.

        Raises:
            Exception: anything; the ordinary client is to be asked.
        """
        import obstore

        try:
            store = self._stores.get(bucket)
            if store is None:
                store = self._stores[bucket] = self._opened(client, bucket)
            found = await obstore.get_async(store, key, options={"range": (first, last + 1)})
            start, stop = found.range
            etag = found.meta.get("e_tag")
            data = await found.bytes_async()
        except BaseException:
            self._left -= 1
            raise
        self._left = _FAILURES
        return Answer(etag, start, stop, data)

    def _opened(self, client: Any, bucket: str) -> Any:
        from obstore.store import S3Store

        options, endpoint = self._options, str(client.meta.endpoint_url)
        if client.meta.config.proxies or client.meta.config.client_cert:
            raise ConnectionError("proxies and certificates of a profile are the other client's")
        more: dict[str, Any] = {}
        if options.anonymous:
            more["skip_signature"] = True
        else:
            more["credential_provider"] = _Credentials(client)
        if options.requester_pays:
            more["request_payer"] = True
        return S3Store(
            bucket,
            endpoint=endpoint,
            region=client.meta.region_name or "us-east-1",
            virtual_hosted_style_request=False,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=min(10.0, options.timeout)),
                "timeout": timedelta(seconds=options.timeout),
            },
            retry_config={"max_retries": 0},  # every attempt is counted and limited by us
            **more,
        )


class _Credentials:
    """Gives obstore what the ordinary client signs with, now and when that has changed."""

    def __init__(self, client: Any) -> None:
        self._signer = client._request_signer

    async def __call__(self) -> dict[str, Any]:
        found = self._signer._credentials
        if found is None:
            raise ConnectionError("there are no credentials")
        frozen = await found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _FRESH,
        }

"""Settings for reaching object stores."""

from __future__ import annotations

from typing import NamedTuple


class StoreOptions(NamedTuple):
    """Settings of `open_store`; local stores need none of them.

    Attributes:
        endpoint: URL of an S3-compatible service; "" means AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL,
            the profile's `endpoint_url`, or AWS itself, in this order.
        profile: named profile of the AWS configuration; "" means AWS_PROFILE or the default.
        region: region name; "" means the environment's or the profile's.
        requester_pays: pay for requests to another owner's bucket.
        anonymous: send no credentials.
        retry_seconds: total time for retries of one request.
        timeout: a request without a single byte for this many seconds has stalled.
    """

    endpoint: str = ""
    profile: str = ""
    region: str = ""
    requester_pays: bool = False
    anonymous: bool = False
    retry_seconds: float = 30.0
    timeout: float = 20.0

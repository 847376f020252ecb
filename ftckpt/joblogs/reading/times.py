"""Find the time of a log's line, in the forms that launchers, kernels and schedulers write.

    2026-01-01T00:00:00.123Z   2026-01-01 00:00:00,123   2026-01-01_00:00:00   zone or none
    E1218 20:27:21.426415540   glog, as PyTorch's C++ writes it: without a year and a zone
    Dec 18 20:27:21 n3 kernel: syslog: without a year and a zone
    [Thu Dec 18 20:27:21 2025] dmesg -T

`dmesg` without `-T` counts from the boot, which says nothing here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from ftckpt.errors import UsageError

_HEAD = 240  # bytes of a line in which its time is looked for
_MONTHS = {m: n for n, m in enumerate(
    b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}  # fmt: skip
_MONTH = rb"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = rb"(\d\d):(\d\d):(\d\d)(?:[.,](\d+))?"
_ISO = re.compile(
    rb"(?<!\d)(\d{4})-(\d\d)-(\d\d)[T _]" + _CLOCK + rb"(?: ?(Z|[+-]\d\d:?\d\d)(?!\d))?"
)
_GLOG = re.compile(rb"\b[IWEF](\d\d)(\d\d) " + _CLOCK)
_SYSLOG = re.compile(rb"^(?:<\d+>)?" + _MONTH + rb" {1,2}(\d{1,2}) " + _CLOCK)
_CTIME = re.compile(
    rb"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) " + _MONTH + rb" {1,2}(\d{1,2}) " + _CLOCK + rb" (\d{4})"
)
_EARLIEST, _LATEST = 0.0, 4.1e9  # 1970 to 2099


def zone_of(name: str) -> tzinfo:
    """Return a time zone by its name (`Europe/Berlin`) or offset (`+02:00`).

    Raises:
        UsageError: there is none of this name.
    """
    if name.upper() in ("UTC", "Z", ""):
        return UTC
    match = re.fullmatch(r"([+-])(\d\d):?(\d\d)", name)
    if match and int(match[2]) < 24 and int(match[3]) < 60:
        offset = timedelta(hours=int(match[2]), minutes=int(match[3]))
        return timezone(-offset if match[1] == "-" else offset)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(
            f"--timezone {name}: no such zone", hint="Europe/Berlin, +02:00 or UTC"
        ) from error


class Stamps:
    """Reads the times of one file.

    Args:
        zone: of times that name none.
        newest: seconds since the epoch that no time of the file exceeds (when it was last written);
            it settles the year where a time has none and none before it had one.

    Attributes:
        zoneless: whether a time without a zone was read.
        yearless: whether one without a year was.
    """

    def __init__(self, zone: tzinfo, newest: float) -> None:
        self._zone, self._newest = zone, newest
        self.zoneless = self.yearless = False
        self._dated: float | None = None  # the last time that had a year

    def of_line(self, line: bytes) -> float | None:
        """Return the time of a line in seconds since the epoch; None where it has none."""
        head = line[:_HEAD]
        if match := _ISO.search(head):
            return self._with_year(self._iso(match))
        if match := _CTIME.search(head):
            day, clock = int(match[2]), match.groups()[2:6]
            return self._with_year(self._moment(int(match[7]), _MONTHS[match[1]], day, clock))
        if match := _GLOG.search(head):
            return self._without_year(int(match[1]), int(match[2]), match.groups()[2:6])
        if match := _SYSLOG.match(head):
            return self._without_year(_MONTHS[match[1]], int(match[2]), match.groups()[2:6])
        return None

    def of_text(self, text: str) -> float | None:
        """Return the time that a text is, as `of_line`; also seconds since the epoch."""
        try:
            number = float(text)
        except ValueError:
            return self.of_line(text.encode(errors="replace"))
        return number if _EARLIEST < number < _LATEST else None

    def _iso(self, match: re.Match[bytes]) -> float | None:
        year, month, day = (int(match[n]) for n in (1, 2, 3))
        zone = match[8]
        if zone is None:
            return self._moment(year, month, day, match.groups()[3:7])
        known: tzinfo = UTC
        if zone != b"Z":
            offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
            if offset >= timedelta(days=1):
                return None
            known = timezone(-offset if zone[:1] == b"-" else offset)
        return self._moment(year, month, day, match.groups()[3:7], known)

    def _with_year(self, time: float | None) -> float | None:
        self._dated = self._dated if time is None else time
        return time

    def _without_year(self, month: int, day: int, clock: tuple[bytes | None, ...]) -> float | None:
        self.yearless = True
        near = self._newest if self._dated is None else self._dated
        year = datetime.fromtimestamp(near, UTC).year
        if self._dated is not None:
            times = [self._moment(year + n, month, day, clock) for n in (-1, 0, 1)]
            return min(
                (t for t in times if t is not None), key=lambda t: abs(t - near), default=None
            )
        time = self._moment(year, month, day, clock)
        # A day of room: the zone may be wrong by hours.
        if time is None or time > self._newest + 86400:
            time = self._moment(year - 1, month, day, clock)
        return time

    def _moment(
        self,
        year: int,
        month: int,
        day: int,
        clock: tuple[bytes | None, ...],
        zone: tzinfo | None = None,
    ) -> float | None:
        hour, minute, second, fraction = clock
        if zone is None:
            self.zoneless, zone = True, self._zone
        try:
            moment = datetime(
                year, month, day, int(hour or 0), int(minute or 0), int(second or 0), tzinfo=zone
            )
            time = moment.timestamp() + (float(b"0." + fraction[:9]) if fraction else 0.0)
        except (ValueError, OverflowError):
            return None
        return time if _EARLIEST < time < _LATEST else None

#!/bin/sh
# Every night, beside a running trainer: read what was not read for longest, keep history cheap, bring the second tier up to date, and look
# at all of it. Each line tells by its own --on-alert, once for each thing, and none of them keeps the next one from running. A night that is
# missed needs no hands.
: "${ROOT:?}" "${TIER:?}"
: "${TELL:=mail -s 'ftckpt alert' oncall@example.org}"
worst=0
each() {
    ftckpt "$@" --on-alert "$TELL" -q >/dev/null || worst=14
}
each scrub "$ROOT" --budget 1h --limit-rate 200MiB/s
each gc "$ROOT" --keep-last 3 --keep-every 1000 --thin-after 30d --apply
each sync "$ROOT" "$TIER" --newest 3 --every 1000
each status "$ROOT" --expect-interval 22m --scrub-every 30d --tier "$TIER"
exit $worst

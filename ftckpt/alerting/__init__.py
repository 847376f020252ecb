"""Tell somebody what is wrong: once, by a command or a webhook, without being held up by either.

`deliver` hands one document over; `tell` decides which conditions are news, by what it remembers.
"""

from __future__ import annotations

from .already_told import AlertMemory as AlertMemory
from .already_told import AlertSource as AlertSource
from .already_told import Condition as Condition
from .already_told import state_file as state_file
from .already_told import tell as tell
from .deliver import AlertHook as AlertHook
from .deliver import alert_document as alert_document
from .deliver import deliver as deliver

"""Tell somebody what is wrong: once, by a command or a webhook, without being held up by either.

`deliver` hands one document over; `tell` decides which conditions are news, by what it remembers.
"""

from __future__ import annotations

from .deliver import AlertHook as AlertHook
from .deliver import alert_document as alert_document
from .deliver import deliver as deliver
from .told import AlertMemory as AlertMemory
from .told import AlertSource as AlertSource
from .told import Condition as Condition
from .told import state_file as state_file
from .told import tell as tell

"""Survey a run's checkpoint health: saves, times, cadence, alerts.

`survey` reads a root by its listings, `judge` says what follows from that, `alerts` what of it is
worth waking somebody for, and `prometheus` the same for a monitor.
"""

from __future__ import annotations

from .alerts import AlertKind as AlertKind
from .alerts import Scrubbed as Scrubbed
from .judge import Health as Health
from .judge import Status as Status
from .judge import Thresholds as Thresholds
from .judge import judge as judge
from .prometheus import metrics as metrics
from .survey import Durable as Durable
from .survey import Survey as Survey
from .survey import SurveyedEntry as SurveyedEntry

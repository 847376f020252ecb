"""Plan how often to save, what that leads to, how sure it is, and what to improve first.

`ftckpt.planning.models` holds the mathematics; this package applies it to one job. Seconds, bytes
and fractions throughout.

    from ftckpt.planning import rates
    from ftckpt.planning import Plain, Question, combine
    from ftckpt.planning import answer

    failures = combine([rates.Cause("gpu", rates.from_mtbf(50_000 * rates.HOUR, 16_384))])
    plan = answer(Question(model=Plain(mtbf=failures.mtbf, save=60.0), failures=failures))
    plan.interval.chosen_s, plan.outcome.useful
"""

from __future__ import annotations

from .answer import Plan as Plan
from .answer import answer as answer
from .answer import around as around
from .answer import solve as solve
from .choose_model import Latent as Latent
from .choose_model import Model as Model
from .choose_model import Plain as Plain
from .choose_model import Silent as Silent
from .choose_model import Spot as Spot
from .choose_model import Tiered as Tiered
from .question import Constraint as Constraint
from .question import Counted as Counted
from .question import Failures as Failures
from .question import IntervalRule as IntervalRule
from .question import PlanBounds as PlanBounds
from .question import Question as Question
from .question import Remedy as Remedy
from .question import combine as combine

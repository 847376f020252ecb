"""How often to save: the mathematics behind `ftckpt plan`, as pure typed functions.

Seconds, bytes and fractions throughout; rates are per second. An interval is always the useful work
between two saves, without the save itself. Every function of a `Real` takes numbers or numpy arrays
and broadcasts them; with numbers alone numpy is not imported. Arguments out of range raise
`UsageError` with a sentence, so that no result is ever not-a-number.

    from ftckpt.planning.models import exact
    from ftckpt.planning import rates

    mtbf = 1 / rates.from_mtbf(50_000 * rates.HOUR, count=16_384)
    interval = exact.optimum(60.0, mtbf)
    exact.outcome(interval, 60.0, mtbf, restart=480.0, detect=120.0).useful

What is known:       `ftckpt.planning.rates` (`poisson`): units, combination, confidence limits
How often, and what it leads to, as an `Outcome`:
                     `exact` blocking saves; `asynchronous`; `tiers`; `silent` errors; `spot`
                     machines; `classic`: Young, Daly, effective training time ratio
Whether it is true:  `ftckpt.planning.simulation`: event by event, sharing nothing but `inputs`
Around it:           `rounding` to steps, `storage`, `compression`, `elastic`, `peers`, `risk`
"""

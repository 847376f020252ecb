"""How often to save: the mathematics behind `ftckpt plan`, as pure typed functions.

Seconds, bytes and fractions throughout; rates are per second. An interval is always the useful work
between two saves, without the save itself. Every function of a `Real` takes numbers or numpy arrays
and broadcasts them; with numbers alone numpy is not imported. Every function raises `UsageError`
for an argument that is out of range or not a number, so no result is ever not-a-number. Unless a
docstring says otherwise, the arguments are:

    interval  tau  useful work between two saves, > 0
    save      C    pause of training for one save, >= 0
    snapshot  s    pause of training for the snapshot of a background save, >= 0
    flush     F    from the end of the snapshot until the copy is durable, >= 0
    slowdown  a    share of training speed lost while flushing, in [0, 1]
    mtbf      M    mean time between failures that stop the job, > 0; may be infinite
    restart   R    reloading, >= 0; begun anew when a failure interrupts it
    detect    D    noticing a failure and replacing the failed part, >= 0; failure-free

    from ftckpt.planning.models import exact
    from ftckpt.planning import rates

    mtbf = 1 / rates.from_mtbf(50_000 * rates.HOUR, count=16_384)
    interval = exact.optimum(60.0, mtbf)
    exact.outcome(interval, 60.0, mtbf, restart=480.0, detect=120.0).useful

`exact` (blocking saves), `asynchronous`, `tiers`, `silent` (errors), `spot` (machines) and
`classic` (Young, Daly, effective training time ratio) give intervals and their `Outcome`.
`ftckpt.planning.simulation` checks them event by event, and shares only `inputs` with them.
"""

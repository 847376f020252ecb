"""Files by which a trainer says whether the step in whose folder they lie is finished.

A format's own commit marker (`.metadata`, `trainer_state.json`) is the format's; these mark a whole
step, whatever it holds.
"""

# NeMo Automodel makes it before it writes, and removes it last; a step that has it is neither
# loaded nor counted (nemo_automodel/components/checkpoint/{lifecycle,utils}.py, 0.7).
UNFINISHED = ".incomplete"
# The opposite, written last: it commits a step whose format has no marker.
FINISHED = ".complete"

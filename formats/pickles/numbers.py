"""How numbers are spelled in a pickle: regular expressions of those that a walk passes over.

The numbers of a tuple have eight bytes at most, as those of real shapes: there are not more such
tuples than hashes, and few can have the same hash (see `floods`).
"""

_SHORT = rb"(?:K.|M..)"
_WIDE = rb"(?:K.|M..|J.{4})"
INT = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06[^\x94]{6})"
TWO = rb"(?:" + _WIDE * 2 + rb"|" + _SHORT + INT + rb"|" + INT + _SHORT + rb")"
THREE = (
    rb"(?:" + _SHORT * 2 + _WIDE + rb"|" + _SHORT + _WIDE + _SHORT + rb"|" + _WIDE + _SHORT * 2
    + rb")"
)  # fmt: skip
MORE = (
    rb"(?:(?:K.){4,8}+(?=t)|" + _SHORT * 4 + rb"|" + _SHORT + rb"(?:K.){3,6}+|J.{4}" + _SHORT
    + rb"(?:K.){2})"
)  # fmt: skip

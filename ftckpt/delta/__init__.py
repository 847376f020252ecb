"""Deltas: a checkpoint stored as what it adds to another, bit for bit.

`ftckpt.delta.pairing` says what each tensor is stored against, `encoding` encodes blocks and
`decoding` reads any bytes back; `index` is the file that ties them together. Underneath, `choosing`
finds the best way for a tensor by a sample, with `predictions` fitted by `fitting`; `blocks` codes
one block in one of its forms: `planes` of bytes or sparse `changes` of `words`, through `entropy`.
"""

from .blocks import BLOCK as BLOCK
from .blocks import Form as Form
from .blocks import Reference as Reference
from .choosing import EFFORTS as EFFORTS
from .choosing import Effort as Effort
from .choosing import Plan as Plan
from .decoding import DeltaDecoder as DeltaDecoder
from .decoding import Fill as Fill
from .encoding import DeltaEncoder as DeltaEncoder
from .encoding import EncodedBlock as EncodedBlock
from .encoding import Rows as Rows
from .fitting import Settings as Settings
from .index import NAME as NAME
from .index import BaseName as BaseName
from .index import BaseTensor as BaseTensor
from .index import DataFile as DataFile
from .index import DeltaIndex as DeltaIndex
from .index import DeltaObject as DeltaObject
from .index import DeltaTensor as DeltaTensor
from .index import content_digest as content_digest
from .pairing import Pair as Pair
from .pairing import pair as pair

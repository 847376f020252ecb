"""Deltas: a checkpoint stored as what it adds to another, bit for bit.

`ftckpt.delta.pack.pair` says what each tensor is stored against, `encoding` encodes blocks and
`decoding` reads any bytes back; `index` is the file that ties them together. Underneath, `choosing`
finds the best way for a tensor by a sample, with `predictions` fitted by `fitting`; `blocks` codes
one block in one of its forms: `planes` of bytes or sparse `changes` of `words`, through `entropy`.
"""

from ftckpt.delta.codec.choose_encoding import BLOCK as BLOCK
from ftckpt.delta.codec.choose_encoding import EFFORTS as EFFORTS
from ftckpt.delta.codec.choose_encoding import Effort as Effort
from ftckpt.delta.codec.choose_encoding import EncodingPlan as EncodingPlan
from ftckpt.delta.codec.choose_encoding import Form as Form
from ftckpt.delta.codec.choose_encoding import Reference as Reference
from ftckpt.delta.codec.decode import DeltaDecoder as DeltaDecoder
from ftckpt.delta.codec.decode import Fill as Fill
from ftckpt.delta.codec.encode import DeltaEncoder as DeltaEncoder
from ftckpt.delta.codec.encode import EncodedBlock as EncodedBlock
from ftckpt.delta.codec.encode import Rows as Rows
from ftckpt.delta.codec.fit_predictor import FitSettings as FitSettings
from ftckpt.delta.pack.pair import DeltaPair as DeltaPair
from ftckpt.delta.pack.pair import pair as pair

from .index import NAME as NAME
from .index import BaseName as BaseName
from .index import BaseTensor as BaseTensor
from .index import DataFile as DataFile
from .index import DeltaIndex as DeltaIndex
from .index import DeltaObject as DeltaObject
from .index import DeltaTensor as DeltaTensor
from .index import content_digest as content_digest

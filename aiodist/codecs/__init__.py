"""Codecs: float32 arrays in fewer bytes, for lines on which bytes take long.

`int8`, `int4`, `bf16` and `topk` are codecs; a class that derives from `Codec` is one, too.
`ErrorFeedback` adds what a coding lost to the next one. Codecs are pure: they know of no rank, no
group and no line. `aiodist.testing.CodecConformance` are the tests that each of them passes.
"""

from aiodist.codecs.base import Codec
from aiodist.codecs.bfloat16 import bf16
from aiodist.codecs.feedback import ErrorFeedback
from aiodist.codecs.integers import int4, int8
from aiodist.codecs.largest import topk

__all__ = ["Codec", "ErrorFeedback", "bf16", "int4", "int8", "topk"]

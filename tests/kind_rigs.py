"""A rig for each way in which a row may keep state, made once."""

from collections.abc import Callable
from functools import cache

from tiny_models import CHUNK, Rig, make_rig
from tiny_zoo import zoo_model

from mlxd.caches.quantization import Quantization

PACKED = Quantization(bits=4, group_size=32)
LATE = Quantization(bits=4, group_size=32, start=CHUNK + 3)
BOUNDARY = 2 * CHUNK
KINDS: dict[str, Callable[[], Rig]] = {
    "plain": lambda: make_rig("llama", "in_place"),
    "packed": lambda: make_rig("llama/64", "in_place", quantization=PACKED),
    "delayed": lambda: make_rig("llama/64", "in_place", quantization=LATE),
    "sliding": lambda: make_rig("gemma3_text", "in_place"),
    "delayed sliding": lambda: make_rig("mistral/64", "in_place", quantization=LATE),
    "recurrent": lambda: make_rig("mamba2", "in_place", model=zoo_model("mamba2")),
    "recurrent and delayed": lambda: make_rig(
        "falcon_h1", "in_place", model=zoo_model("falcon_h1"), quantization=LATE
    ),
}
rig_of = cache(lambda kind: KINDS[kind]())

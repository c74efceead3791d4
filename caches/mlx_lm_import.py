"""[M] mlx_lm for all of us. Its import lowers the limit on open files for good; that call is left out."""

import resource

_setrlimit = resource.setrlimit
resource.setrlimit = lambda *_: None
try:
    from mlx_lm import utils
    from mlx_lm.models import activations, rope_utils
    from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
finally:
    resource.setrlimit = _setrlimit

__all__ = ["activations", "ArraysCache", "CacheList", "KVCache", "RotatingKVCache", "rope_utils", "utils"]

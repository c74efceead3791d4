"""What tells a model's weights from any other's, read in milliseconds."""

from hashlib import blake2b
from pathlib import Path

from mlxd.batching.model_files import MAX_TEXT_BYTES
from mlxd.caches.files import read_file

_BLOCK_BYTES = 64 * 2**10
_NUM_BLOCKS = 16
_DIGEST_BYTES = 16


def fingerprint(folder: Path) -> str:
    """Hash of the folder's configuration and weight files: names, sizes, and blocks spread over each.

    Training changes nearly every number, so a changed file differs in some block. Raises OSError.
    """
    digest = blake2b(read_file(folder / "config.json", MAX_TEXT_BYTES), digest_size=_DIGEST_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for block in range(_NUM_BLOCKS):
                file.seek(block * max(0, size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()

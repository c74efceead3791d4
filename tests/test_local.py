"""Engine.generate: completions without a daemon."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_tokenizers
from msgspec.structs import replace
from scheduling import VOCAB, fake_factory, make_config, make_tenant

from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.batching.runner import Progress, Runner
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config import Config, ModelConfig
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import (
    EngineFailedError,
    InvalidParamError,
    InvalidPromptError,
    MlxdError,
    RejectedError,
)


def test_generate_completes_token_prompts_in_order_beyond_the_queue_limit() -> None:
    config = make_config(make_tenant("acme", max_waiting=3), max_rows=2)
    prompts = [(number, number + 1) for number in range(10)]
    with Engine(config, runner_factory=fake_factory) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=5, seed=3))
        again = engine.generate(prompts[:1], SamplingParams(max_tokens=5, seed=3))
    assert [list(c.token_ids) for c in completions] == [fake_completion(p, 3, 5, VOCAB) for p in prompts]
    assert again == completions[:1]
    assert {c.finish_reason for c in completions} == {"length"}
    assert completions[0].usage.completion_tokens == 5


def test_generate_tells_how_much_of_a_prompt_was_cached() -> None:
    with Engine(make_config(), runner_factory=fake_factory) as engine:
        usages = [engine.generate([range(40)], SamplingParams(max_tokens=5))[0].usage for _ in range(2)]
    assert [usage.cached_tokens for usage in usages] == [0, 32]


def test_generate_ends_a_text_before_its_stop_string(tmp_path: Path) -> None:
    tokenizer = text_tokenizers.byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    sampling = SamplingParams(max_tokens=40, seed=1)
    config = replace(make_config(), model=ModelConfig(path=str(tmp_path)))
    with Engine(config, runner_factory=lambda c, p: FakeRunner(fake_memory(), vocab_size=size)) as engine:
        [whole] = engine.generate(["the end is not"], sampling)
        assert whole.text == tokenizer.decode(list(whole.token_ids))
        assert whole.usage.prompt_tokens == len(tokenizer.encode("the end is not").ids)
        stop = whole.text[20:23]
        [cut] = engine.generate(["the end is not"], replace(sampling, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.usage.completion_tokens == len(cut.token_ids) < 40


@pytest.mark.parametrize(
    ("prompts", "error"), [([(1,), (1,) * 300], RejectedError), ([(1,), ()], InvalidPromptError)]
)
def test_generate_raises_for_a_prompt_that_cannot_be_served_and_goes_on_afterwards(
    prompts: list[tuple[int, ...]], error: type[MlxdError]
) -> None:
    with Engine(make_config(), runner_factory=fake_factory) as engine:
        with pytest.raises(error):
            engine.generate(prompts, SamplingParams(max_tokens=5, seed=3))
        [completion] = engine.generate([(1,)], SamplingParams(max_tokens=5, seed=3))
    assert list(completion.token_ids) == fake_completion((1,), 3, 5, VOCAB)


@pytest.mark.parametrize("token", [1.5, "a", None])
def test_generate_refuses_what_is_no_token_id_and_goes_on_afterwards(token: Any) -> None:
    with Engine(make_config(), runner_factory=fake_factory) as engine:
        with pytest.raises(InvalidPromptError, match="not a token id"):
            engine.generate([[1, token, 2]], SamplingParams(max_tokens=3))
        [completion] = engine.generate([np.array([1, 2])], SamplingParams(max_tokens=3, seed=3))
    assert list(completion.token_ids) == fake_completion([1, 2], 3, 3, VOCAB)


def test_a_stop_string_that_is_not_in_a_list_is_not_taken_for_one_of_letters() -> None:
    wrong: Any = "END"
    with (
        Engine(make_config(), runner_factory=fake_factory) as engine,
        pytest.raises(InvalidParamError, match=r"sampling\.stop is 'END'; it must be a list of strings"),
    ):
        engine.generate([[1]], SamplingParams(max_tokens=3, stop=wrong))


def test_generate_raises_when_the_engine_fails(caplog: pytest.LogCaptureFixture) -> None:
    def failing(config: Config, progress: Progress) -> Runner:
        return FakeRunner(fake_memory(), fail_at_step=2)

    with caplog.at_level(logging.CRITICAL), Engine(make_config(), runner_factory=failing) as engine:
        with pytest.raises(EngineFailedError, match="fails as asked"):
            engine.generate([(1, 2)])
        with pytest.raises(EngineFailedError):
            engine.generate([(1, 2)])

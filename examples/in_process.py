"""Several prompts completed inside this process: the same engine, no daemon and no sockets."""

import sys

from mlxd.scheduler import Config, Engine, SamplingParams

CONFIG = """
version: 1
cache: {budget: 256MiB}
decode: {warmup_s: 5}
tenants:
  - name: me   # nobody connects, so the token behind this hash is never asked for
    token_sha256: "0000000000000000000000000000000000000000000000000000000000000000"
"""
PROMPTS = ("The capital of France is", "The opposite of hot is")

config = Config.load(sys.argv[1]) if len(sys.argv) > 1 else Config.parse(CONFIG)
with Engine(config) as engine:
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=16, temperature=0))
for prompt, answer in zip(PROMPTS, answers, strict=True):
    print(f"{prompt}{answer.text!r}")

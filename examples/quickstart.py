"""Ask a running daemon (`mlxd serve deploy/mlxd.yaml`) one question and print the answer as it comes."""

import os

from mlxd.scheduler import Client, SamplingParams

ENDPOINT = os.environ.get("MLXD_ENDPOINT", "ipc:///tmp/mlxd.sock")
TOKEN = os.environ.get("MLXD_TOKEN", "change-me")

with Client(ENDPOINT, token=TOKEN) as client:
    messages = [{"role": "user", "content": "Name three rivers in Europe."}]
    for chunk in client.stream(messages=messages, sampling=SamplingParams(max_tokens=64, temperature=0)):
        print(chunk.text, end="", flush=True)
    print()

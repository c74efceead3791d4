"""Several requests at once over one connection: answers arrive in the order they finish."""

import asyncio
import os

from mlxd.scheduler import AsyncClient, SamplingParams

ENDPOINT = os.environ.get("MLXD_ENDPOINT", "ipc:///tmp/mlxd.sock")
TOKEN = os.environ.get("MLXD_TOKEN", "change-me")
PROMPTS = ("The capital of France is", "Water boils at", "The opposite of hot is")


async def answer(client: AsyncClient, prompt: str) -> tuple[str, str]:
    completion = await client.generate(prompt, SamplingParams(max_tokens=16, temperature=0))
    return prompt, completion.text


async def main() -> None:
    async with AsyncClient(ENDPOINT, token=TOKEN) as client:
        for finished in asyncio.as_completed([answer(client, prompt) for prompt in PROMPTS]):
            prompt, text = await finished
            print(f"{prompt}{text!r}")


asyncio.run(main())

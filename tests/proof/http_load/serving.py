"""Runs the server of the load: the example, with two endpoints that only the load uses."""

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

import memstate as ms
import memstate.integrations.transformers as mst
from examples.serve_http.app import app
from tests.support.tiny_models import without_gpu_kernels

ROWS, TOKENS = 32, 1024


def serve(folder: str, port: int) -> None:
    """Serves the model of a folder until SIGTERM comes."""
    with without_gpu_kernels():
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
        mem = mst.manager(model, slots=8 * ROWS, max_requests=ROWS, tokens=TOKENS, prefix=ms.Prefix())
        server = mst.Server(model, mem, tokenizer=tokenizer)
        made = app(server, tokenizer, folder)
        watch(made, server)
        gc.freeze()  # as the example does
        uvicorn.run(made, port=port, log_level="warning", timeout_graceful_shutdown=10)


def watch(made: FastAPI, server: mst.Server) -> None:
    """Adds the endpoints of the load."""

    @made.get("/left")
    async def left() -> dict[str, Any]:
        """Returns requests, rows, faults and memory of the server. Without clients, requests and rows must be 0."""
        audit = await asyncio.wrap_future(server.call(server.mem.audit))
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return {
            "requests": server.waiting + server.running, "rows": len(server.mem.rows),
            "faults": "" if audit.clean else str(audit), "tasks": len(asyncio.all_tasks()), "MB": resident / 1e6,
            "cpu": time.process_time(),
        }  # fmt: skip

    @made.post("/direct")
    async def direct(asked: dict[str, Any]) -> float:
        """Runs requests without HTTP, as many at a time as there are clients. Returns the duration in seconds."""
        cases: Iterator[Any] = iter(asked["cases"])

        async def client() -> None:
            for tokens, most in cases:
                async for _ in server.stream(mst.Prompt(tokens, most=most, salt=asked["salt"])):
                    pass

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(asked["clients"])))
        return time.perf_counter() - began

"""Serves a hybrid model of Transformers over HTTP, with the endpoints of OpenAI's API. It has no authentication.

python -m examples.serve_http MODEL [--port 8000] [--slots 64] ...      # the extras `http` and `transformers`

asked      the bodies of requests
answer     runs one request, and sends its answer
app        the endpoints, and errors
"""

import gc
from argparse import ArgumentParser

import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

import memstate as ms
import memstate.integrations.transformers as mst
from examples.serve_http.app import app

parser = ArgumentParser(prog="python -m examples.serve_http")
parser.add_argument("model", help="a folder or a name; clients name it so, too")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--slots", type=int, default=64, help="states in memory, of running requests and of the cache")
parser.add_argument("--rows", type=int, default=16, help="requests that run at a time")
parser.add_argument("--tokens", type=int, default=4096, help="tokens of a prompt and its answer at most")
given = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(given.model)
model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").to(device).eval()
mem = mst.manager(model, slots=given.slots, max_requests=given.rows, tokens=given.tokens, prefix=ms.Prefix())
made = app(mst.Server(model, mem, tokenizer=tokenizer), tokenizer, given.model)
gc.freeze()  # objects made so far stay alive, so full collections (a tenth of a second) need not visit them
uvicorn.run(made, host=given.host, port=given.port, access_log=False, timeout_graceful_shutdown=30)

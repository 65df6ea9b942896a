"""Serves prompts by continuous batching over a hybrid model of Transformers, with a prefix cache.

python examples/transformers_serve.py MODEL "a long shared text" "question one" "question two"
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import memstate as ms
import memstate.integrations.transformers as mst

name, shared, *questions = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
mem = mst.manager(model, slots=32, max_requests=4, tokens=4096, prefix=ms.Prefix())

text = tokenizer(shared).input_ids
list(mst.serve(model, mem, [mst.Prompt(text, most=1)]))  # reads the shared text once
prompts = [mst.Prompt(text + tokenizer(question).input_ids, id=question, most=20) for question in questions]
for event in mst.stream(model, mem, prompts, tokenizer=tokenizer):
    if isinstance(event, mst.Served):
        answer = tokenizer.decode(event.tokens, skip_special_tokens=True)
        print(f"{event.id}: {answer} ({event.cached} tokens of the prompt were cached, {event.reason})")
print(mem.stats().prefix)

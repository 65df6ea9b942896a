"""Serves prompts by continuous batching over a hybrid model of Transformers, with a prefix cache.

python examples/transformers_serve.py MODEL "a long shared text" "question one" "question two"
"""

from argparse import ArgumentParser

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import memstate as ms
import memstate.integrations.transformers as mst

parser = ArgumentParser(description="Answers questions about a shared text.")
parser.add_argument("model", help="a name or a folder")
parser.add_argument("shared", help="a text that all questions begin with; from 16 tokens on it is cached")
parser.add_argument("questions", nargs="+")
given = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(given.model)
model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").to(device).eval()
mem = mst.manager(model, slots=32, max_requests=4, tokens=4096, prefix=ms.Prefix())

text = tokenizer(given.shared).input_ids
list(mst.serve(model, mem, [mst.Prompt(text, most=1)]))  # reads the shared text once, so that its state is cached
prompts = [mst.Prompt(text + tokenizer(question).input_ids, id=question, most=20) for question in given.questions]
for event in mst.stream(model, mem, prompts, tokenizer=tokenizer):
    if isinstance(event, mst.Served):
        answer = tokenizer.decode(event.tokens, skip_special_tokens=True)
        print(f"{event.id}: {answer} ({event.cached} tokens of the prompt were cached, {event.reason})")
print(mem.stats().prefix)

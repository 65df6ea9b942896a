"""Generates with a hybrid model of Transformers whose states are in slots of memstate.

python examples/transformers_generate.py MODEL "first prompt" "a second, longer prompt"
"""

from argparse import ArgumentParser

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import memstate.integrations.transformers as mst

parser = ArgumentParser(description="Continues prompts in one batch.")
parser.add_argument("model", help="a name or a folder")
parser.add_argument("texts", nargs="+", help="prompts")
given = parser.parse_args()
name, texts = given.model, given.texts
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
mem = mst.manager(model, slots=4 * len(texts), max_requests=len(texts))
print(mem.layout, "decodes", "on slots" if mst.layout(model).on_slots and device == "cuda" else "on copies")

batch = tokenizer(texts, return_tensors="pt", padding=True).to(device)
with mst.StateCache(model, mem) as cache:
    arguments = {**batch, cache.argument: cache}  # the argument is named `cache` from Transformers 5.24 on
    out = model.generate(**arguments, max_new_tokens=20, do_sample=False)
    print(cache.lengths, "tokens read,", mem.free_slots, "of", mem.stats().capacity, "slots free")
for text in tokenizer.batch_decode(out, skip_special_tokens=True):
    print(text)

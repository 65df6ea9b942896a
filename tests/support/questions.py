"""Questions that readers type into the search box of the site, and the pages or sections that answer them.

The readers are an engine author, a researcher, an operator and a user of Transformers.
"""

GUIDE, KERNELS, PREFILL, FAQ, START = "docs/guide/", "docs/kernels/", "docs/prefill/", "docs/faq/", "docs/start/"
METRICS, TIERS, PROMISES, MODELS = "docs/metrics/", "docs/tiers/", "docs/promises/", "docs/transformers/"
ARCHITECTURE, CONTRIBUTING, BENCHMARKS = "ARCHITECTURE/", "CONTRIBUTING/", "benchmarks/"
FROM_LOG = "notebooks/07_from_a_log_to_a_policy/"
MANAGER, ERRORS = "docs/api/engine/#memstate.StateManager", "docs/api/errors/#memstate"

ENGINE = {
    "decode loop": (f"{GUIDE}#embed-it-in-a-decode-loop", "docs/concepts/#the-order-of-a-loop"),
    "cuda graph": (f"{GUIDE}#capture-cuda-graphs",),
    "out of slots": (
        f"{FAQ}#outofslots-outofrows-or-outofpages",
        f"{FAQ}#outofslots-though-requests-have-ended",
        f"{ERRORS}.OutOfSlots",
    ),
    "StaleHandle": (f"{FAQ}#stalehandle", f"{ERRORS}.StaleHandle"),
    "what does StaleHandle mean": (f"{FAQ}#stalehandle", f"{ERRORS}.StaleHandle"),
    "keep state at a given length of the prompt": (f"{PREFILL}#which-states-are-kept",),
    "kernel updates state in place": (f"{GUIDE}#use-in-place-kernels",),
    "chunked prefill": (PREFILL, f"{PREFILL}#the-loop", f"{PREFILL}#chunks-that-lose-nothing"),
    "speculative decoding": ("docs/speculation/",),
    "forward on another stream": (f"{GUIDE}#use-several-streams-or-devices",),
    "beam search": (f"{GUIDE}#sample-in-parallel", f"{MANAGER}.reorder", f"{MODELS}#generate"),
    "tensor parallel ranks": (f"{GUIDE}#run-on-several-ranks", f"{TIERS}#several-ranks"),
    "multi-turn conversation": ("docs/sessions/", "docs/sessions/#the-loop"),
    "states differ after a cache hit": (f"{FAQ}#answers-differ-after-a-hit",),
    "flash linear attention": (f"{KERNELS}#flash-linear-attention",),
    "ping-pong or redirect": (
        f"{GUIDE}#choose-a-strategy",
        "docs/concepts/#snapshots",
        "docs/strategies/",
        "docs/glossary/#ping-pong",
    ),
}
RESEARCHER = {
    "size of a state": (f"{TIERS}#sizing", "docs/concepts/#state-and-kv"),
    "supported models": (f"{GUIDE}#describe-the-state-of-a-model", f"{MODELS}#families"),
    "compare eviction policies": (f"{BENCHMARKS}#replays", f"{GUIDE}#choose-a-policy"),
    "write my own policy": (f"{CONTRIBUTING}#adding-a-policy",),
    "new kernel": (f"{CONTRIBUTING}#adding-an-operation",),
    "how is it tested": (f"{ARCHITECTURE}#how-it-is-proven",),
    "benchmark SGLang": (f"{BENCHMARKS}#host-time-beside-sglang",),
    "H100": (f"{BENCHMARKS}#on-an-h100",),
    "int8 states": ("docs/fewer_bits/", f"{TIERS}#int8"),
    "own policy": (f"{GUIDE}#choose-a-policy", f"{CONTRIBUTING}#adding-a-policy", f"{FROM_LOG}#a-policy-of-your-own"),
    "choose policy": (f"{GUIDE}#choose-a-policy",),
    "replay a trace": (f"{BENCHMARKS}#replays", "docs/capacity/#with-a-trace"),
    "trees of drafts": ("docs/speculation/#trees-of-drafts",),
    "what is a boundary": ("docs/glossary/#boundary",),
    "own placement": (f"{PREFILL}#which-states-are-kept",),
    "difference to vLLM": ("docs/comparison/", "docs/comparison/#vllms-connectors-for-hybrid-models"),
}
OPERATOR = {
    "hit rate is 0": (f"{FAQ}#the-hit-rate-is-0", f"{METRICS}#the-hit-rate-fell-why"),
    "hit rate": (f"{FAQ}#the-hit-rate-is-0", f"{METRICS}#the-hit-rate-fell-why", "docs/glossary/#hit"),
    "prometheus": (METRICS,),
    "grafana dashboard": (METRICS,),
    "how much memory do I need": ("docs/capacity/", "docs/capacity/#an-example", f"{GUIDE}#choose-sizes"),
    "reasoning": (f"{FAQ}#each-turn-of-a-chat-computes-the-last-one-again",),
    "slot leak": (f"{METRICS}#slots-leak", f"{GUIDE}#find-leaks"),
    "mooncake master": ("docs/mooncake/#a-master",),
    "disk full": (f"{PROMISES}#processes-and-disks", f"{PROMISES}#stores-and-ranks"),
    "install": (f"{START}#install",),
    "upgrade": (f"{TIERS}#upgrading", "docs/record-format/#versions"),
    "isolate tenants": ("SECURITY/#tenants-of-one-process",),
    "json logs": (f"{METRICS}#logs",),
    "inspect a running server": ("docs/inspector/#look-at-a-running-process",),
    "SGLang server start": ("docs/sglang/#start-a-server-with-it",),
    "events for a router": ("docs/events/",),
    "vllm log": ("docs/capacity/#a-trace-of-your-own-server", f"{FROM_LOG}#1-a-log"),
    "sglang log": ("docs/capacity/#a-trace-of-your-own-server", f"{FROM_LOG}#1-a-log"),
    "storage is slow": (f"{METRICS}#is-storage-keeping-up", f"{TIERS}#what-the-counters-say"),
}
TRANSFORMERS = {
    "model.generate": (f"{MODELS}#generate", MODELS),
    "continuous batching transformers": (f"{MODELS}#serve", MODELS),
    "stream tokens": (
        f"{MODELS}#serve",
        f"{MODELS}#a-server-that-threads-and-asyncio-use",
        "docs/api/integrations/#memstate.integrations.transformers.stream",
    ),
    "LoRA adapter": (f"{MODELS}#other-weights",),
    "bf16": (f"{MODELS}#bf16-and-autocast",),
    "model families": (f"{MODELS}#families",),
    "assisted generation": (f"{MODELS}#generate-with-an-assistant",),
    "several samples of one prompt": (f"{MODELS}#several-samples-of-a-prompt", f"{GUIDE}#sample-in-parallel"),
    "cache the system prompt": (f"{MODELS}#start-generate-from-cached-states", f"{MODELS}#chats", f"{PREFILL}#chats"),
    "threads": (f"{MODELS}#a-server-that-threads-and-asyncio-use", f"{FAQ}#a-call-from-another-thread-or-stream"),
    "custom model": (f"{MODELS}#a-model-of-your-own",),
    "speed beside generate": (f"{MODELS}#what-a-step-costs", f"{BENCHMARKS}#a-served-model"),
    "save states to disk": (f"{MODELS}#keep-states-in-host-memory-and-files", TIERS),
    "prompt lookup": (f"{MODELS}#guess-tokens-and-check-them", f"{MODELS}#generate-with-an-assistant"),
    "thinking": (f"{FAQ}#each-turn-of-a-chat-computes-the-last-one-again",),
    "chat template": (
        f"{FAQ}#each-turn-of-a-chat-computes-the-last-one-again",
        f"{PREFILL}#chats",
        f"{MODELS}#chats",
    ),
    "no attribute StateManager": (f"{FAQ}#memstate-has-no-attribute-statemanager",),
}
QUESTIONS = ENGINE | RESEARCHER | OPERATOR | TRANSFORMERS

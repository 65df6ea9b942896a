"""Keeps vLLM's states and KV in host memory and in a store, as a KV connector.

connector   `MemstateConnector`, which vLLM makes twice: in the scheduler and in each worker
scheduler   what is in host memory by content, what a prompt can load, what a step saves
worker      moves blocks between vLLM's memory, host memory and the store
messages    what the two sides tell each other
blocks      vLLM's memory as planes: a block is a slot, and vLLM's null block is slot 0
naming      names of records: all of the configuration that two processes must share
weights     what tells weights apart: the files that they come from
settings    `kv_connector_extra_config`
metrics     what the connector has done, as vLLM shows it

Only `connector` and `metrics` import vLLM.
"""

VERSIONS = ("0.30", "0.31", "0.32", "0.33")  # of vLLM that it works with

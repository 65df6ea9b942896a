"""Keeps vLLM's states and KV in host memory and in a store, with a KV connector.

connector   `MemstateConnector`, which vLLM makes twice: in the scheduler and in each worker
scheduler   knows what host memory has by content, what a prompt can load, and what a step saves
worker      moves blocks between vLLM's memory, host memory and the store
messages    plans and reports between scheduler and workers
blocks      vLLM's memory as planes: a block is a slot, and vLLM's null block is slot 0
naming      names of records, which stand for the configuration that two processes must share
weights     names weights by the files that they come from
settings    reads and checks `kv_connector_extra_config`
metrics     counts of the connector, in the forms that vLLM shows

Only `connector` and `metrics` import vLLM.
"""

VERSIONS = ("0.30", "0.31", "0.32", "0.33")  # vLLM versions that the connector works with

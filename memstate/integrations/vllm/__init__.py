"""Keeps vLLM's states and KV in host memory and in a store, by a KV connector.

connector   `MemstateConnector`, of which vLLM makes one in the scheduler and one in each worker
scheduler   knows by content what host memory has; decides what a prompt can load and what a step saves
worker      moves blocks between vLLM's memory, host memory and the store
messages    plans and reports between scheduler and workers
blocks      vLLM's memory as planes: a block is a slot, and vLLM's null block is slot 0
naming      names of records: two processes share records only if their configurations are equal
weights     names weights by the files from which they are loaded
settings    reads and checks `kv_connector_extra_config`
metrics     counts of the connector, as vLLM's statistics and as Prometheus metrics

Only `connector` and `metrics` import vLLM.
"""

VERSIONS = ("0.30", "0.31", "0.32", "0.33")  # vLLM versions with which the connector works

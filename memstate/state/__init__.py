"""A slot and the place of its bytes. Knows no free slot and no owner.

layout      planes, layers and their physical order; sharding: what tensor parallelism cuts
presets/    layouts of real models
regions     where blocks lie in memory; memory: allocates, releases and restores it
planes      the bytes of all slots, and the operations that move them
"""

"""Describes the bytes of a slot, and holds and moves the bytes of all slots. Knows no free slot and no owner.

layout      planes, layers and their order in memory
grouping    one layout for states of any shapes
sharding    the parts of a plane that tensor parallelism cuts
presets/    layouts of real models
regions     where blocks lie in memory
memory      tile tables, and the release and return of memory
planes      the bytes of all slots, and the operations that move them
"""

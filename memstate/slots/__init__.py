"""Free slots and their owners. Knows no plane and no byte.

allocator   the bitmap of free slots, and the exact count
registers   where slot ids live, and the launches that change them
commands    records changes of owners and sends them in packets; packet: one of them; upload: its way to the device
journal     the last changes of owners
inspect     all owners as plain data; audit: leaked, doubly owned, or owned but free slots
readback    slot ids on their way to the host
"""

"""Manages free slots and their owners. This folder does not know planes or the bytes of states.

allocator   the bitmap of free slots, and their number
registers   the cells that hold slot ids, and the launches that change them
commands    records changes of owners, and sends them in packets
packet      one packet: its changes, and its bytes in an upload
upload      copies packets to the device
journal     the last changes of owners
inspect     the owners of all slots as plain data, and a file of them
audit       finds leaked, doubly owned, and owned but free slots
readback    copies slot ids to the host
"""

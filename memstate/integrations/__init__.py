"""Interfaces of other projects over the public calls of memstate: a folder for each, imported only where it is used."""

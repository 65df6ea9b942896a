"""The command line, and the programs behind it. They use only public calls of memstate."""

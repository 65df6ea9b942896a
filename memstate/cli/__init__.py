"""The command line, and the programs behind it: users of the public interface."""

"""The commands of the tools: options, and what is printed. Each imports what it needs when it runs."""

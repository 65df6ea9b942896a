"""The commands of the tools: their options, and what they print. Each command imports its libraries when it runs."""

"""Traces that are made up, or made of the logs of servers without what the logs say."""
